"""What happens to jobs, nodes and Slurm happens to a run: each time its losses are those of two ranks without Slurm."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunStopped
from tests.support.rig.runs import at_step
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_runs import STEPS, causes, curve, launcher, mlflow_status, train
from tests.support.waiting import until

Make = Callable[..., tuple[Path, dict[int, float]]]
STRIKE = 6  # the newest checkpoint is that of step 4


def ranks(run_dir: Path) -> list[psutil.Process]:
    """The ranks of a run, in their order."""
    attempts = str(run_dir / "attempts")
    nodes = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] != "srun" and any(word.startswith(attempts) for word in process.info["cmdline"] or ())
    ]
    below = {process.name(): process for node in nodes for process in node.children(recursive=True)}
    return [below[name] for name in sorted(below) if name.startswith("rank ")]


def resume_once_told(rank: psutil.Process, run_dir: Path) -> None:
    log = run_dir / "logs" / "node0.log"
    until(lambda: "signal: stopping" in log.read_text(), "SIGTERM", every_s=0.2)
    rank.resume()


def assert_nothing_is_left(cluster: SlurmCluster, run_dir: Path) -> None:
    until(lambda: not cluster.jobs(), "no jobs", within_s=20, every_s=0.2)
    assert ranks(run_dir) == []


def test_a_killed_rank_costs_an_attempt_and_no_new_job(cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("killed", launch__standby_after_s=0.0)
    jobs: list[str] = []

    def strike() -> None:
        jobs.extend(cluster.jobs())
        os.kill(ranks(run_dir)[1].pid, signal.SIGKILL)

    train(run_dir, on_row=at_step(STRIKE, strike))
    assert causes(run_dir) == ["killed", "done"]
    assert attempts_of(run_dir)[1]["from_step"] == 4
    assert sorted(attempts_of(run_dir)[1]["stood_by"]) == ["node0", "node1"]
    assert curve(run_dir) == expected
    assert sorted(curve(run_dir)) == list(range(1, STEPS + 1))
    assert len(jobs) == 1
    assert "NumNodes=2" in cluster.ask("scontrol", "show", "job", jobs[0])
    assert cluster.all_jobs() == jobs
    assert_nothing_is_left(cluster, run_dir)


def test_a_node_that_loses_power_is_replaced_by_new_nodes(cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("power")

    def strike() -> None:
        cluster.kill_node("n2")
        cluster.start_node_once_down("n2")

    train(run_dir, on_row=at_step(STRIKE, strike))
    first, *_, last = attempts_of(run_dir)
    assert first["ending"]["cause"] in {"network", "lost host", "killed"}
    assert last["ending"]["cause"] == "done"
    assert curve(run_dir) == expected
    assert len(cluster.all_jobs()) == 2
    assert_nothing_is_left(cluster, run_dir)


def test_with_min_hosts_the_nodes_that_are_left_go_on(cluster: SlurmCluster, make: Make) -> None:
    run_dir, _ = make("fewer", launch__min_hosts=1)
    train(run_dir, on_row=at_step(STRIKE, lambda: cluster.kill_node("n2")))
    *_, last = attempts_of(run_dir)
    assert (last["ending"]["cause"], last["hosts"]) == ("done", {"node0": 1})
    assert sorted(curve(run_dir)) == list(range(1, STEPS + 1))
    assert len(cluster.all_jobs()) == 1, "the job goes on with the node that it has"
    assert_nothing_is_left(cluster, run_dir)


def test_a_draining_node_and_a_restart_of_slurmctld_disturb_nothing(cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("drained")

    def strike() -> None:
        cluster.ask("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
        cluster.stop_controller()

    rows = at_step(STRIKE, strike), at_step(STEPS - 4, cluster.start_controller)
    train(run_dir, on_row=lambda row: [look(row) for look in rows] and None)
    assert causes(run_dir) == ["done"]
    assert curve(run_dir) == expected
    assert_nothing_is_left(cluster, run_dir)


def test_a_cancelled_job_stops_the_run_with_a_checkpoint(cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("cancelled")
    with pytest.raises(RunStopped, match="resume cancelled"):
        train(run_dir, on_row=at_step(STRIKE, lambda: cluster.ask("scancel", *cluster.jobs())))
    assert causes(run_dir) == ["stopped"]
    assert_nothing_is_left(cluster, run_dir)
    train(run_dir)
    assert causes(run_dir) == ["stopped", "done"]
    assert attempts_of(run_dir)[1]["from_step"] >= STRIKE, "the checkpoint that the ranks left"
    assert curve(run_dir) == expected


def test_at_its_time_limit_the_run_asks_for_new_nodes(cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("limited", parallel__timeout_s=120)

    def strike() -> None:
        """Slurm looks at time limits twice a minute: no step is made until it does."""
        (job,), one = cluster.jobs(), ranks(run_dir)[1]
        one.suspend()
        cluster.ask("scontrol", "update", f"JobId={job}", "EndTime=now+1minute")
        threading.Thread(target=resume_once_told, args=(one, run_dir), daemon=True).start()

    train(run_dir, on_row=at_step(STRIKE, strike))
    assert causes(run_dir) == ["killed", "done"], "told to stop, and not by a user"
    assert attempts_of(run_dir)[1]["from_step"] >= STRIKE, "the checkpoint that the ranks left"
    assert curve(run_dir) == expected
    assert len(cluster.all_jobs()) == 2
    assert_nothing_is_left(cluster, run_dir)


def test_a_preempted_run_goes_on_when_it_gets_nodes_again(cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("preempted")
    train(run_dir, on_row=at_step(STRIKE, lambda: cluster.submit("sleep 1", "--partition=urgent", "--nodes=1")))
    assert causes(run_dir) == ["killed", "done"]
    assert attempts_of(run_dir)[1]["from_step"] >= STRIKE
    assert curve(run_dir) == expected
    assert_nothing_is_left(cluster, run_dir)


def test_a_killed_launcher_leaves_nothing_behind_and_its_run_goes_on(cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("orphaned")
    process = launcher(run_dir)
    until(lambda: (run_dir / "metrics.jsonl").exists() and STRIKE in curve(run_dir), "step 6", process=process)
    process.kill()
    process.wait()
    assert_nothing_is_left(cluster, run_dir)
    again = launcher(run_dir)
    output = again.communicate()[0]
    assert again.returncode == 0, output
    assert curve(run_dir) == expected
    assert mlflow_status(run_dir) == "FINISHED"
    assert_nothing_is_left(cluster, run_dir)
