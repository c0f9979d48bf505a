"""A corpus in which each token is its place in the stream plus FIRST, so that a batch says where it comes from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.configs import inventory, tiny_config
from tests.support.manifests import write_manifest
from tests.support.tiny_shards import END, MASK
from training.data.batch import IGNORED, Batch
from training.data.loader import Loader
from training.planner.plan import make_plan
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.shards.format import write_shard
from training.shards.packing import one_epoch

CPU = torch.device("cpu")
FIRST = 2
PACKINGS = ("stream", "documents", "padded", "best-fit")
CONTEXT = 16
BERT = {"model__architecture": "bert", "model__kv_heads": 0}
NUM_TOKENS = {"train": 1003, "validation": 217}


def write_numbered(folder: Path) -> Path:
    """Documents of 1 to 50 tokens over three shards, some cut by their borders, the last one without an end."""
    rng, written = np.random.default_rng(5), []
    for split, total in NUM_TOKENS.items():
        lengths = [1, 1, CONTEXT, 2 * CONTEXT, *rng.integers(1, 51, 100).tolist()]
        ends = np.cumsum(lengths)
        borders = [0, total // 3, total // 2, total]
        for index, (start, stop) in enumerate(itertools.pairwise(borders)):
            here = ends[(ends > start) & (ends <= stop)] - start
            tokens = np.arange(start + FIRST, stop + FIRST, dtype="uint16")
            shard = write_shard(folder, split=split, index=index, tokens=tokens, ends=here.tolist(), text_bytes=1)
            written.append(shard)
    write_manifest(folder, written, vocab_size=1100, end_id=END, mask_id=MASK)
    return folder


def plan_of(shards: Path, *, ranks: int = 1, **overrides: Any) -> RunPlan:
    config = tiny_config(parallel__ranks=ranks, train__context=CONTEXT, **overrides)
    epoch = one_epoch(shards, packing=config.train.packing, context=CONTEXT)
    manifest = TokenShards.read(shards / "manifest.json")
    return make_plan(config, inventory(ranks), shards=manifest, shards_dir=str(shards), epoch=epoch)


def one_pass(shards: Path, **overrides: Any) -> RunPlan:
    """Ends within a batch, whatever the packing: 7 x 3 divides none of the numbers of sequences."""
    overrides = {
        "train__steps": 1000,
        "train__max_epochs": 1,
        "train__global_batch": 21,
        "train__micro_batch": 7,
    } | overrides
    return plan_of(shards, **overrides)


def rows(batch: Batch) -> torch.Tensor:
    """Everything in a batch, [sequences, fields, context]."""
    return torch.stack([tensor for tensor in vars(batch).values() if tensor is not None], dim=1)


def global_batch(plan: RunPlan, step: int) -> tuple[torch.Tensor, int]:
    shares = [Loader(plan, dp_rank=rank, device=CPU).share(step) for rank in range(plan.dp)]
    (num_targets,) = {share.num_targets for share in shares}
    return torch.cat([rows(batch) for share in shares for batch in share.batches]), num_targets


def predicted(plan: RunPlan) -> np.ndarray:
    """Stream places of all targets, step by step."""
    targets = torch.cat([global_batch(plan, step)[0][:, 1] for step in range(plan.steps)]).numpy()
    return targets[targets != IGNORED] - FIRST
