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

from flows.prefect_ui.flow import PROCESS
from flows.servers.deploy import worker_name
from flows.stages.crashed_runs import has_crashed, is_guess
from tasks.tracking.final_status import KILLED, EndedRun, RunStatus
from tasks.workspace.processes import process_key

OLD_S, YOUNG_S = 600, 5


def flow_run(kind: StateType, *, age_s: float = OLD_S, flow_run_id: UUID | None = None, **labels: str) -> FlowRun:
    state = State(type=kind, timestamp=datetime.now(UTC) - timedelta(seconds=age_s))
    return FlowRun(id=flow_run_id or uuid4(), flow_id=uuid4(), state=state, labels=dict(labels))


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
    assert has_crashed(flow_run(StateType.RUNNING, **{PROCESS: dead}))
    assert has_crashed(flow_run(StateType.CANCELLING, **{PROCESS: dead}))
    assert not has_crashed(flow_run(StateType.RUNNING, **{PROCESS: process_key(os.getpid())}))
    assert not has_crashed(flow_run(StateType.RUNNING)), "of a version that does not say"


def test_of_another_machine_or_just_begun_nobody_here_can_tell(dead: str) -> None:
    assert not has_crashed(flow_run(StateType.RUNNING, **{PROCESS: f"elsewhere/{dead.partition('/')[2]}"}))
    assert not has_crashed(flow_run(StateType.RUNNING, age_s=YOUNG_S, **{PROCESS: dead})), "a retry that has not begun"


def test_a_pending_one_has_crashed_if_our_worker_submitted_it_and_no_process_is_there(started_for: UUID) -> None:
    ours = {"prefect.worker.name": worker_name()}
    assert has_crashed(flow_run(StateType.PENDING, **ours))
    assert not has_crashed(flow_run(StateType.PENDING, flow_run_id=started_for, **ours))
    assert not has_crashed(flow_run(StateType.PENDING, age_s=YOUNG_S, **ours))
    assert not has_crashed(flow_run(StateType.PENDING, **{"prefect.worker.name": "another"}))


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
