"""What ranks send each other for a checkpoint: each tensor to the rank that writes it, not to all."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.layouts import FOUR_RANKS, LOCAL_SGD
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny_shards import MakeRun
from training.checkpoint.safetensors_files import TensorFiles
from training.records.checkpoint import checkpoint_folder

pytestmark = pytest.mark.slow

MODEL = {"model__width": 256, "model__layers": 4, "model__heads": 4}  # 3.3M parameters: pages are small beside them
BESIDES = 1.1  # messages' headers, barriers


def test_a_rank_receives_no_more_of_a_checkpoint_than_it_writes(make_run: MakeRun) -> None:
    """Measured by the kernel, in all layouts of four ranks; where every rank gets every tensor it is 3 to 6 times."""
    layouts = {
        **FOUR_RANKS,
        "local-sgd 4": (4, LOCAL_SGD | {"parallel__strategy": "local-sgd", "parallel__group_ranks": 2}),
    }
    for name, (ranks, overrides) in layouts.items():
        folder = make_run(f"traffic/{name}", ranks=ranks, train__micro_batch=1, **MODEL, **overrides).parents[1]
    Ranks(folder, program="benchmarks.support.checkpoint_traffic", ranks=4).finish()
    for name in layouts:
        rows = [json.loads(path.read_bytes()) for path in (folder / name).glob("traffic-*.json")]
        assert len(rows) == 4
        for row in rows:
            assert row["received_bytes"] <= BESIDES * row["kept_bytes"], name


@pytest.mark.parametrize("layout", ["fsdp x tp", "zero2 4"])
def test_a_checkpoint_staged_in_many_rounds_is_the_same(layout: str, make_run: MakeRun) -> None:
    ranks, overrides = FOUR_RANKS[layout]
    folders = []
    for program in ("training.train", "tests.programs.small_rounds"):
        plan_path = make_run(f"{layout} by {program}", ranks=ranks, train__steps=2, train__micro_batch=1, **overrides)
        run_ranks(plan_path, program=program)
        folders.append(checkpoint_folder(plan_path.parent, 2))
    for kind in ("model", "optimizer"):
        once, in_rounds = (TensorFiles(folder, kind) for folder in folders)
        assert once.keys() == in_rounds.keys()
        assert all(torch.equal(once[name], in_rounds[name]) for name in once)
