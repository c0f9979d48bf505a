"""The evaluation section of the config: validations during training, text samples, tasks and held-out sets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training.config.data import SHARDS, SourceConfig
from training.config.section import Section

OWN_SET = "held-out"  # the name of the run's own held-out text among the sets
OF_TRAINING = ("weight", "epochs", "validation_path")  # settings of a source that a held-out set cannot have


class EvaluationConfig(Section):
    """Validation during training, text samples, downstream tasks and the evaluation of checkpoints."""

    every_steps: int = Field(250, ge=0, description="Steps between quick validations during training; 0 disables them.")
    quick_sequences: int = Field(
        64, ge=1, le=1_000_000, description="Number of held-out sequences in one quick validation."
    )
    early_stop_validations: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Stop training after this many quick validations in a row without a new best loss; 0 disables "
        "early stopping.",
    )
    prompts: Literal["auto"] | tuple[str, ...] = Field(
        "auto",
        description="Prompts from which each evaluation generates a text sample. auto: the first words of a few "
        "held-out documents, or, with data.path=stdlib, words of Python.",
    )
    samples_while_training: int = Field(
        32,
        ge=0,
        le=100_000,
        description="Number of new tokens in each sample that a validation during training generates; 0 generates "
        "no samples during training.",
    )
    sample_tokens: int = Field(
        64, ge=1, le=100_000, description="Number of new tokens in each sample of the final evaluation."
    )
    temperature: float = Field(
        0.8, ge=0, le=10, description="Sampling temperature of the samples; 0 means greedy decoding."
    )
    top_k: int = Field(
        50,
        ge=0,
        le=1_000_000,
        description="Each token is sampled from this many of the most likely tokens; 0 means from all of them.",
    )
    tasks: tuple[str, ...] = Field(
        (),
        description="Downstream tasks on which the trained model is evaluated: task names of lm-evaluation-harness, "
        "or of `task_files`.",
    )
    task_files: tuple[str, ...] = Field(
        (),
        description="Task files in the YAML format of lm-evaluation-harness, or folders of them, with their data "
        "beside them. All their tasks run if `tasks` is empty.",
    )
    few_shot: int = Field(
        -1,
        ge=-1,
        le=1000,
        description="Number of solved examples before each question; -1 means as each task defines it.",
    )
    task_limit: int = Field(0, ge=0, description="Maximum number of documents evaluated per task; 0 means all.")
    checkpoints: Literal["none", "beside"] = Field(
        "none",
        description="Which checkpoints are evaluated before training ends. none: only the last one, afterwards. "
        "beside: each checkpoint, beside training, on the run's held-out text, `held_out_sets` and `tasks`; training "
        "does not wait, and an evaluation that falls behind takes the newest checkpoint first.",
    )
    held_out_sets: tuple[SourceConfig, ...] = Field(
        (),
        description="Further texts on which checkpoints are evaluated, by name. What a set leaves out is as in the "
        "data section's defaults.",
    )
    checkpoint_devices: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of devices that evaluate a checkpoint beside training, each with the whole model: GPUs of "
        "this machine that training leaves free, or processes of low priority on its CPUs.",
    )
    checkpoint_timeout_s: float = Field(
        3600, gt=0, description="Seconds to wait, after training, for the evaluation of the last checkpoint."
    )

    @property
    def has_tasks(self) -> bool:
        return bool(self.tasks or self.task_files)

    @property
    def devices_beside(self) -> int:
        """The number of devices that evaluate checkpoints beside training; 0 if none are evaluated."""
        return 0 if self.checkpoints == "none" else self.checkpoint_devices

    @model_validator(mode="after")
    def check(self) -> EvaluationConfig:
        if self.early_stop_validations and not self.every_steps:
            raise ValueError(
                f"evaluation.early_stop_validations = {self.early_stop_validations} needs validations while training: "
                "set evaluation.every_steps"
            )
        return self

    @model_validator(mode="after")
    def check_sets(self) -> EvaluationConfig:
        """Raises ValueError for held-out sets that would not be used, or whose names or settings cannot work."""
        names = [OWN_SET, *(each.label for each in self.held_out_sets)]
        if self.held_out_sets and self.checkpoints == "none":
            raise ValueError(
                f"evaluation.held_out_sets ({len(self.held_out_sets)} of them) are for checkpoints, and "
                "evaluation.checkpoints=none evaluates none: set it to beside"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"evaluation.held_out_sets: several sets are called {twice[0]} ({OWN_SET} is the run's own text): give "
                "each a `name` of its own"
            )
        for each in self.held_out_sets:
            if given := [name for name in OF_TRAINING if getattr(each, name) is not None]:
                raise ValueError(
                    f"evaluation.held_out_sets: {each.label} has `{given[0]}`, which is for text to train on: all of a "
                    "set is held out; leave it away"
                )
            if each.path.startswith(SHARDS):
                raise ValueError(f"evaluation.held_out_sets: {each.path} are tokens: give the path of their text")
        return self
