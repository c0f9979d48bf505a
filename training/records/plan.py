"""What each stage leaves for the next: small frozen records, one JSON file each, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from training.config.run import RunConfig
from training.config.launch import Cause
from training.config.parallel import Precision, Strategy
from training.prediction import ModelShape, Prediction, RankedChoice


class Record(BaseModel):
    """A stage's result. `write` renames into place, so a reader never meets half a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> None:
        write_atomically(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside, fsync, rename: after a crash at any point the path holds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with aside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_config(config: BaseModel) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


# 1. text -> shards


class SourceFile(Record):
    name: str
    num_bytes: int
    sha256: str


class Stretch(Record):
    """Tokens in a row that were read from one file: the manifest's `sources[source]`."""

    source: int
    tokens: int
    text_bytes: int


class Shard(Record):
    """One token file of one split; `name` is relative to the shard folder, without suffix.

    `stretches`: of a validation shard, in order. None: not recorded (train, and folders made before they were).
    """

    name: str
    split: Literal["train", "validation"]
    tokens: int
    documents: int
    text_bytes: int
    sha256: str
    stretches: tuple[Stretch, ...] | None = None


class TokenShards(Record):
    """The manifest of a shard folder. No paths, times or hosts: equal inputs give equal bytes."""

    fingerprint: str
    sources: tuple[SourceFile, ...]
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_id: int
    mask_id: int | None
    dtype: Literal["uint16", "uint32"]
    split_rule: str
    shards: tuple[Shard, ...]
    skipped: int
    skipped_examples: tuple[str, ...]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.shards if shard.split == split)

    def text_bytes(self, split: str) -> int:
        return sum(shard.text_bytes for shard in self.shards if shard.split == split)


# 3. the plan


class RunPlan(Record):
    """runs/ID/plan.json: everything that a rank needs, written once by the head node.

    `config` is what was asked for, the rest what was chosen: where they say the same thing, ranks go by the latter.
    `mesh`: sizes of the axes pp, dp and tp, outermost first; ranks that share a layer's matrices are neighbours.
    `hosts`: their names, in the order of ranks; empty in plans that name none.
    `micro_batches`: sequences per forward pass, by data-parallel replica; all make `accumulation` of them a step.
    `rebalance` lets them change while the run goes on, each up to its `largest_micro_batches`.
    `ranking`: the choices there were, the one taken first; at the end some that do not fit.
    `sequences`: in all steps together; fewer than steps x global batch where max_epochs ends within the last batch.
    """

    run_id: str
    config: RunConfig
    shards_dir: str
    shards_fingerprint: str
    vocab_size: int
    end_id: int
    mask_id: int | None
    shape: ModelShape
    device_kind: Literal["cpu", "cuda"]
    strategy: Strategy
    offload: Literal["none", "optimizer", "parameters"]
    activation_checkpointing: Literal["none", "selective", "full"]
    mesh: dict[str, int]
    group_ranks: int = 0  # data-parallel ranks in a group, for hsdp and local-sgd
    hosts: tuple[str, ...] = ()
    ranks_per_host: tuple[int, ...]
    threads_per_rank: int
    micro_batches: tuple[int, ...]
    largest_micro_batches: tuple[int, ...]
    accumulation: int
    rebalance: bool
    precision: Precision
    steps: int
    sequences: int
    predicted: Prediction
    ranking: tuple[RankedChoice, ...]
    reasons: tuple[str, ...]
    mlflow_run_id: str = ""

    @property
    def world_size(self) -> int:
        return sum(self.ranks_per_host)

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """Fields of the config by section that pin, on the same machines, what this plan chose."""
        parallel = {
            "strategy": self.strategy,
            "tp": self.mesh["tp"],
            "pp": self.mesh["pp"],
            "group_ranks": self.group_ranks,
            "offload": self.offload,
            "ranks": self.world_size,
            "precision": self.precision,
            "shares": self.micro_batches if self.is_unequal else "equal",
            "rebalance": "on" if self.rebalance else "off",
        }
        train = {
            "micro_batch": 0 if self.is_unequal else self.micro_batch,
            "activation_checkpointing": self.activation_checkpointing,
        }
        return {"parallel": parallel, "train": train}

    @property
    def dp(self) -> int:
        """Data-parallel ranks: each holds (with its tp and pp peers) the whole model and takes its share of a batch."""
        return self.mesh["dp"]

    @property
    def micro_batch(self) -> int:
        """The largest one."""
        return max(self.micro_batches)

    @property
    def is_unequal(self) -> bool:
        """Whether replicas have shares of different sizes."""
        return len(set(self.micro_batches)) > 1

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step, over all ranks."""
        return self.config.train.global_batch * self.config.train.context


# 6.-9. results


StoppedBy = Literal["steps", "signal", "hours", "early stop"]


class TrainFailure(Record):
    """result.json where training failed, until a resume succeeds: why, and the newest whole checkpoint, if any."""

    step: int
    checkpoint: str
    stopped_by: Cause
    detail: str


def train_failure(path: Path) -> TrainFailure | None:
    """What a result.json says of a failure; None if training came to its end."""
    content = json.loads(path.read_bytes())
    return TrainFailure.model_validate(content) if "detail" in content else None


class TrainResult(Record):
    """How training ended. Rates are of the last attempt, over all ranks, without first step, validation, checkpoints.

    `mfu`: share of the ranks' measured matmul rate (None: not measured). `peak_memory_gib`: of one rank, allocated on
    a GPU, resident on a CPU; `memory`: peaks and averages of all that training/monitoring/device_stats.py reads.
    """

    step: int
    loss: float
    tokens: int
    samples_per_s: float
    tokens_per_s: float
    step_ms: float
    mfu: float | None
    device_utilisation: float | None
    peak_memory_gib: float
    memory: dict[str, float]
    skipped_steps: int
    checkpoint: str
    checkpoint_sha256: str
    stopped_by: StoppedBy
    train_s: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError if training failed."""
        if failure := train_failure(path):
            raise ValueError(
                f"{path}: training ended by {failure.stopped_by} ({failure.detail}), its newest checkpoint is of step "
                f"{failure.step}: `shardline resume {path.parent.name}` goes on"
            )
        return super().read(path)
