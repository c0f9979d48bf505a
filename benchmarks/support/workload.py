"""The training benchmarks' workloads: a corpus that every machine has, model sizes, and plans for them."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.config.run import RunConfig
from training.planner.plan import make_plan
from training.records.correction import Measurement
from training.records.inventory import Host, Inventory, Measured
from training.records.plan import RunPlan
from training.records.text_encoding import NOTHING_SPECIAL
from training.records.token_shards import TokenShards
from training.shards.format import MANIFEST, token_dtype, write_shard

CORPUS_CHARACTERS = 2_000_000
NEVER = 10**8


@dataclass(frozen=True)
class Size:
    """One model and its batch. `log_every`: steps between two readings of the loss, which every contestant makes."""

    name: str
    model: dict[str, Any]
    vocab_size: int
    context: int
    batch: int
    micro_batch: int
    log_every: int
    train: dict[str, Any] = field(default_factory=dict)


def write_corpus(folder: Path, *, vocab_size: int, text: Path | None = None) -> TokenShards:
    """Write token shards of a text file, or of this Python's standard library: one shard for each split.

    The `vocab_size` - 1 commonest characters are one token each, and all others share one. If `vocab_size` is above
    256, a token is a hash of four characters.
    """
    characters = (text.read_text() if text else _standard_library())[:CORPUS_CHARACTERS]
    codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    if vocab_size > 256:
        tokens = _hashed(codes[: len(codes) // 4 * 4].reshape(-1, 4)) % vocab_size
    else:
        common = np.array([code for code, _ in Counter(codes.tolist()).most_common(vocab_size - 1)])
        table = np.zeros(int(codes.max()) + 1, np.int64)
        table[common] = np.arange(1, len(common) + 1)
        tokens = table[codes]
    tokens = tokens.astype(token_dtype(vocab_size))
    held_out = len(tokens) // 20
    splits = (("train", tokens[:-held_out]), ("validation", tokens[-held_out:]))
    manifest = TokenShards(
        fingerprint="0" * 64,
        sources=(),
        tokenizer="characters",
        tokenizer_sha256="0" * 64,
        vocab_size=vocab_size,
        end_id=0,
        mask_id=None,
        text_encoding=NOTHING_SPECIAL,
        dtype=token_dtype(vocab_size),
        split_rule="tail",
        shards=tuple(
            write_shard(folder, split=split, index=0, tokens=part, ends=(), text_bytes=len(part))  # type: ignore[arg-type]
            for split, part in splits
        ),
        skipped=0,
        skipped_examples=(),
    )
    manifest.write(folder / MANIFEST)
    return manifest


def _standard_library() -> str:
    texts, length = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(texts[-1])
        if length >= CORPUS_CHARACTERS:
            break
    return "".join(texts)


def _hashed(pieces: np.ndarray) -> np.ndarray:
    """Hash rows [n, 4] -> [n], by a polynomial over a prime below 2^31."""
    total = np.zeros(len(pieces), np.int64)
    for column in pieces.T.astype(np.int64):
        total = (total * 1_000_003 + column) % 2_147_483_629
    return total


def measure(folder: Path, *, threads: int, ranks: int = 1) -> Measured:
    """Run training/measure.py in `ranks` processes, on a GPU each or on `threads` threads; return its record."""
    out = folder / "measured.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    subprocess.run([sys.executable, *torchrun, "-m", "training.measure", str(out), str(threads)], check=True)
    return Measured.read(out)


def inventory(measured: Measured, *, ranks: int, threads: int) -> Inventory:
    device = measured.devices[0]
    host = Host(name="here", cores=ranks * threads, memory_gib=64, disk_free_gib=1000, devices=(device,) * ranks)
    return Inventory(hosts=(host,))


def write_plan(
    run_dir: Path,
    *,
    size: Size,
    shards_dir: Path,
    inventory: Inventory,
    steps: int,
    compiled: bool,
    parallel: dict[str, Any],
    measurements: Sequence[Measurement] = (),
    evaluation: dict[str, Any] | None = None,
) -> RunPlan:
    """Write RUN_DIR/plan.json. The learning rate is constant, because every contestant can do that in the same way.

    `compiled`: use torch.compile, except for zero3, which does not support it.

    Raises ValueError if `size` does not fit, or the strategy cannot run it.
    """
    config = {
        "name": "benchmark",
        "data": {"path": "stdlib", "tokenizer": {"kind": "characters"}},
        "model": size.model,
        "train": {
            "steps": steps,
            "context": size.context,
            "global_batch": size.batch,
            "micro_batch": size.micro_batch,
            "learning_rate": 1e-3,
            "min_learning_rate": 0.0,
            "schedule": "constant",
            "warmup_steps": 0,
            "log_every_steps": size.log_every,
            "compile": compiled and parallel["strategy"] != "zero3",
            **size.train,
        },
        "parallel": parallel,
        "checkpoint": {"every_steps": NEVER, "keep_last": 1},
        "evaluation": {"every_steps": 0, "samples_while_training": 0, **(evaluation or {})},
        "profile": {"split_every_steps": NEVER},
    }
    manifest = TokenShards.read(shards_dir / MANIFEST)
    plan = make_plan(
        RunConfig.model_validate(config),
        inventory,
        run_id=run_dir.name,
        shards=manifest,
        shards_dir=str(shards_dir),
        measurements=measurements,
    )
    plan.write(run_dir / "plan.json")
    return plan
