"""A plan for other hosts: the same batches, within what the user said fits, and the old plan where it fits again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.planning import replan
from tests.conftest import inventory, tiny_config
from training.inventory import Inventory
from training.packing import one_epoch
from training.plan import make_plan
from training.records import RunPlan, TokenShards


def planned(folder: Path, shards: Path, *, micro_batch: int) -> RunPlan:
    """On 2 + 1 ranks of two hosts."""
    config = tiny_config(train__global_batch=12, train__micro_batch=micro_batch, parallel__strategy="ddp")
    plan = make_plan(
        config,
        inventory(2, 1),
        run_id=folder.name,
        shards=TokenShards.read(shards / "manifest.json"),
        shards_dir=str(shards),
        epoch=one_epoch(shards, packing=config.train.packing, context=config.train.context),
    )
    plan.write(folder / "plan.json")
    return plan


def first_host() -> Inventory:
    return Inventory(hosts=inventory(2, 1).hosts[:1])


def test_fewer_hosts_make_the_same_batches(tmp_path: Path, tiny_shards: Path) -> None:
    before = planned(tmp_path, tiny_shards, micro_batch=2)
    now = replan(tmp_path, inventory=first_host(), why="host1 is away")
    assert (now.hosts, now.world_size) == (("host0",), 2)
    assert now.batch_tokens == before.batch_tokens
    assert now.config == before.config
    assert now.reasons[-1] == "host1 is away"
    assert RunPlan.read(tmp_path / "plan.json") == now
    assert replan(tmp_path, inventory=inventory(2, 1), why="host1 came back") == before


@pytest.mark.parametrize(("asked", "at_most"), [(1, 1), (4, 4), (0, 12)])
def test_a_micro_batch_never_grows_beyond_what_was_asked_for(
    tmp_path: Path, tiny_shards: Path, asked: int, at_most: int
) -> None:
    planned(tmp_path, tiny_shards, micro_batch=asked)
    now = replan(tmp_path, inventory=first_host(), why="host1 is away")
    assert now.micro_batch <= at_most
    assert now.micro_batch * now.accumulation * now.dp == now.config.train.global_batch
