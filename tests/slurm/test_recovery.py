"""What Slurm alone does to jobs and nodes, and a run: its losses are those of two ranks without Slurm.

What other hosts do too is in tests/failures.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunStopped
from tests.support.backends import STEPS, STRIKE, Slurm, resume_once_told
from tests.support.launched_runs import at_step, causes, curve, train
from tests.support.slurm_cluster import SlurmCluster

Make = Callable[..., tuple[Path, dict[int, float]]]


def test_a_draining_node_and_a_restart_of_slurmctld_disturb_nothing(
    slurm: Slurm, cluster: SlurmCluster, make: Make
) -> None:
    run_dir, expected = make("drained")

    def strike() -> None:
        cluster.ask("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
        cluster.stop_controller()

    rows = at_step(STRIKE, strike), at_step(STEPS - 4, cluster.start_controller)
    train(run_dir, on_row=lambda row: [look(row) for look in rows] and None)
    assert causes(run_dir) == ["done"]
    assert curve(run_dir) == expected
    slurm.assert_nothing_is_left(run_dir)


def test_a_program_that_listens_where_ranks_meet_costs_an_attempt(slurm: Slurm, make: Make) -> None:
    """Whatever the number of the job, which decides the port of the first attempt."""
    first_port = 21_000
    run_dir, expected = make("occupied", launch__port=first_port)
    with ExitStack() as others:
        for job in range(1, 40):
            others.enter_context(socket.create_server(("127.0.0.1", first_port + job)))
        train(run_dir)
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], first["ending"]["host"]) == ("network", "node0")
    assert "Address already in use" in first["ending"]["detail"]
    assert second["ending"]["cause"] == "done"
    assert curve(run_dir) == expected
    slurm.assert_nothing_is_left(run_dir)


def test_a_cancelled_job_stops_the_run_with_a_checkpoint(slurm: Slurm, cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("cancelled")
    with pytest.raises(RunStopped, match="resume cancelled"):
        train(run_dir, on_row=at_step(STRIKE, lambda: cluster.ask("scancel", *cluster.jobs())))
    assert causes(run_dir) == ["stopped"]
    slurm.assert_nothing_is_left(run_dir)
    train(run_dir)
    assert causes(run_dir) == ["stopped", "done"]
    assert attempts_of(run_dir)[1]["from_step"] >= STRIKE, "the checkpoint that the ranks left"
    assert curve(run_dir) == expected


@pytest.mark.long
def test_at_its_time_limit_the_run_asks_for_new_nodes(slurm: Slurm, cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("limited", parallel__timeout_s=120)

    def strike() -> None:
        """Slurm looks at time limits twice a minute: no step is made until it does."""
        (job,) = cluster.jobs()
        resume_once_told(slurm.hang(run_dir))
        cluster.ask("scontrol", "update", f"JobId={job}", "EndTime=now+1minute")

    train(run_dir, on_row=at_step(STRIKE, strike))
    assert causes(run_dir) == ["killed", "done"], "told to stop, and not by a user"
    assert attempts_of(run_dir)[1]["from_step"] >= STRIKE, "the checkpoint that the ranks left"
    assert curve(run_dir) == expected
    assert len(cluster.all_jobs()) == 2
    slurm.assert_nothing_is_left(run_dir)


def test_a_preempted_run_goes_on_when_it_gets_nodes_again(slurm: Slurm, cluster: SlurmCluster, make: Make) -> None:
    run_dir, expected = make("preempted")
    train(run_dir, on_row=at_step(STRIKE, lambda: cluster.submit("sleep 1", "--partition=urgent", "--nodes=1")))
    assert causes(run_dir) == ["killed", "done"]
    assert attempts_of(run_dir)[1]["from_step"] >= STRIKE
    assert curve(run_dir) == expected
    slurm.assert_nothing_is_left(run_dir)
