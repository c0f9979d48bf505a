"""The micro-batch confirmed by trial on Docker hosts, of which the kernel leaves one too little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.launch import batch_size_trial
from tasks.launch.recovery import attempts_of
from tasks.tracking.mlflow_run import tracked
from tests.support.configs import read_plan
from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left, make_docker_run
from training.records.inventory import Inventory
from training.records.trial import read_trials


@pytest.mark.long
def test_a_host_that_runs_out_of_memory_lowers_the_micro_batch_of_all(
    rig: Rig, shardline_home: Path, tiny_shards: Path
) -> None:
    """A rank takes 1.9 GiB at micro-batch 64, 1.4 at 32. The kernel kills it; its peer on the other host is ended."""
    run_dir = make_docker_run(
        rig,
        shardline_home,
        tiny_shards,
        "tried",
        1,
        1,
        model__layers=6,
        train__context=256,
        train__global_batch=128,
        train__micro_batch=64,
        train__micro_batch_trial="always",
        evaluation__every_steps=0,
        launch__hosts=(rig.host_config(0, slots=1), rig.host_config(1, slots=1, memory_gib=1.6)),
    )
    plan, machines = read_plan(run_dir), Inventory.read(run_dir / "inventory.json")
    assert plan.micro_batches == (64, 64)
    with tracked(plan.config, run_id=run_dir.name, tags={}) as run:
        plan = plan.model_copy(update={"mlflow_run_id": run.mlflow_run_id})
        plan = batch_size_trial.confirmed(plan, run=run, inventory=machines)
    first, second = (read_trials(run_dir) or pytest.fail("no record")).trials
    assert first.measured is None
    assert first.detail.startswith("host1: the kernel killed a rank")
    assert (plan.micro_batches, second.micro_batches) == ((32, 32), (32, 32))
    assert read_plan(run_dir) == plan
    outcomes = [(attempt["program"], attempt["ending"]["cause"]) for attempt in attempts_of(run_dir)]
    assert outcomes == [("training.trainer.trial", "out of memory"), ("training.trainer.trial", "done")]
    assert_nothing_is_left(rig)
