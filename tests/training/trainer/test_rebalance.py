"""Shares follow the devices' speed while a run goes on; the batch, its order and the updates stay."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.manifests import write_checkpoint_manifest
from tests.support.ranks import Ranks, losses, result, run_ranks
from tests.support.tiny_shards import MakeRun
from tests.support.waiting import until
from tests.training.strategies.test_strategies import assert_equal_training
from training.data.batch import MicroBatches
from training.records.checkpoint import CheckpointManifest, checkpoint_folder
from training.records.plan import RunPlan
from training.runtime.process import Rank
from training.tracking.rows import read_rows
from training.trainer.rebalance import Rebalancer, one_layer_moved, sizes_in_force, with_room

STEPS = 30
COMMON: dict[str, Any] = {
    "model__dropout": 0.0,
    "model__layers": 4,
    "model__width": 64,
    "train__context": 64,
    "train__global_batch": 64,
    "train__clip_norm": 0.5,
    "train__steps": STEPS,
    "evaluation__every_steps": 0,
    "checkpoint__every_steps": 1000,
    "profile__split_every_steps": 2,
}
DEADLINE_S = 100


@contextmanager
def throttled(ranks: Ranks, rank: int) -> Iterator[None]:
    """The rank may run a third of the time, as under a CPU quota: 5 ms of 15."""
    pid, ended = ranks.processes[rank].pid, threading.Event()
    assert pid is not None

    def throttle() -> None:
        while not ended.wait(0.005):
            try:
                os.kill(pid, signal.SIGSTOP)
                ended.wait(0.01)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rebalances(plan_path: Path) -> list[dict[str, Any]]:
    return read_rows(plan_path.parent / "rebalances.jsonl")


def rebalanced(plan_path: Path) -> list[dict[str, Any]]:
    """Start the run with a throttled rank; once shares have moved end it, with a checkpoint. What was written of it."""
    ranks, deadline = Ranks(plan_path), time.monotonic() + DEADLINE_S
    with throttled(ranks, 1):
        while not rebalances(plan_path):
            assert time.monotonic() < deadline, f"no share moved within {DEADLINE_S} s\n{ranks.log()}"
            assert all(process.is_alive() for process in ranks.processes), ranks.log()
            time.sleep(0.01)
        ranks.signal(signal.SIGTERM)
        ranks.finish()
    return rebalances(plan_path)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", {}),
        ("ddp", {"parallel__stages": ((4,), (3, 1)), "parallel__shares": "equal"}),
        *(
            pytest.param(strategy, settings, marks=pytest.mark.long)
            for strategy, settings in (("fsdp", {}), ("zero1", {}), ("zero2", {}), ("ddp", {"train__compile": True}))
        ),
    ],
)
@pytest.mark.slow
def test_a_rank_that_is_slower_than_planned_gets_less_and_a_resumed_run_keeps_the_shares(
    strategy: str, settings: dict[str, Any], make_run: MakeRun
) -> None:
    parallel = {"parallel__strategy": strategy, "parallel__rebalance": "on"}
    ranks = sum(map(len, settings.get("parallel__stages", ((4,), (4,)))))
    size = 32 if ranks == 2 else 16  # two micro-batches fill a pipeline
    plan_path = make_run(
        f"throttled {strategy} {len(settings)}", ranks=ranks, train__micro_batch=size, **COMMON, **parallel, **settings
    )
    moved = rebalanced(plan_path)
    assert moved[0]["before"] == [size, size]
    fast, slow = moved[-1]["after"]
    assert fast > slow
    assert fast + slow == 2 * size
    (folder,) = (plan_path.parent / "checkpoints").iterdir()
    manifest = CheckpointManifest.read(folder / "manifest.json")
    assert manifest.micro_batches == (fast, slow)
    run_ranks(plan_path)
    resumed = [row for row in read_rows(plan_path.parent / "metrics.jsonl") if row["step"] == manifest.step]
    assert [row["micro_batch/replica_0"] for row in resumed if "micro_batch/replica_0" in row][-1] == fast
    assert sum("loss" in row for row in read_rows(plan_path.parent / "metrics.jsonl")) == STEPS
    alone = make_run(f"alone {strategy} {len(settings)}", **COMMON, parallel__strategy="single", train__micro_batch=64)
    run_ranks(alone)
    assert_equal_training(alone, plan_path)


@pytest.mark.slow
def test_layers_move_to_the_faster_stage_at_a_checkpoint_and_a_resumed_run_keeps_them_there(
    make_run: MakeRun,
) -> None:
    """Three layers take a stage longer than one takes the next; one moves, in the same processes."""
    settings = {
        **COMMON,
        "parallel__stages": ((4,), (3, 1)),
        "parallel__shares": "equal",
        "parallel__rebalance": "on",
        "checkpoint__every_steps": 10,
        "checkpoint__keep_last": 1000,
        "train__steps": 10_000,
        "train__decay_steps": 200,
        "train__micro_batch": 16,
    }
    plan_path = make_run("moving layers", ranks=3, **settings)
    ranks = Ranks(plan_path)
    try:
        moves = until(lambda: [row for row in rebalances(plan_path) if "stages_after" in row], "a layer moves")
        until(lambda: newest_step(plan_path) > moves[0]["step"] + 2, "steps after the move")
    finally:
        ranks.signal(signal.SIGTERM)
    ranks.finish()
    assert (moves[0]["stages_before"], moves[0]["stages_after"]) == ([[4], [3, 1]], [[4], [2, 2]])
    stopped = result(plan_path).step
    manifest = CheckpointManifest.read(checkpoint_folder(plan_path.parent, stopped) / "manifest.json")
    assert manifest.stages == ((4,), (2, 2))
    last = stopped + 5
    plan = RunPlan.read(plan_path)
    plan.model_copy(update={"steps": last, "sequences": last * plan.config.train.global_batch}).write(plan_path)
    run_ranks(plan_path)
    newest = CheckpointManifest.read(checkpoint_folder(plan_path.parent, last) / "manifest.json")
    assert newest.stages == ((4,), (2, 2))
    assert list(losses(plan_path)) == list(range(1, last + 1))
    # One process goes on from the checkpoint at which the layer moved, over the same steps.
    many, moved_at = losses(plan_path), moves[0]["step"]
    for folder in (plan_path.parent / "checkpoints").iterdir():
        if folder != checkpoint_folder(plan_path.parent, moved_at):
            shutil.rmtree(folder)
    single = {**COMMON, "parallel__strategy": "single", "train__micro_batch": 64, "train__decay_steps": 200}
    make_run("alone moving layers", **single | {"train__steps": last}).rename(plan_path)
    run_ranks(plan_path)
    one = losses(plan_path)
    assert list(one) == list(range(1, last + 1))
    assert max(abs(one[step] - many[step]) for step in one) < 1e-5


def newest_step(plan_path: Path) -> int:
    metrics = plan_path.parent / "metrics.jsonl"
    return max(losses(plan_path), default=0) if metrics.exists() else 0


@pytest.mark.parametrize(
    ("sizes", "seconds", "most", "expected"),
    [
        ((3, 1), (0.3, 0.1), (4, 4), ((2, 2), 1.5)),
        ((3, 1), (0.3, 0.1), (4, 1), ((3, 1), 1.0)),  # no room
        ((2, 2), (0.2, 0.2), (4, 4), ((2, 2), 1.0)),
        ((4, 4, 4), (0.2, 0.2, 0.4), (8, 8, 8), ((5, 4, 3), 4 / 3)),
        ((4,), (1.0,), (4,), ((4,), 1.0)),
    ],
)
def test_one_layer_moves_where_it_helps_most(
    sizes: tuple[int, ...],
    seconds: tuple[float, ...],
    most: tuple[int, ...],
    expected: tuple[tuple[int, ...], float],
) -> None:
    after, gain = one_layer_moved(sizes, seconds, most)
    assert (after, gain) == (expected[0], pytest.approx(expected[1]))


def test_the_median_of_three_timed_steps_decides(make_run: MakeRun) -> None:
    """The first step under new micro-batches compiles and allocates: it is no measure."""
    settings = {"parallel__strategy": "ddp", "parallel__rebalance": "on", "train__micro_batch": 32}
    plan_path = make_run("decides", ranks=2, **COMMON, **settings)
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    micro_batches = MicroBatches.of(plan)
    rebalancer = Rebalancer(
        plan, micro_batches=micro_batches, rank=Rank(0, 2, torch.device("cpu")), start=4, run_dir=run_dir
    )
    waits = [{"step": 100.0, "exposed_communication": 60.0}, {"step": 100.0, "exposed_communication": 0.0}]
    slower = [{"step": 900.0, "exposed_communication": 0.0}] * 2  # another program ran beside both
    even = [{"step": 100.0, "exposed_communication": 0.0}] * 2
    assert rebalancer.decide(5, waits) is None, "the first step of this start"
    assert rebalancer.decide(6, waits) is rebalancer.decide(8, slower) is None
    change = rebalancer.decide(10, waits)
    assert change is not None
    assert (change.before, change.own_s) == ((32, 32), pytest.approx([0.04, 0.1]))
    assert sum(change.after) == 64
    assert 32 < change.after[0] <= plan.largest_micro_batches[0]
    rebalancer.record(change)
    assert [(row["step"], row["after"]) for row in rebalances(plan_path)] == [(10, list(change.after))]
    micro_batches.sizes = change.after
    decisions = [rebalancer.decide(step, even) for step in (11, 12, 14)]
    assert decisions == [None] * 3, "two measures: step 11 is none"
    again = Rebalancer(plan, micro_batches=micro_batches, rank=rebalancer.rank, start=8, run_dir=run_dir)
    assert rebalances(plan_path) == [], "a start before the change forgets it"
    assert again.decide(9, waits) is None


def test_a_checkpoints_micro_batches_are_used_only_where_they_fit(make_run: MakeRun, tmp_path: Path) -> None:
    plan = RunPlan.read(make_run("in force", ranks=2, parallel__strategy="ddp", parallel__rebalance="on"))
    assert plan.micro_batches == (2, 2)
    made = write_checkpoint_manifest(tmp_path, step=3, mesh=plan.mesh, world_size=2, micro_batches=(3, 1))

    def taken_up(manifest: CheckpointManifest | None = made, **of_the_plan: Any) -> tuple[int, ...]:
        return sizes_in_force(plan.model_copy(update=of_the_plan), manifest)

    assert taken_up() == (3, 1)
    assert taken_up(None) == (2, 2)
    assert taken_up(rebalance=False) == (2, 2)
    assert taken_up(largest_micro_batches=(2, 4)) == (2, 2)
    assert taken_up(micro_batches=(4, 4)) == (4, 4), "another batch, or another number of micro-batches"
    assert taken_up(made.model_copy(update={"mesh": {"pp": 1, "dp": 1, "tp": 2}})) == (2, 2)


def test_a_share_grows_by_no_more_than_the_memory_that_is_left() -> None:
    """Held now: 60%, 95% and 45% of what may be held; the plan's own limit for the last one is lower."""
    assert with_room((12, 12, 12), room=[1 / 0.6, 1 / 0.95, 1 / 0.45], largest=(64, 64, 16)) == (20, 12, 16)
    assert with_room((12, 12), room=[0.9, 1.0], largest=(64, 64)) == (12, 12), "what is there already may stay"
