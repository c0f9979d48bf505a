"""Gives baselines the model, the batches and the metrics file of a plan that Shardline trains."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from training.data.loader import Loader
from training.models.language_model import build_model
from training.records.plan import RunPlan
from training.shards.format import read_manifest


@dataclass(frozen=True)
class Job:
    """The plan of a baseline's run, and its data. `starts`: int64 [steps, batch], where in `tokens` sequences begin."""

    plan: RunPlan
    run_dir: Path
    device: torch.device
    tokens: np.ndarray
    starts: np.ndarray


def read_job(run_dir: Path) -> Job:
    plan = RunPlan.read(run_dir / "plan.json")
    shards_dir, manifest = Path(plan.shards_dir), read_manifest(Path(plan.shards_dir))
    (shard,) = (shard for shard in manifest.shards if shard.split == "train")
    tokens = np.memmap(shards_dir / f"{shard.name}.bin", dtype=manifest.dtype, mode="r")
    loader = Loader(plan, dp_rank=0, device=torch.device("cpu"))
    starts = np.stack([loader.spans(step)[:, 0] for step in range(plan.steps)])
    return Job(plan, run_dir, torch.device(plan.device_kind), tokens, starts)


def huggingface_model(plan: RunPlan) -> Any:
    """Return the model: the class that Shardline trains, with the same weights, in train mode."""
    model: Any = build_model(plan).hf
    if plan.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(plan.device_kind).train()


class Sequences(Dataset[dict[str, Tensor]]):
    """The sequences one by one, as Trainer and DataLoader expect; `labels` are the next tokens."""

    def __init__(self, job: Job) -> None:
        self.tokens, self.starts, self.context = job.tokens, job.starts.ravel(), job.plan.config.train.context

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        start = self.starts[place]
        tokens = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Rows:
    """Writes metrics.jsonl as Shardline's metrics rank does, with the columns that the benchmarks read."""

    def __init__(self, job: Job) -> None:
        self.job, self.file, self.step = job, (job.run_dir / "metrics.jsonl").open("w", buffering=1), 0
        self.since = time.perf_counter()

    def write(self, step: int, loss: float) -> None:
        """Write a row with the loss of step `step` (counted from 1) and the rate since the last row."""
        now = time.perf_counter()
        tokens_per_s = (step - self.step) * self.job.plan.batch_tokens / (now - self.since)
        row = {"step": step, "time_ms": int(time.time() * 1000), "loss": loss, "tokens_per_s": tokens_per_s}
        if self.job.device.type == "cuda":
            row["memory_peak/allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.file.write(json.dumps(row) + "\n")
        self.step, self.since = step, time.perf_counter()
