"""Servers that are away before a run, in its middle and at its end: it goes on, and all is true and whole later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.local_servers import Up
from tests.support.run_status import MIDDLE, Story, kill, until
from tests.support.user_folder import Shop
from training.tracking.rows import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

LONG_STEPS = 2000
LONG = (f"train.steps={LONG_STEPS}", "train.log_every_steps=5", "checkpoint.every_steps=500")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """With an MLflow that is named as a server elsewhere would be."""
    started = Up(Shop(tmp_path_factory.mktemp("shop")), names_mlflow=True)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture
def up(whole: Up) -> Iterator[Up]:
    yield whole
    whole.start()


def test_without_mlflow_nothing_is_begun_and_the_message_says_so(up: Up) -> None:
    up.kill("mlflow")
    before = sorted(up.shop.home.iterdir())
    run = up.wait(up.submit("quickstart", up.config()))
    _, err = up.shop.run("pretrain", str(up.shop.config), expect=1, **up.environment)
    assert run["state_type"] == "FAILED"
    for message in (run["state"]["message"], err):
        assert f"MLflow at {up.url('mlflow')} does not answer" in message
        assert "start it, or unset MLFLOW_TRACKING_URI" in message
    assert sorted(up.shop.home.iterdir()) == before


def test_both_away_in_the_middle_cost_nothing(up: Up) -> None:
    story = Story.submitted(up, *LONG)
    story.reach(MIDDLE)
    up.kill("mlflow")
    up.kill("prefect")
    story.reach(LONG_STEPS // 2)
    up.start()
    up.wait(story.flow_run_id)
    assert story.says() == ("COMPLETED", "FINISHED", "done")
    (progress,) = up.prefect(
        "/artifacts/latest/filter",
        {"artifacts": {"flow_run_id": {"any_": [story.flow_run_id]}, "key": {"any_": ["training"]}}},
    )
    assert f"step {LONG_STEPS:,}/{LONG_STEPS:,}" in progress["description"]
    stalls = sorted(row["log_stall_ms"] for row in read_rows(story.folder / "metrics.jsonl") if "log_stall_ms" in row)
    assert len(stalls) > LONG_STEPS / 5
    assert stalls[int(0.99 * len(stalls))] < 5, f"the longest: {stalls[-1]:.1f} ms"
    story.check_the_rest()


def test_an_end_that_could_not_be_said_is_told_when_they_are_back_though_the_process_is_gone(up: Up) -> None:
    story = Story.submitted(up)
    until(lambda: (story.folder / "outcome.json").exists(), what="the last stage")
    flow = story.flow()
    flow.suspend()
    assert story.says()[1] == "RUNNING"
    up.kill("mlflow")
    up.kill("prefect")
    flow.resume()
    until(lambda: (story.folder / "ending.json").exists(), what="how it ended, on disk")
    kill(flow)  # it would go on trying to tell Prefect for minutes
    up.start()
    until(lambda: story.says() == ("COMPLETED", "FINISHED", "done"), what="the truth, though its worker saw a kill")
    story.check_the_rest()
