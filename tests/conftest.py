"""What the tests share: a tiny corpus as token shards, a tiny plan, and real torchrun ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.manifests import write_manifest
from tests.support.ranks import Ranks
from training.config.run import RunConfig
from training.planner.plan import make_plan
from training.records.inventory import Device, Host, Inventory
from training.records.plan import RunPlan
from training.records.token_shards import SourceFile, Stretch, TokenShards
from training.shards.format import write_shard
from training.shards.packing import one_epoch
from training.tracking.rows import read_rows

REPO = Path(__file__).parents[1]
VOCAB, END, MASK = 61, 0, 1


def inventory(*hosts: int, kind: str = "cpu", memory_gib: float = 12.0, disk_gib: float = 500.0) -> Inventory:
    """A made-up inventory: so many devices on each host, with an H100's rates for GPUs."""
    rates = {"fp32": 0.08, "bf16": 0.09} if kind == "cpu" else {"fp32": 50.0, "bf16": 800.0}
    device = Device(
        kind=kind,
        name=kind,
        memory_gib=memory_gib,
        matmul_tflops=rates,
        compute_capability="9.0" if kind == "cuda" else None,
    )
    return Inventory(
        hosts=tuple(
            Host(name=f"host{i}", cores=2 * n, memory_gib=64, disk_free_gib=disk_gib, devices=(device,) * n)
            for i, n in enumerate(hosts)
        )
    )


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts us in the background makes us, and all we start, deaf to the SIGINT that tests send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 train and 451 validation tokens that follow a rule a model can learn; 451 fills no whole sequences.

    Of two sources: the first 90 and the last 161 validation tokens are of one, the 200 between of the other.

    Words of its tokenizer are the end and 60 Chinese characters.
    """
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    shards = []
    for split, length in (("train", 4000), ("validation", 451)):
        tokens = (np.cumsum(rng.integers(1, 4, length)) % (VOCAB - 2) + 2).astype(np.uint16)
        tokens[99::100] = END
        ends = [*range(100, length + 1, 100)]
        shards.append(write_shard(folder, split=split, index=0, tokens=tokens, ends=ends, text_bytes=length))
    sources = [SourceFile(name=name, num_bytes=1, sha256="0" * 64) for name in ("one.txt", "two.txt")]
    stretches = [Stretch(source=n, tokens=t, text_bytes=t) for n, t in ((0, 90), (1, 200), (0, 161))]
    shards[1] = shards[1].model_copy(update={"stretches": tuple(stretches)})
    write_manifest(folder, shards, vocab_size=VOCAB, end_id=END, mask_id=MASK, sources=tuple(sources))
    vocabulary = {"<|endoftext|>": END, **{chr(0x4E00 + n): n for n in range(1, 61)}}
    (folder / "tokenizer").mkdir()
    Tokenizer(models.WordLevel(vocabulary)).save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder


def tiny_config(**overrides: Any) -> RunConfig:
    """Overrides as section__field=value."""
    config: dict[str, Any] = {
        "name": "tiny",
        "data": {"path": "stdlib"},
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1},
        "train": {
            "steps": 8,
            "context": 16,
            "global_batch": 8,
            "micro_batch": 2,
            "learning_rate": 3e-3,
            "warmup_steps": 2,
            "log_every_steps": 1,
        },
        "parallel": {"precision": "fp32", "timeout_s": 60},
        "checkpoint": {"every_steps": 3, "keep_last": 2},
        "evaluation": {"every_steps": 4, "quick_sequences": 6, "samples_while_training": 0},
    }
    for key, value in overrides.items():
        section, _, field = key.partition("__")
        config.setdefault(section, {})[field] = value
    return RunConfig.model_validate(config)


@pytest.fixture(scope="module")
def make_run(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_run("name", ranks=2, train__steps=5) -> plan.json of a run folder."""

    folder = tmp_path_factory.mktemp("runs")

    def make(name: str, *, ranks: int = 1, **overrides: Any) -> Path:
        if ranks > 1:
            overrides.setdefault("parallel__ranks", ranks)
        config = tiny_config(**overrides)
        plan = make_plan(
            config,
            inventory(ranks),
            run_id=name,
            shards=TokenShards.read(tiny_shards / "manifest.json"),
            shards_dir=str(tiny_shards),
            epoch=one_epoch(tiny_shards, packing=config.train.packing, context=config.train.context),
            hf_config=json.loads((Path(path) / "config.json").read_text()) if (path := config.model.path) else None,
        )
        plan = plan.model_copy(update={"threads_per_rank": 1})
        plan.write(folder / name / "plan.json")
        return folder / name / "plan.json"

    return make


def torchrun(plan_path: Path, *, program: str = "training.train") -> list[str]:
    """The command that runs a program on the plan's ranks, as the launcher does it."""
    ranks = str(RunPlan.read(plan_path).world_size)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return [*launcher, "-m", program, str(plan_path)]


def run_ranks(plan_path: Path, *, program: str = "training.train") -> None:
    """Run it to its end; a failure shows what the ranks printed."""
    Ranks(plan_path, program=program).finish()


def rank_env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""}


def losses(plan_path: Path) -> dict[int, float]:
    """Step -> training loss, as logged."""
    return {row["step"]: row["loss"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "loss" in row}
