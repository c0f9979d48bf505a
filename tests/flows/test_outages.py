"""Servers that are away before a run, in its middle and at its end: it goes on, and all is true and whole later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_servers import LocalServers
from tests.support.observed_run import MIDDLE, WITHIN_S, ObservedRun, kill
from tests.support.user_folder import UserFolder
from tests.support.waiting import until
from training.tracking.rows import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LONG_STEPS = 600
LONG = (f"train.steps={LONG_STEPS}", "train.log_every_steps=5", "checkpoint.every_steps=150")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, begun_home: Path) -> Iterator[LocalServers]:
    """With an MLflow that is named as a server elsewhere would be."""
    started = LocalServers(UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home), names_mlflow=True)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture
def servers(whole: LocalServers) -> Iterator[LocalServers]:
    yield whole
    whole.start()


@pytest.mark.long
def test_without_mlflow_nothing_is_begun_and_the_message_says_so(servers: LocalServers) -> None:
    servers.kill("mlflow")
    before = sorted(servers.user_folder.home.iterdir())
    run = servers.wait(servers.submit("pretrain", servers.config()))
    _, err = servers.user_folder.run("pretrain", str(servers.user_folder.config), expect=1, **servers.environment)
    assert run["state_type"] == "FAILED"
    for message in (run["state"]["message"], err):
        assert f"MLflow at {servers.url('mlflow')} does not answer" in message
        assert "start it, or unset MLFLOW_TRACKING_URI" in message
    assert sorted(servers.user_folder.home.iterdir()) == before


def test_both_away_in_the_middle_cost_nothing(servers: LocalServers) -> None:
    observed = ObservedRun.submitted(servers, *LONG)
    observed.wait_for_step(MIDDLE)
    servers.kill("mlflow")
    servers.kill("prefect")
    observed.wait_for_step(LONG_STEPS // 2)
    servers.start()
    servers.wait(observed.flow_run_id)
    assert observed.statuses() == ("COMPLETED", "FINISHED", "done")
    (progress,) = servers.prefect(
        "/artifacts/latest/filter",
        {"artifacts": {"flow_run_id": {"any_": [observed.flow_run_id]}, "key": {"any_": ["training"]}}},
    )
    assert f"step {LONG_STEPS:,}/{LONG_STEPS:,}" in progress["description"]
    stalls = sorted(
        row["log_stall_ms"] for row in read_rows(observed.folder / "metrics.jsonl") if "log_stall_ms" in row
    )
    assert len(stalls) > LONG_STEPS / 5
    assert stalls[int(0.99 * len(stalls))] < 5, f"the longest: {stalls[-1]:.1f} ms"
    observed.check_the_rest()


@pytest.mark.long
def test_an_end_that_could_not_be_said_is_told_when_they_are_back_though_the_process_is_gone(
    servers: LocalServers,
) -> None:
    observed = ObservedRun.submitted(servers)
    until(lambda: (observed.folder / "outcome.json").exists(), "the last stage", within_s=WITHIN_S)
    flow = observed.flow()
    flow.suspend()
    assert observed.statuses()[1] == "RUNNING"
    servers.kill("mlflow")
    servers.kill("prefect")
    flow.resume()
    until(lambda: (observed.folder / "ending.json").exists(), "how it ended, on disk", within_s=WITHIN_S)
    kill(flow)  # it would go on trying to tell Prefect for minutes
    servers.start()
    until(
        lambda: observed.statuses() == ("COMPLETED", "FINISHED", "done"),
        "the true status, though its worker saw a kill",
        within_s=WITHIN_S,
    )
    observed.check_the_rest()
