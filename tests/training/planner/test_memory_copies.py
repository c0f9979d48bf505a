"""Copies in the memory of hosts have a price in the plan, and are refused where there is no room."""

from __future__ import annotations

import pytest

from tests.support.configs import inventory, reasons, tiny_config
from training.planner.plan import make_plan
from training.planner.price.pricing import host_copies_gib
from training.records.inventory import Host, Inventory


def hosts(*ranks: int, kind: str = "cuda", device_gib: float = 80.0, **fields: object) -> Inventory:
    made = inventory(*ranks, kind=kind, memory_gib=device_gib)
    return Inventory(hosts=tuple(Host.model_validate(host.model_dump() | fields) for host in made.hosts))


@pytest.mark.parametrize(
    ("ranks_per_host", "gib"),
    [
        ((4,), [24.0]),  # two whole ones
        ((2, 2), [24.0, 24.0]),  # of two hosts each holds all
        ((1, 1, 1, 1, 1, 1), [12.0] * 6),  # two copies of 2 of 6 parts are 8, but an attempt begins with all of one
        ((6, 2, 2, 2), [16.0, 16.0, 12.0, 12.0]),  # 2 x (6 + 2), 2 x (2 + 6) and 2 x (2 + 2) of 12 parts
    ],
)
def test_a_host_holds_two_copies_of_its_own_files_and_its_neighbours(
    ranks_per_host: tuple[int, ...], gib: list[float]
) -> None:
    assert host_copies_gib(12.0, ranks_per_host) == pytest.approx(gib)


def test_the_plan_says_what_copies_take_and_cost() -> None:
    config = tiny_config(model__width=1024, model__layers=8, model__heads=8, checkpoint__memory_every_steps=10)
    plan = make_plan(config, hosts(4, 4))
    (reason,) = reasons(plan, "copies in memory")
    needed = 2 * plan.predicted.checkpoint_gib
    assert reason.startswith(f"copies in memory every 10 steps: up to {needed:.2f} GiB on each host, ")
    assert "% of the steps' time" in reason
    assert "lost with it" not in reason
    (alone,) = reasons(make_plan(config, hosts(4)), "copies in memory")
    assert alone.endswith("one host keeps no copy for another, so they are lost with it")
    without = tiny_config(model__width=1024, model__layers=8, model__heads=8)
    assert not reasons(make_plan(without, hosts(4, 4)), "copies in memory")


def test_cpu_ranks_share_their_memory_with_the_copies() -> None:
    config = tiny_config(checkpoint__memory_every_steps=10)
    memory = make_plan(config, hosts(2, kind="cpu", device_gib=12.0)).predicted.memory_gib
    before = make_plan(tiny_config(), hosts(2, kind="cpu", device_gib=12.0)).predicted
    assert memory.keys() - before.memory_gib.keys() == {"copies in memory", "copy in memory being made"}
    assert memory["copies in memory"] == pytest.approx(before.checkpoint_gib)  # two copies of a half each


@pytest.mark.parametrize(
    ("fields", "room"),
    [
        ({"memory_gib": 0.5}, "90% of its memory, less buffers, has 0."),
        ({"shared_memory_gib": 0.1}, "/dev/shm has 0.10"),
    ],
)
def test_too_little_memory_for_the_copies_is_refused_with_the_cure(fields: dict[str, float], room: str) -> None:
    config = tiny_config(model__width=512, model__layers=8, model__heads=8, checkpoint__memory_every_steps=10)
    with pytest.raises(
        ValueError, match=r"checkpoint.memory_every_steps = 10 needs 0\.\d\d GiB of host0's memory"
    ) as e:
        make_plan(config, hosts(2, **fields))
    assert room in str(e.value)
    assert "set it to 0, train on more hosts, or name a larger tmpfs in checkpoint.memory_dir" in str(e.value)
