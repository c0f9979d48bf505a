"""The launch.slurm section of the config: what a run asks Slurm for, and how its programs start on the nodes."""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from training.config.section import Section

# Ours to set: with others the launcher would not find its job again, or the job would carry our environment.
OURS = {
    "account",
    "array",
    "chdir",
    "comment",
    "constraint",
    "cpus-per-task",
    "dependency",
    "error",
    "export",
    "export-file",
    "get-user-env",
    "gpus-per-node",
    "job-name",
    "mem",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "output",
    "parsable",
    "partition",
    "qos",
    "requeue",
    "reservation",
    "signal",
    "test-only",
    "time",
    "wait",
    "wrap",
}
# `name`, or `name/version`: it is put behind `module load` in a shell.
ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]*$")]
OptionLine = Annotated[str, StringConstraints(pattern=r"^--[a-z][a-z-]+([= ]\S.*)?$")]


class SlurmConfig(Section):
    """The resources that a run asks Slurm for, and how its programs start on the nodes."""

    partition: str = ""
    """Partition to submit to; empty means the cluster's default."""
    account: str = ""
    """Account that the job is charged to; empty means your default."""
    qos: str = ""
    """Quality of service of the job; empty means your default."""
    reservation: str = ""
    """Reservation to run in; empty means none."""
    constraint: str = ""
    """Features that every node must have, e.g. a100&ib; empty means any node."""
    nodes: int = Field(1, ge=1, le=4096)
    """Number of nodes."""
    gpus_per_node: int = Field(0, ge=0, le=64)
    """Number of GPUs to use on each node; 0 means to train on the CPU."""
    slots: int = Field(0, ge=0, le=1024)
    """Number of ranks on each node; 0 means one per GPU, or one without GPUs."""
    cpus_per_node: int = Field(0, ge=0, le=4096)
    """Number of CPUs to ask for on each node; 0 means what the cluster gives."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory, in GiB, to ask for on each node; 0 means what the cluster gives."""
    time_limit_s: int = Field(0, ge=0)
    """Seconds that an allocation may last, in whole minutes; 0 means the partition's default. When it is over, the run
    asks for a new allocation and continues from its last checkpoint.
    """
    signal_s: int = Field(120, ge=10, le=65_535)
    """Seconds before the end of an allocation at which ranks save a checkpoint. Slurm may do it up to 60 s earlier."""
    options: tuple[OptionLine, ...] = ()
    """Further options of sbatch, as after #SBATCH in a job script, e.g. --exclusive or --mail-type=END."""
    modules: tuple[ModuleName, ...] = ()
    """Environment modules to load on each node before a program starts, e.g. cuda/12.4."""
    command_prefix: tuple[str, ...] = ()
    """Words before each program's command line, e.g. [apptainer, exec, --nv, image.sif]."""
    python: str = ""
    """Python interpreter on the nodes; empty means the launcher's own path, or `python` in a container or behind a
    command prefix.
    """

    @model_validator(mode="after")
    def check(self) -> SlurmConfig:
        taken = sorted({name for line in self.options if (name := option_name(line)) in OURS})
        if taken:
            raise ValueError(
                f"launch.slurm.options sets --{', --'.join(taken)}, which Shardline sets itself: use the field of "
                "launch.slurm for it, if there is one"
            )
        if 0 < self.gpus_per_node < self.slots:
            raise ValueError(
                f"launch.slurm.slots = {self.slots} on {self.gpus_per_node} GPUs: each rank needs a GPU of its own; "
                "set slots=0 for one per GPU"
            )
        if 0 < self.time_limit_s <= self.signal_s:
            raise ValueError(
                f"launch.slurm.time_limit_s = {self.time_limit_s} is no longer than signal_s = {self.signal_s}: the "
                "allocation would be over before a step is made; raise the limit"
            )
        return self

    @property
    def ranks_per_node(self) -> int:
        return self.slots or self.gpus_per_node or 1


def option_name(line: str) -> str:
    """The name in an option of sbatch: of --gres=gpu:2 it is gres."""
    return shlex.split(line)[0].lstrip("-").partition("=")[0]
