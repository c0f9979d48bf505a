"""The evaluation section of the config: validations while training, samples, and what is asked of the trained model."""

from __future__ import annotations

from pydantic import Field, model_validator

from training.config.section import Section


class EvaluationConfig(Section):
    every_steps: int = Field(250, ge=0, description="Steps between quick validations while training; 0: none.")
    quick_sequences: int = Field(64, ge=1, le=1_000_000, description="Sequences in a quick validation.")
    early_stop_validations: int = Field(
        0, ge=0, le=10_000, description="Stop after so many quick validations without a new best; 0: never."
    )
    prompts: tuple[str, ...] = Field(("",), description="Prompts of the samples that each evaluation generates.")
    samples_while_training: int = Field(
        32, ge=0, le=100_000, description="New tokens per sample of each validation while training; 0: no samples then."
    )
    sample_tokens: int = Field(64, ge=1, le=100_000, description="New tokens per sample.")
    temperature: float = Field(0.8, ge=0, le=10, description="Sampling temperature; 0: greedy.")
    top_k: int = Field(50, ge=0, le=1_000_000, description="Sample from the k likeliest tokens; 0: from all.")
    tasks: tuple[str, ...] = Field(
        (), description="Downstream tasks for the trained model: names of lm-evaluation-harness, or of `task_files`."
    )
    task_files: tuple[str, ...] = Field(
        (), description="Task files of its format (YAML, data beside it), or folders of them; all, without `tasks`."
    )
    few_shot: int = Field(-1, ge=-1, le=1000, description="Examples before each question; -1: as each task has it.")
    task_limit: int = Field(0, ge=0, description="Documents per task; 0: all.")

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
        return self
