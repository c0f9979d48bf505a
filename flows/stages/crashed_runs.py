"""Runs whose end one of the two systems has not heard of: the process was killed, or a server was away.

First the runs of SHARDLINE_HOME, by their own records. Then flow runs that never came to have such: those that Prefect
takes for alive, though their process on this machine is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.prefect_ui.flow import PROCESS
from flows.servers.deploy import worker_name
from flows.stages.report import write_page
from tasks.tracking import final_status
from tasks.tracking.final_status import EndedRun, mark_prefect_knows
from tasks.workspace.paths import tracking_uri
from tasks.workspace.processes import is_local, local_process
from training.tracking.redaction import without_credentials

logger = logging.getLogger(__name__)

ALIVE = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
SETTLED_S = 60.0  # from a state to the process that it is about, on a busy machine
LOST = "its process was killed; nobody was there to say so, it was found later"


def reconcile_statuses() -> list[EndedRun]:
    """Tell MLflow, then Prefect, how they ended; returns those of which Prefect did not know."""
    told = tell(final_status.reconcile_mlflow())
    end_lost()
    return told


def tell(runs: Sequence[EndedRun]) -> list[EndedRun]:
    """Write the pages of those that nobody has told of; then as `tell_prefect`."""
    for run in runs:
        if run.found:
            _write_page(run)
    return tell_prefect(runs)


def _write_page(run: EndedRun) -> None:
    done = run.ending.status == "FINISHED"
    ended = "" if done else without_credentials(run.ending.why, uri=tracking_uri()) or run.ending.cause
    try:
        write_page(run.run_id, ended=ended, flow_run_id=run.prefect_flow_run_id)
    except Exception as trouble:
        logger.warning("no report page of %s (%s)", run.run_id, trouble)


def end_lost() -> list[FlowRun]:
    """Tell Prefect that they crashed, which gives their place in the queue to the next one."""
    alive = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(ALIVE))))
    with get_client(sync_client=True) as client:
        lost = [run for run in client.read_flow_runs(flow_run_filter=alive) if is_lost(run)]
        for run in lost:
            logger.warning("flow run %s is taken for alive, but its process is gone: now marked crashed", run.name)
            client.set_flow_run_state(run.id, Crashed(message=LOST), force=True)
    return lost


def is_lost(run: FlowRun) -> bool:
    """Of this machine, and gone. A retry has the old process's label until it runs: hence the age."""
    if run.state is None or (datetime.now(UTC) - run.state.timestamp).total_seconds() < SETTLED_S:
        return False
    if run.state.type == StateType.PENDING:  # submitted by our worker, and never begun
        return run.labels.get("prefect.worker.name") == worker_name() and str(run.id) not in _ids_of_processes()
    process = str(run.labels.get(PROCESS, ""))
    return is_local(process) and local_process(process) is None


def _ids_of_processes() -> set[str]:
    """Flow runs that processes of this machine were started for."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.add(process.environ().get("PREFECT__FLOW_RUN_ID", ""))
    return found


def tell_prefect(runs: Sequence[EndedRun]) -> list[EndedRun]:
    """A flow run that Prefect has seen end is left as it is, and one that was started again since: that start says."""
    told = []
    with get_client(sync_client=True) as client:
        for run in runs:
            flow_run_id = UUID(run.prefect_flow_run_id)
            try:
                flow_run = client.read_flow_run(flow_run_id)
            except ObjectNotFound:
                logger.warning("this Prefect server does not know flow run %s of %s", flow_run_id, run.run_id)
            else:
                if _is_started_again(flow_run, run):
                    continue
                if flow_run.state is None or not flow_run.state.is_final() or is_a_guess(flow_run.state, run):
                    client.set_flow_run_state(flow_run_id, _state(run), force=True)
                    told.append(run)
            mark_prefect_knows(run.run_id, run.ending)
    return told


def _is_started_again(flow_run: FlowRun, run: EndedRun) -> bool:
    """By Retry in Prefect's pages: it waits for its turn, or runs and has not taken its run up yet."""
    waits = flow_run.state is not None and (flow_run.state.is_scheduled() or flow_run.state.is_pending())
    return waits or 0 < run.prefect_starts < flow_run.run_count


def is_a_guess(state: State[Any], run: EndedRun) -> bool:
    """A process that cannot tell Prefect of an end that it has come to fails, or is called a crash by its worker."""
    known = run.ending.cause not in {"", "killed"}
    return known and state.type in {StateType.CRASHED, StateType.FAILED} and state.type != _state(run).type


def _state(run: EndedRun) -> State[Any]:
    message = f"{run.ending.why or 'it came to its end'}; nobody was there to say so, it was found later"
    if run.ending.status == "FINISHED":
        return Completed(message=message)
    if run.ending.cause == "stopped":
        return Cancelled(message=message)
    return Crashed(message=message) if run.ending.cause == "killed" else Failed(message=message)
