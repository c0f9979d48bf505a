"""The micro-batch confirmed by trial: with real ranks, of which one has less memory than the plan was told."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from tasks.launch import batch_size_trial
from tasks.launch.batch_size_trial import smaller_micro_batches
from tasks.planning import plan as planning
from tasks.runs.errors import RunFailed
from tasks.tracking.mlflow_run import tracked
from tasks.workspace.paths import tracking_uri
from tests.support.configs import inventory, read_plan, reasons, tiny_config
from training.config.run import RunConfig
from training.planner.plan import make_plan
from training.planner.reasons.run import wants_trial
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.records.trial import MEASURED, Trial, TrialMeasured, Trials, read_trials

# A rank's memory as a machine that is short of it has it: allocations beyond the limit fail. Resident memory of these
# ranks is 2.1 GiB at micro-batch 64, 1.4 at 32, of which 1.0 are torch's and transformers' own.
LIMITED = """
import os, resource, runpy
run_module = runpy.run_module
def limited(*arguments, **options):
    if os.environ.get("LOCAL_RANK") == "1":
        limit = int(float(os.environ["RANK_1_GIB"]) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return run_module(*arguments, **options)
runpy.run_module = limited  # what a forked rank runs
"""


# What comes next, and whether at all


@pytest.mark.parametrize(
    ("hosts", "overrides", "sizes"),
    [
        ((2,), {}, [(4, 4), (2, 2), (1, 1)]),
        ((1,), {"train__global_batch": 6, "train__micro_batch": 6, "parallel__strategy": "single"}, [(3,), (2,), (1,)]),
        ((2,), {"parallel__pp": 2, "train__micro_batch": 4, "train__global_batch": 24}, [(3,), (2,), (1,)]),
        ((2,), {"parallel__shares": (6, 2), "train__global_batch": 16}, [(3, 1), (1, 1)]),
    ],
)
def test_the_next_smaller_micro_batches_divide_the_batch_as_before(
    hosts: tuple[int, ...], overrides: dict[str, Any], sizes: list[tuple[int, ...]]
) -> None:
    settings = {"train__global_batch": 16, "train__micro_batch": 0, "parallel__strategy": "ddp"} | overrides
    machines = inventory(*hosts)
    plan = make_plan(tiny_config(**settings), machines)
    tried = []
    while (less := smaller_micro_batches(plan)) is not None:
        tried.append(less)
        batch = plan.config.train.global_batch
        assert batch % sum(less) == 0
        plan = plan.model_copy(update={"micro_batches": less, "accumulation": batch // sum(less)})
    assert tried == sizes


def test_gpus_have_trials_where_the_plan_chose_and_cpus_where_asked() -> None:
    chosen, pinned = tiny_config(train__micro_batch=0), tiny_config()
    on_gpus, on_cpus = {"device_kind": "cuda", "compiled": False}, {"device_kind": "cpu", "compiled": False}
    assert [wants_trial(chosen, **on_gpus), wants_trial(pinned, **on_gpus), wants_trial(chosen, **on_cpus)] == [
        True,
        False,
        False,
    ]
    assert wants_trial(pinned, device_kind="cuda", compiled=True), "compile=auto has chosen so"
    assert wants_trial(tiny_config(train__micro_batch_trial="always"), **on_cpus)
    assert not wants_trial(tiny_config(train__micro_batch=0, train__micro_batch_trial="never"), **on_gpus)
    reasons = make_plan(chosen, inventory(1, kind="cuda")).reasons
    assert "micro-batch: predicted to fit; a trial of a few steps will confirm this before training" in reasons


def test_a_plan_is_confirmed_once_for_its_layout() -> None:
    plan = make_plan(tiny_config(), inventory(2))
    fits = Trial(
        micro_batches=plan.micro_batches,
        accumulation=plan.accumulation,
        measured=TrialMeasured(step_s=0.1, peak_gib=(1.0, 1.25)),
        seconds=5.0,
    )
    record = Trials(strategy=plan.strategy, mesh=plan.mesh, ranks_per_host=plan.ranks_per_host, trials=(fits,))
    assert record.confirm(plan)
    assert not record.confirm(plan.model_copy(update={"micro_batches": (4, 4)}))
    assert not record.confirm(plan.model_copy(update={"strategy": "fsdp"}))
    assert "micro-batch 2 fits, 3 steps and a validation took 1.25 GiB on rank 1" in str(fits)


@pytest.mark.parametrize("fits_at_once", [True, False])
def test_a_host_lost_in_a_trial_leaves_the_plan_of_the_others(
    fits_at_once: bool, tiny_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch replaces plan.json; the trial's record and the plan that trains are of the hosts that are left."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = tiny_config(train__micro_batch=0, train__micro_batch_trial="always", parallel__strategy="ddp")
    machines = inventory(1, 1)
    left = Inventory(hosts=machines.hosts[1:])
    launches = []

    def launch(module: str, *, plan: RunPlan, run_dir: Path) -> None:
        launches.append(module)
        tried = planning.replan(run_dir, inventory=left, why="the first host was lost")
        if len(launches) == 1 and not fits_at_once:
            raise RunFailed("no memory", cause="out of memory", detail="rank 0")
        TrialMeasured(step_s=0.1, peak_gib=(1.0,) * tried.world_size).write(run_dir / MEASURED)

    monkeypatch.setattr(batch_size_trial.programs, "run_program", launch)
    with tracked(config, run_id="lost", tags={}) as run:
        shards = TokenShards.read(tiny_shards / "manifest.json")
        plan = planning.write_plan(config, run=run, inventory=machines, shards=shards, shards_dir=tiny_shards)
        assert plan.hosts == tuple(host.name for host in machines.hosts)
        plan = batch_size_trial.confirmed(plan, run=run, inventory=machines)
        record = read_trials(run.folder) or pytest.fail("no record")
    assert plan.hosts == (left.hosts[0].name,)
    assert read_plan(run.folder) == plan
    assert record.confirm(plan)
    sizes = [trial.micro_batches for trial in record.trials]
    assert [len(size) for size in sizes] == [1] * len(launches)
    assert len(launches) == (1 if fits_at_once else 2)
    assert fits_at_once or sizes[1] < sizes[0]


def test_where_no_micro_batch_fits_the_next_layout_that_needs_less_is_tried(
    tiny_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    machines, shards = inventory(2), TokenShards.read(tiny_shards / "manifest.json")
    limit_gib, tried = [0.0], list[RunPlan]()

    def launch(module: str, *, plan: RunPlan, run_dir: Path) -> None:
        tried.append(plan)
        if sum(plan.predicted.memory_gib.values()) > limit_gib[0]:
            raise RunFailed("no memory", cause="out of memory", detail="rank 0")
        TrialMeasured(step_s=0.1, peak_gib=(0.5, 0.5)).write(run_dir / MEASURED)

    def trial_of(name: str, **settings: Any) -> RunPlan:
        config = tiny_config(train__micro_batch=1, train__micro_batch_trial="always", model__width=256, **settings)
        tried.clear()
        with tracked(config, run_id=name, tags={}) as run:
            plan = planning.write_plan(config, run=run, inventory=machines, shards=shards, shards_dir=tiny_shards)
            limit_gib[0] = min(each.memory_gib for each in plan.ranking) if name == "open" else 0.0
            return batch_size_trial.confirmed(plan, run=run, inventory=machines)

    monkeypatch.setattr(batch_size_trial.programs, "run_program", launch)
    plan = trial_of("open")
    needed = [sum(each.predicted.memory_gib.values()) for each in tried]
    assert needed == sorted(needed, reverse=True)
    assert len(set(needed)) == len(needed) > 1
    assert tried[-1].strategy == plan.strategy
    assert (plan.config.parallel.strategy, plan.ranking[0].strategy) == ("auto", plan.strategy)
    assert reasons(plan, "layout: chosen by trial, because")
    with pytest.raises(RunFailed, match="no other layout of the plan's ranking needs less memory"):
        trial_of("pinned", parallel__strategy="ddp", train__activation_checkpointing="none", train__steps=9)


def test_compiled_layers_that_a_trial_fails_with_are_not_compiled(
    tiny_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the plan had chosen to compile; one that is asked for fails the run."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    machines, shards = inventory(2), TokenShards.read(tiny_shards / "manifest.json")

    def launch(module: str, *, plan: RunPlan, run_dir: Path) -> None:
        if plan.compiled:
            raise RunFailed("no", cause="error", detail="InductorError: gcc failed")
        TrialMeasured(step_s=0.1, peak_gib=(1.0, 1.0)).write(run_dir / MEASURED)

    def trial_of(compile_layers: Any, name: str) -> RunPlan:
        config = tiny_config(train__micro_batch_trial="always", train__compile=compile_layers)
        with tracked(config, run_id=name, tags={}) as run:
            plan = planning.write_plan(config, run=run, inventory=machines, shards=shards, shards_dir=tiny_shards)
            plan = plan.model_copy(update={"compiled": True})
            plan.write(run.folder / "plan.json")
            return batch_size_trial.confirmed(plan, run=run, inventory=machines)

    monkeypatch.setattr(batch_size_trial.programs, "run_program", launch)
    plan = trial_of("auto", "chosen")
    assert not plan.compiled
    assert "compile off: a trial with it failed (InductorError: gcc failed)" in plan.reasons
    with pytest.raises(RunFailed, match="no"):
        trial_of(True, "asked")


# Real ranks


@pytest.fixture
def short_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give rank 1 so many GiB."""
    (tmp_path / "sitecustomize.py").write_text(LIMITED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return lambda gib: monkeypatch.setenv("RANK_1_GIB", str(gib))


def two_rank_run(**overrides: Any) -> tuple[RunConfig, Inventory]:
    """Config of a run on 2 CPU ranks, at a micro-batch that fits in 12 GiB a rank; and an inventory that has them."""
    settings = {
        "model__layers": 6,
        "train__context": 256,
        "train__global_batch": 128,
        "train__micro_batch": 64,
        "train__micro_batch_trial": "always",
        "train__steps": 2,
        "parallel__strategy": "ddp",
        "parallel__ranks": 2,
        "parallel__timeout_s": 600,  # what a rank would wait for a peer that is gone
        "evaluation__every_steps": 0,
    }
    config = tiny_config(**(settings | overrides))
    return config, inventory(2)


@pytest.mark.slow
def test_a_micro_batch_too_large_for_one_rank_is_lowered_for_all_and_nobody_hangs(
    tiny_shards: Path, short_of_memory: Callable[[float], None]
) -> None:
    short_of_memory(1.6)
    config, machines = two_rank_run()
    with tracked(config, run_id="trial", tags={}) as run:
        plan = planning.write_plan(
            config,
            run=run,
            inventory=machines,
            shards=TokenShards.read(tiny_shards / "manifest.json"),
            shards_dir=tiny_shards,
        )
        assert plan.micro_batches == (64, 64)
        plan = batch_size_trial.confirmed(plan, run=run, inventory=machines)
        first, second = (read_trials(run.folder) or pytest.fail("no record")).trials
        again = batch_size_trial.confirmed(plan, run=run, inventory=machines)
    assert first.measured is None
    assert re.search(r"can't allocate memory|bad_alloc|MemoryError", first.detail)
    assert second.measured is not None
    assert (first.micro_batches, second.micro_batches) == ((64, 64), (32, 32))
    assert max(first.seconds, second.seconds) < 120, "not the timeout of a collective"
    assert second.measured.peak_gib[1] < 1.6
    assert (plan.micro_batches, plan.largest_micro_batches, plan.accumulation) == ((32, 32), (63, 63), 2)
    assert reasons(plan, "trial: micro-batch 64 ran out of memory")
    assert reasons(plan, "trial: micro-batch 32 fits")
    assert read_plan(run.folder) == plan == again, "what ranks go by; not tried again"
    logged = MlflowClient(tracking_uri()).get_run(run.mlflow_run_id).data.metrics
    assert logged["trial/launches"] == 2
    assert logged["trial/peak_memory_gib"] == pytest.approx(max(second.measured.peak_gib))
    assert not [
        child for child in psutil.Process().children(recursive=True) if "training.trainer.trial" in child.cmdline()
    ]


@pytest.mark.long
def test_where_nothing_fits_the_run_fails_with_the_cure(
    tiny_shards: Path, short_of_memory: Callable[[float], None]
) -> None:
    short_of_memory(0.8)
    config, machines = two_rank_run(train__global_batch=2, train__micro_batch=1, model__width=512, model__layers=8)

    def run_it() -> None:
        with tracked(config, run_id="nothing", tags={}) as run:
            shards = TokenShards.read(tiny_shards / "manifest.json")
            plan = make_plan(config, machines, run_id="nothing", shards=shards, shards_dir=str(tiny_shards))
            plan.write(run.folder / "plan.json")
            batch_size_trial.confirmed(plan, run=run, inventory=machines)

    with pytest.raises(RunFailed, match=r"micro-batch 1 ran out of memory .*; there is no smaller one") as failed:
        run_it()
    assert failed.value.cause == "out of memory"
    client = MlflowClient(tracking_uri())
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (found.info.status, found.data.tags["shardline.cause"]) == ("FAILED", "out of memory")
