"""`shardline ps`, `stop` and `reap` know jobs: those that somebody looks after, and those that nobody does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra import slurm
from tasks.launch.slurm_allocation import Allocation
from tasks.operations.ps import known_hosts, list_running
from tasks.operations.stop import reap, stop
from tests.support.configs import read_plan
from tests.support.launched_runs import causes, curve, launcher
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import until

Make = Callable[..., tuple[Path, dict[int, float]]]


def test_a_run_that_works_is_listed_kept_by_reap_and_stopped_with_a_checkpoint(
    cluster: SlurmCluster, make: Make
) -> None:
    run_dir, _ = make("listed")
    process = launcher(run_dir)
    until(lambda: (run_dir / "metrics.jsonl").exists() and 3 in curve(run_dir), "step 3", process=process)
    (job,) = cluster.jobs()
    (row,) = list_running(known_hosts()).running
    assert (row.run, row.attempt, row.host, row.ranks) == ("listed", "1", "n1,n2", 2)
    assert (row.container, row.status, row.looked_after) == (f"job {job}", f"running (job {job})", True)
    reaped = reap(known_hosts())
    assert (reaped.removed, [*reaped.kept]) == ((), [f"Slurm/job {job}"])
    stopped = stop("listed")
    assert (stopped.by, stopped.checkpoint_step >= 3) == ("launcher", True)
    assert process.wait() == 130
    assert causes(run_dir) == ["stopped"]
    assert cluster.jobs() == []
    assert list_running(known_hosts()).running == ()


def test_a_job_that_nobody_looks_after_is_reaped(cluster: SlurmCluster, make: Make) -> None:
    run_dir, _ = make("nobodys", launch__lease_s=600.0)
    plan = read_plan(run_dir)
    nodes = Allocation(plan.config.launch, run_dir=run_dir)
    nodes.folder.mkdir()
    nodes.lease.path.write_text("0\n")
    comment = slurm.comment_of("nobodys", launcher="elsewhere/1/2.0/3")
    job = slurm.submit("#!/bin/sh\nsleep 600\n", name="x", comment=comment, options=["--nodes=2", "--output=/dev/null"])
    until(lambda: cluster.jobs("running") == [job], "a job that runs", every_s=0.2)
    assert list_running(known_hosts()).running[0].looked_after, (
        "its launcher is elsewhere, and has 600 s to renew its lease"
    )
    nodes.lease.path.unlink()
    assert not list_running(known_hosts()).running[0].looked_after
    assert reap(known_hosts(), dry_run=True).removed == (f"Slurm/job {job}",)
    assert cluster.jobs() == [job]
    assert reap(known_hosts()).removed == (f"Slurm/job {job}",)
    until(lambda: cluster.jobs() == [], "no job", within_s=20, every_s=0.2)
