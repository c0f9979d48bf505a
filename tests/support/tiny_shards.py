"""A tiny corpus as token shards, and plans of runs on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models
from transformers import AutoConfig

from tests.support.configs import inventory, tiny_config
from tests.support.device import DEVICE_KIND, on_device
from tests.support.manifests import write_manifest
from training.config.run import RunConfig
from training.models.sizes import count_model
from training.planner.model_shape import check_kind
from training.planner.plan import make_plan
from training.records.inventory import Inventory
from training.records.plan import ModelShape
from training.records.token_shards import SourceFile, Stretch, TokenShards
from training.shards.format import write_shard
from training.shards.packing import one_epoch

MakeRun = Callable[..., Path]  # the fixture make_run
VOCAB, END, MASK = 61, 0, 1


def write_tiny_shards(folder: Path) -> None:
    """4,000 train and 451 validation tokens that follow a rule a model can learn; 451 fills no whole sequences.

    Of two sources: the first 90 and the last 161 validation tokens are of one, the 200 between of the other.

    Words of its tokenizer are the end and 60 Chinese characters.
    """
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


def plan_tiny_run(
    folder: Path, *, shards_dir: Path, ranks: int = 1, machines: Inventory | None = None, **overrides: Any
) -> Path:
    """Write the plan of a run in `folder`, on the tiny shards; the path of its plan.json.

    `machines`: the run's hosts, whose record is written too; without, one made-up host with so many ranks.
    """
    if ranks > 1:
        overrides.setdefault("parallel__ranks", ranks)
    config = tiny_config(**(overrides if machines else on_device(overrides, ranks=ranks)))
    plan = make_plan(
        config,
        machines or inventory(ranks, kind=DEVICE_KIND),
        run_id=folder.name,
        shards=TokenShards.read(shards_dir / "manifest.json"),
        shards_dir=str(shards_dir),
        epoch=one_epoch(shards_dir, packing=config.train.packing, context=config.train.context),
        hf_config=json.loads((Path(path) / "config.json").read_text()) if (path := config.model.path) else None,
        hf_shape=_counted(config) if path else None,
    )
    plan.model_copy(update={"threads_per_rank": 1}).write(folder / "plan.json")
    if machines:
        Inventory(hosts=machines.hosts).write(folder / "inventory.json")
    return folder / "plan.json"


def _counted(config: RunConfig) -> ModelShape:
    settings = AutoConfig.from_pretrained(config.model.path)
    check_kind(config.model, settings.model_type)
    return count_model(settings, objective=config.objective)
