"""After any kill both systems say what is true, MLflow has each metric once, and a resume goes on in the same run."""

from __future__ import annotations

import json

import pytest

from tests.support.local_servers import Up
from tests.support.run_status import MIDDLE, STEPS, Story, kill, until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def undisturbed(up: Up) -> dict[int, float]:
    """Losses of such a run that nothing happens to."""
    story = Story.submitted(up)
    assert up.wait(story.flow_run_id)["state_type"] == "COMPLETED"
    assert story.says() == ("COMPLETED", "FINISHED", "done")
    story.check_the_rest()
    return story.losses


def resumed(story: Story, undisturbed: dict[int, float]) -> None:
    """`shardline resume` ends it, in the same MLflow run, with the losses of a run that nothing happened to."""
    outcome = json.loads(story.up.shop.run("resume", story.folder.name, "--json")[0])
    assert outcome["mlflow_run_id"] == story.mlflow_run_id
    story.flow_run_id = story.mlflow.data.tags["prefect.flow_run_id"]
    assert story.says() == ("COMPLETED", "FINISHED", "done")
    assert story.losses == undisturbed
    assert max(undisturbed) == STEPS
    story.check_the_rest()


def reconciled(up: Up) -> str:
    """By the deployment, as every few minutes; what it found."""
    run = up.wait(up.submit("reconcile"))
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    return str(run["id"])


def test_a_killed_rank_fails_the_run_and_is_named_with_the_signal(up: Up, undisturbed: dict[int, float]) -> None:
    story = Story.submitted(up)
    story.reach(MIDDLE)
    victim = story.ranks()[1]
    kill(victim)
    assert up.wait(story.flow_run_id)["state_type"] == "FAILED"
    assert story.says() == ("FAILED", "FAILED", "killed")
    told = story.mlflow.data.tags["shardline.ended_by"]
    for message in (story.message(), told):
        assert f"rank 1 died: Signal 9 (SIGKILL) received by PID {victim.pid}" in message
    story.check_the_rest()
    resumed(story, undisturbed)


def test_after_a_kill_of_the_flow_its_ranks_leave_and_both_are_told(up: Up, undisturbed: dict[int, float]) -> None:
    story = Story.submitted(up)
    story.reach(MIDDLE)
    kill(story.flow())
    until(lambda: not story.processes(), what="the end of its ranks", within_s=30)
    run = up.wait(story.flow_run_id)
    assert run["state_type"] == "CRASHED"
    reconciled(up)
    assert story.says() == ("CRASHED", "KILLED", "killed")
    story.check_the_rest()
    resumed(story, undisturbed)


def test_a_run_goes_on_without_its_worker_and_a_mended_one_takes_the_next(
    up: Up, undisturbed: dict[int, float]
) -> None:
    story = Story.submitted(up)
    story.reach(MIDDLE)
    queued = up.submit("promote", model="no-such-model")
    worker = up.process("worker")
    assert worker is not None
    kill(worker)
    up.start()
    assert up.wait(queued)["state_type"] == "FAILED"
    up.wait(story.flow_run_id)
    assert story.says() == ("COMPLETED", "FINISHED", "done")
    assert story.losses == undisturbed
    story.check_the_rest()


def test_after_a_power_cut_all_is_told_once_it_is_up_again_and_goes_on(up: Up, undisturbed: dict[int, float]) -> None:
    story = Story.submitted(up)
    story.reach(MIDDLE)
    queued = up.submit("quickstart", up.config("train.steps=4", "parallel.strategy=single", "data.path=/nowhere"))
    services = [process for name in ("worker", "prefect", "mlflow") if (process := up.process(name))]
    kill(*services, *(child for it in services for child in it.children(recursive=True)), *story.processes())
    up.start()
    up.wait(story.flow_run_id)
    assert story.says() == ("CRASHED", "KILLED", "killed")
    assert "its process was killed; nobody was there to say so, it was found later" in story.message()
    assert up.wait(queued)["state_type"] == "FAILED", "its turn came"
    story.check_the_rest()
    resumed(story, undisturbed)
