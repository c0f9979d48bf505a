"""RunConfig: the one typed config of a run, whether it comes from a preset, a YAML file or the form in the UI.

Every field has a description, bounds and a literal default, so that a form made from the schema explains itself.
Combinations that do not work are refused in each section's `check`, with the numbers and the cure.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from training.config.data import DataConfig
from training.config.evaluation import EvaluationConfig
from training.config.export import ExportConfig
from training.config.launch import LaunchConfig, TrainerConfig
from training.config.model import ModelConfig
from training.config.parallel import ParallelConfig
from training.config.prices import PricesConfig
from training.config.promotion import GatesConfig, RegistryConfig, RolloutConfig
from training.config.section import Section
from training.config.size_rule import filled
from training.config.store import StoreConfig
from training.config.train import TrainConfig


class CheckpointConfig(Section):
    """The schedule of checkpoints, and which of them are kept."""

    every_steps: int = Field(500, ge=1)
    """Steps between checkpoints. The last step always has one."""
    keep_last: int = Field(2, ge=1, le=1000)
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss."""
    keep_every_steps: int = Field(0, ge=0)
    """Also keep each checkpoint whose step is a multiple of this number; 0 keeps none of these."""
    memory_every_steps: int = Field(0, ge=0)
    """Steps between copies of the training state in the memory of each rank's host and of one other host; 0 makes no
    copies. A failed run continues from such a copy if it is newer than the checkpoints on disk.
    """
    memory_dir: str = Field("/dev/shm/shardline", pattern=r"^(/[A-Za-z0-9._-]+){3,}$")
    """Folder for the copies in memory on each host. It is made if it is missing; the folder above it must exist, on a
    file system in memory (tmpfs) such as /dev/shm.
    """


class ProfileConfig(Section):
    """Measurements of where a step's time goes."""

    steps: tuple[int, ...] = ()
    """Steps to record with torch's profiler, e.g. [20, 21]."""
    split_every_steps: int = Field(0, ge=0)
    """Steps between two steps whose time is measured part by part (data, forward, …). 0 means about ten measured steps
    in a run, or every tenth step if the run has fewer than 100.
    """
    nsys: bool = False
    """Run the ranks under Nsight Systems, where it is installed."""


class RunConfig(Section):
    """A whole run: corpus, model, training, hosts, checks and registration."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Short name of the run. It names the MLflow experiment too, and the registered model unless registry.model_name
    does.
    """
    data: DataConfig = DataConfig()
    """The corpus, and how it becomes tokens."""
    model: ModelConfig = ModelConfig()
    """The shape of the model, and where its initial weights come from."""
    train: TrainConfig = TrainConfig()
    """Batch size, learning-rate schedule, optimizer and seed."""
    parallel: ParallelConfig = ParallelConfig()
    """How training is distributed over devices, and its precision."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The schedule of checkpoints, and which of them are kept."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Validation, text samples and downstream tasks."""
    profile: ProfileConfig = ProfileConfig()
    """Measurements of where a step's time goes."""
    export: ExportConfig = ExportConfig()
    """Exported formats, and the bounds within which they must match the trained model."""
    registry: RegistryConfig = RegistryConfig()
    """Name and description of the model in the registry."""
    gates: GatesConfig = GatesConfig()
    """Conditions that a model version must meet before it can become champion."""
    rollout: RolloutConfig = RolloutConfig()
    """How a new champion takes over, and what triggers a rollback."""
    launch: LaunchConfig = LaunchConfig()
    """Where ranks run, and what happens when a host fails."""
    store: StoreConfig = StoreConfig()
    """An object store where token shards and checkpoints outlive this machine."""
    prices: PricesConfig = PricesConfig()
    """Prices of devices, to say what a run costs."""
    trainer: TrainerConfig = TrainerConfig()
    """A training program to run instead of Shardline's own."""
    preset: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    """Name of the preset that this config began with, for reports and hints. Shardline fills it in."""

    @property
    def objective(self) -> Literal["causal", "masked"]:
        """BERT predicts masked tokens, all others the next one."""
        return "masked" if self.model.architecture == "bert" else "causal"

    @property
    def model_name(self) -> str:
        return self.registry.model_name or self.name

    @model_validator(mode="before")
    @classmethod
    def choose_by_size(cls, fields: Any) -> Any:
        """Fill in what `model.size` chooses and `fields` do not give."""
        return filled(fields)

    @model_validator(mode="after")
    def check(self) -> RunConfig:
        """Raises ValueError for combinations of sections that do not work, with the numbers and the cure."""
        if self.trainer.given:  # the user's program decides what its ranks do
            return self
        train, parallel = self.train, self.parallel
        if self.data.split == "all":
            raise ValueError("data.split=all holds everything out and leaves nothing to train on: choose another split")
        if train.optimizer_path and self.model.init != "pretrained":
            raise ValueError(
                f"train.optimizer_path = {train.optimizer_path} has moments of trained weights, and the weights are "
                "random: set model.init=pretrained and model.path to that model, or leave it out"
            )
        tp, cp = max(1, parallel.tp), max(1, parallel.cp)
        model_ranks = tp * max(1, parallel.pp) * cp
        axes = "tp*pp*cp" if cp > 1 else "tp*pp"
        is_whole_mesh = isinstance(parallel.stages, str)
        if is_whole_mesh and parallel.ranks % model_ranks:
            raise ValueError(
                f"parallel.ranks = {parallel.ranks} is not divisible by {axes} = {model_ranks}: "
                "change parallel.tp, parallel.pp, parallel.cp or parallel.ranks"
            )
        if cp > 1 and train.context % (2 * cp):
            raise ValueError(
                f"train.context = {train.context} tokens cannot be split over parallel.cp = {cp} ranks, each of which "
                f"takes two of {2 * cp} equal pieces: make train.context a multiple of {2 * cp}, or change parallel.cp"
            )
        if parallel.sequence_parallel == "on" and (train.context // cp) % tp:
            raise ValueError(
                f"train.context = {train.context} tokens{f' / cp = {cp}' if cp > 1 else ''} make no equal pieces for "
                f"parallel.tp = {tp} ranks: make train.context a multiple of {cp * tp}, or set "
                "parallel.sequence_parallel=off"
            )
        replicas = parallel.ranks // model_ranks
        if is_whole_mesh and replicas and train.global_batch % replicas:
            raise ValueError(
                f"train.global_batch = {train.global_batch} cannot be split evenly over {replicas} data-parallel ranks "
                f"(parallel.ranks = {parallel.ranks}): make train.global_batch a multiple of {replicas}, "
                "or change parallel.ranks"
            )
        if self.checkpoint.memory_every_steps and self.launch.launcher == "kubernetes":
            raise ValueError(
                f"checkpoint.memory_every_steps = {self.checkpoint.memory_every_steps} keeps copies in the memory of "
                "hosts from one attempt to the next, and a pod's memory ends with it (launch.launcher=kubernetes): set "
                "it to 0, and checkpoint.every_steps to fewer steps"
            )
        if beyond := [step for step in self.profile.steps if not 0 < step <= train.steps]:
            raise ValueError(f"profile.steps = {beyond} are not among the {train.steps} of train.steps: change them")
        if train.compile is True and (why := parallel.row.cannot_compile):
            raise ValueError(
                f"train.compile=true cannot be had with parallel.strategy={parallel.strategy}, which {why}: use fsdp, "
                "which shards the same, or train.compile=false"
            )
        if train.optimizer == "muon":
            _check_muon(parallel)
        if parallel.strategy == "single" and max(parallel.ranks, model_ranks) > 1:
            raise ValueError(
                f"parallel.strategy=single runs on 1 rank, parallel.ranks = {parallel.ranks} and {axes} = "
                f"{model_ranks}: choose ddp, fsdp or zero1-3, or set them to 1"
            )
        return self


def _check_muon(parallel: ParallelConfig) -> None:
    """Raise ValueError for what Muon does not run with."""
    row = parallel.row
    if not row.orthogonalizes:
        instead = "fsdp, which shards the same" if row.stage == 3 else "fsdp, which shards more, or zero1"
        why = (
            f"parallel.strategy={parallel.strategy}, which cuts gradients into flat pieces, and DeepSpeed's own Muon "
            f"scales its updates in another way: use {instead}"
        )
    elif parallel.offload not in {"auto", "none"}:
        why = (
            f"parallel.offload={parallel.offload}, since its products would run on the host: set parallel.offload=none"
        )
    elif parallel.fp8_by == "torchao":
        why = "parallel.fp8_by=torchao, whose weights it cannot update: set parallel.fp8_by=shardline"
    else:
        return
    raise ValueError(f"train.optimizer=muon does not run with {why}; or set train.optimizer=adamw")
