"""Flow runs that Prefect takes for alive: those of a process that is gone are told from those of others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows.prefect_ui.flow import PROCESS, START
from flows.servers.deploy import worker_name
from flows.stages.crashed_runs import has_crashed, is_guess, mark_crashed_flow_runs, may_begin
from tasks.tracking.final_status import KILLED, EndedRun, RunStatus
from tasks.workspace.processes import process_key


def flow_run(kind: StateType, *, flow_run_id: UUID | None = None, starts: int = 1, **labels: str | int) -> FlowRun:
    state = State(type=kind)
    return FlowRun(id=flow_run_id or uuid4(), flow_id=uuid4(), state=state, run_count=starts, labels=dict(labels))


@pytest.fixture(scope="module")
def dead() -> str:
    """The key of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    key = process_key(process.pid)
    process.communicate()
    return key


@pytest.fixture
def started_for() -> Iterator[UUID]:
    """The flow run that a living process was started for, by a worker."""
    flow_run_id = uuid4()
    environment = os.environ | {"PREFECT__FLOW_RUN_ID": str(flow_run_id)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        yield flow_run_id
        process.communicate()


def test_a_running_one_has_crashed_with_its_process(dead: str) -> None:
    assert has_crashed(flow_run(StateType.RUNNING, **{PROCESS: dead, START: 1}))
    assert has_crashed(flow_run(StateType.CANCELLING, **{PROCESS: dead, START: 1}))
    assert not has_crashed(flow_run(StateType.RUNNING, **{PROCESS: process_key(os.getpid()), START: 1}))
    assert not has_crashed(flow_run(StateType.RUNNING)), "not of ours"


def test_one_of_another_machine_is_never_judged_here(dead: str) -> None:
    elsewhere = flow_run(StateType.RUNNING, **{PROCESS: f"elsewhere/{dead.partition('/')[2]}", START: 1})
    assert not has_crashed(elsewhere)
    assert not may_begin(elsewhere)
    assert not may_begin(flow_run(StateType.PENDING, **{"prefect.worker.name": "another"}))


def test_a_retry_with_the_labels_of_the_old_process_has_yet_to_begin(dead: str) -> None:
    retry = flow_run(StateType.RUNNING, starts=2, **{PROCESS: dead, START: 1})
    assert may_begin(retry)
    assert not has_crashed(retry)


def test_a_pending_one_of_our_worker_without_a_process_has_yet_to_begin(started_for: UUID) -> None:
    ours = {"prefect.worker.name": worker_name(), START: 1}
    assert may_begin(flow_run(StateType.PENDING, **ours))
    assert not has_crashed(flow_run(StateType.PENDING, **ours))
    assert not may_begin(flow_run(StateType.PENDING, flow_run_id=started_for, **ours))


class Server:
    """Prefect's answers: the flow runs at the first look, and at later ones."""

    def __init__(self, *looks: list[FlowRun]) -> None:
        self.looks = list(looks)
        self.crashed: list[UUID] = []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_flow_runs(self, *, flow_run_filter: object) -> list[FlowRun]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def set_flow_run_state(self, flow_run_id: UUID, state: State[object], *, force: bool) -> None:
        self.crashed.append(flow_run_id)


@pytest.mark.parametrize("begins", [True, False])
def test_a_start_without_a_process_counts_as_crashed_only_after_it_was_watched(
    begins: bool, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state's own time is an hour old, as it is when this machine's clock was set forward."""
    state = State(type=StateType.RUNNING, timestamp=datetime.now(UTC) - timedelta(hours=1))
    old = FlowRun(id=uuid4(), flow_id=uuid4(), state=state, run_count=2, labels={PROCESS: dead, START: 1})
    begun = old.model_copy(update={"labels": {PROCESS: process_key(os.getpid()), START: 2}})
    server = Server([old], [old], [begun if begins else old])
    monkeypatch.setattr("flows.stages.crashed_runs.get_client", lambda **_: server)
    monkeypatch.setattr("flows.stages.crashed_runs.SETTLED_S", 1.0)
    monkeypatch.setattr("flows.stages.crashed_runs.LOOK_EVERY_S", 0.1)
    mark_crashed_flow_runs()
    assert server.crashed == ([] if begins else [old.id])


@pytest.mark.parametrize(
    ("ending", "kind", "guessed"),
    [
        (RunStatus(status="FINISHED", cause="done"), StateType.CRASHED, True),
        (RunStatus(status="FINISHED", cause="done"), StateType.FAILED, True),
        (RunStatus(status="FINISHED", cause="done"), StateType.COMPLETED, False),
        (RunStatus(status="KILLED", cause="stopped"), StateType.FAILED, True),
        (RunStatus(status="FAILED", cause="bad loss"), StateType.CRASHED, True),
        (RunStatus(status="FAILED", cause="bad loss"), StateType.FAILED, False),
        (KILLED, StateType.CRASHED, False),
    ],
)
def test_what_the_run_said_of_its_end_counts_more_than_what_prefect_made_of_its_process(
    ending: RunStatus, kind: StateType, guessed: bool
) -> None:
    run = EndedRun(run_id="r1", ending=ending, found=False, prefect_flow_run_id=str(uuid4()), prefect_starts=1)
    assert is_guess(State(type=kind), run) is guessed
