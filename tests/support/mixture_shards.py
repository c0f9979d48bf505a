"""A mixture of three sources as token shards, whose tokens are numbered on through all of them, and plans on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import numbered_corpus
from tests.support.manifests import write_manifest
from tests.support.numbered_corpus import END, FIRST, MASK
from training.data.batch import IGNORED
from training.records.plan import RunPlan
from training.records.token_shards import Shard
from training.shards.format import write_shard

TOKENS = (700, 300, 500)  # of each source's training text
NAMES = ("a", "b", "c")
STARTS = [0, *itertools.accumulate(TOKENS)]


def write_mixture(folder: Path) -> Path:
    """Documents of 50 tokens, the last of each source without an end; each source in two shards of each split."""
    written, index = list[Shard](), 0
    for split, part in itertools.product(("train", "validation"), range(3)):
        total = TOKENS[part] if split == "train" else TOKENS[part] // 4
        for start, stop in ((0, total // 2), (total // 2, total)):
            first = STARTS[part] + FIRST + start
            tokens = np.arange(first, first + stop - start, dtype="uint16")
            ends = [end - start for end in range(40, total, 50) if start < end <= stop]
            shard = write_shard(folder, split=split, index=index, tokens=tokens, ends=ends, text_bytes=1)
            written.append(shard.model_copy(update={"part": part}))
            index += 1
    write_manifest(folder, written, vocab_size=FIRST + 1600, end_id=END, mask_id=MASK, parts=NAMES)
    return folder


def plan_of(shards: Path, weights: Sequence[float] = (5, 2, 1), **more: Any) -> RunPlan:
    """The plan of a run on the mixture; `more` as section__field=value."""
    sources = [{"path": name, "name": name, "weight": weight} for name, weight in zip(NAMES, weights, strict=True)]
    usual = {"train__steps": 60, "train__global_batch": 12, "data__path": "", "data__sources": sources}
    return numbered_corpus.plan_of(shards, **(usual | more)).model_copy(update={"threads_per_rank": 1})


def sources_in(targets: torch.Tensor) -> list[int]:
    """The source of each sequence; none has two."""
    found = []
    for row in targets:
        own = row[row != IGNORED] - FIRST
        sources = set(np.searchsorted(STARTS, own.numpy(), side="right") - 1)
        assert len(sources) == 1, f"a sequence of sources {sources}"
        found.append(int(sources.pop()))
    return found
