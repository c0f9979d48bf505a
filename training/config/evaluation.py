"""The evaluation section of the config: validations during training, text samples and downstream tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training.config.section import Section


class EvaluationConfig(Section):
    """Validation during training, text samples and downstream tasks."""

    every_steps: int = Field(250, ge=0)
    """Steps between quick validations during training; 0 disables them."""
    quick_sequences: int = Field(64, ge=1, le=1_000_000)
    """Number of held-out sequences in one quick validation."""
    early_stop_validations: int = Field(0, ge=0, le=10_000)
    """Stop training after this many quick validations in a row without a new best loss; 0 disables early stopping."""
    prompts: Literal["auto"] | tuple[str, ...] = "auto"
    """Prompts from which each evaluation generates a text sample. auto: the first words of a few held-out documents,
    or, with data.path=stdlib, words of Python.
    """
    samples_while_training: int = Field(32, ge=0, le=100_000)
    """Number of new tokens in each sample that a validation during training generates; 0 generates no samples during
    training.
    """
    sample_tokens: int = Field(64, ge=1, le=100_000)
    """Number of new tokens in each sample of the final evaluation."""
    temperature: float = Field(0.8, ge=0, le=10)
    """Sampling temperature of the samples; 0 means greedy decoding."""
    tasks: tuple[str, ...] = ()
    """Downstream tasks on which the trained model is evaluated: task names of lm-evaluation-harness, or of
    `task_files`.
    """
    task_files: tuple[str, ...] = ()
    """Task files in the YAML format of lm-evaluation-harness, or folders of them, with their data beside them. All
    their tasks run if `tasks` is empty.
    """
    few_shot: int = Field(-1, ge=-1, le=1000)
    """Number of solved examples before each question; -1 means as each task defines it."""
    task_limit: int = Field(0, ge=0)
    """Maximum number of documents evaluated per task; 0 means all."""
    checkpoints: Literal["none", "beside"] = "none"
    """Which checkpoints are evaluated before the last one. beside: each, in a process of its own beside training, which
    does not wait, on the run's held-out text, `held_out_sets` and `tasks`.
    """
    held_out_sets: dict[str, str] = Field({})
    """Further texts on which checkpoints are evaluated: name and path, which is read like data.path."""

    @property
    def has_tasks(self) -> bool:
        return bool(self.tasks or self.task_files)

    @model_validator(mode="after")
    def check(self) -> EvaluationConfig:
        if self.early_stop_validations and not self.every_steps:
            raise ValueError(
                f"evaluation.early_stop_validations = {self.early_stop_validations} needs validations while training: "
                "set evaluation.every_steps"
            )
        if self.held_out_sets and self.checkpoints == "none":
            raise ValueError(
                f"evaluation.held_out_sets ({', '.join(self.held_out_sets)}) would not be used: "
                "set evaluation.checkpoints=beside"
            )
        return self
