"""After any kill both systems say what is true, MLflow has each metric once, and a resume goes on in the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.local_servers import LocalServers
from tests.support.observed_run import MIDDLE, STEPS, ObservedRun, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Undisturbed = Callable[[Path], dict[int, float]]


def resumed(observed: ObservedRun, undisturbed: Undisturbed) -> None:
    """`shardline resume` ends it, in the same MLflow run, with the losses of a run that nothing happened to."""
    outcome = json.loads(observed.servers.user_folder.run("resume", observed.folder.name, "--json")[0])
    assert outcome["mlflow_run_id"] == observed.mlflow_run_id
    observed.flow_run_id = observed.mlflow.data.tags["prefect.flow_run_id"]
    assert observed.statuses() == ("COMPLETED", "FINISHED", "done")
    assert observed.losses == undisturbed(observed.folder)
    assert max(observed.losses) == STEPS
    observed.check_the_rest()


@pytest.mark.long
def test_a_killed_rank_without_another_attempt_fails_the_run_and_is_named(
    servers: LocalServers, undisturbed: Undisturbed
) -> None:
    observed = ObservedRun.submitted(servers, "launch.attempts=1")
    observed.wait_for_step(MIDDLE)
    kill(observed.ranks()[1])
    assert servers.wait(observed.flow_run_id)["state_type"] == "FAILED"
    assert observed.statuses() == ("FAILED", "FAILED", "killed")
    ended_by = observed.mlflow.data.tags["shardline.ended_by"]
    for message in (observed.message(), ended_by):
        assert "rank 1 was killed (SIGKILL)" in message
    observed.check_the_rest()
    resumed(observed, undisturbed)


@pytest.mark.long
def test_a_run_goes_on_without_its_worker_and_a_mended_one_takes_the_next(
    servers: LocalServers, undisturbed: Undisturbed
) -> None:
    observed = ObservedRun.submitted(servers)
    observed.wait_for_step(MIDDLE)
    queued = servers.submit("promote", model="no-such-model")
    worker = servers.process("worker")
    assert worker is not None
    kill(worker)
    servers.start()
    assert servers.wait(queued)["state_type"] == "FAILED"
    servers.wait(observed.flow_run_id)
    assert observed.statuses() == ("COMPLETED", "FINISHED", "done")
    assert observed.losses == undisturbed(observed.folder)
    observed.check_the_rest()


def test_after_a_power_cut_all_is_told_once_it_is_up_again_and_goes_on(
    servers: LocalServers, undisturbed: Undisturbed
) -> None:
    observed = ObservedRun.submitted(servers)
    observed.wait_for_step(MIDDLE)
    queued = servers.submit(
        "pretrain", servers.config("train.steps=4", "parallel.strategy=single", "data.path=/nowhere")
    )
    services = [process for name in ("worker", "prefect", "mlflow") if (process := servers.process(name))]
    kill(*services, *(child for it in services for child in it.children(recursive=True)), *observed.processes())
    servers.start()
    servers.wait(observed.flow_run_id)
    assert observed.statuses() == ("CRASHED", "KILLED", "killed")
    assert "its process was killed; reported later, by another process" in observed.message()
    assert servers.wait(queued)["state_type"] == "FAILED", "its turn came"
    observed.check_the_rest()
    resumed(observed, undisturbed)
