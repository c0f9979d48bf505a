"""Reports the end of runs that could not report it: their process was killed, or a server did not answer.

First the runs of SHARDLINE_HOME, by their own records. Then flow runs that were killed before they had a record: those
that still count as running in Prefect although their process on this machine is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterId,
    FlowRunFilterParentTaskRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.prefect_ui.events import report_end
from flows.prefect_ui.flow import PROCESS, START
from flows.servers.alerts import RUN_CRASHED, RUN_FAILED
from flows.servers.deploy import POOL, worker_name
from flows.servers.embedded import is_gone
from flows.stages.report import write_page
from tasks.tracking import final_status
from tasks.tracking.final_status import EndedRun, mark_prefect_knows
from tasks.workspace.paths import tracking_uri
from tasks.workspace.processes import has_ended
from tasks.workspace.wait import until
from training.tracking.redaction import without_credentials

logger = logging.getLogger(__name__)

ALIVE = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
SETTLED_S = 60.0  # a busy machine needs this long to start the process of a new state
LOOK_EVERY_S = 1.0
REPORTED_WITHIN_S = 24 * 3600.0  # older ends are not reported; `reconcile` is hourly, and may fail
REPORTED_LATER = "reported later, by another process"


def reconcile_statuses() -> list[EndedRun]:
    """Report the true statuses to MLflow, then to Prefect; return the runs whose status Prefect had wrong.

    Then emit events for flow runs that failed or crashed and could not emit one themselves.
    """
    ended = final_status.reconcile_mlflow()
    if is_gone():
        return []
    corrected = report_ended_runs(ended)
    mark_crashed_flow_runs()
    report_unreported_ends()
    return corrected


def report_ended_runs(runs: Sequence[EndedRun]) -> list[EndedRun]:
    """Write the missing pages of killed runs, then report all to Prefect; return the runs that it had wrong."""
    for run in runs:
        if run.found:
            _write_page(run)
    return report_to_prefect(runs)


def _write_page(run: EndedRun) -> None:
    done = run.ending.status == "FINISHED"
    ended = "" if done else without_credentials(run.ending.why, uri=tracking_uri()) or run.ending.cause
    try:
        write_page(run.run_id, ended=ended, flow_run_id=run.prefect_flow_run_id)
    except Exception as error:
        logger.warning("could not write the report page of %s (%s)", run.run_id, error)


def mark_crashed_flow_runs() -> None:
    """Mark flow runs whose process is gone as crashed, so that the next one in their queue can start.

    A start that has no process yet is watched for SETTLED_S by this process's own clock, which nobody sets.
    """
    alive = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(ALIVE))))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=alive)
        crashed = [run for run in runs if has_crashed(run)]
        for run in crashed + _never_begun(client, [run for run in runs if may_begin(run)]):
            logger.warning("flow run %s still counts as running, but its process is gone: marked as crashed", run.name)
            client.set_flow_run_state(run.id, Crashed(message=f"its process was killed; {REPORTED_LATER}"), force=True)


def _never_begun(client: SyncPrefectClient, runs: list[FlowRun]) -> list[FlowRun]:
    """Return the runs whose process does not begin within SETTLED_S; return sooner if all have begun."""
    if not runs:
        return []
    states = {run.id: run.state_id for run in runs}
    names = ", ".join(run.name for run in runs)
    logger.info("waiting up to %.0f s for the process of %s, which Prefect has started", SETTLED_S, names)

    def have_begun() -> bool:
        waiting = FlowRunFilter(id=FlowRunFilterId(any_=[run.id for run in runs]))
        found = client.read_flow_runs(flow_run_filter=waiting)
        runs[:] = [run for run in found if run.state_id == states[run.id] and may_begin(run)]
        return not runs

    until(have_begun, timeout_s=SETTLED_S, every_s=LOOK_EVERY_S)
    return runs


def report_unreported_ends() -> None:
    """Emit events for Shardline's outermost flow runs that ended within a day and did not emit one themselves."""
    ended = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.FAILED, StateType.CRASHED])),
        end_time=FlowRunFilterEndTime(after_=datetime.now(UTC) - timedelta(seconds=REPORTED_WITHIN_S)),
        parent_task_run_id=FlowRunFilterParentTaskRunId(is_null_=True),
    )
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=ended):
            if run.state is not None and (PROCESS in run.labels or run.work_pool_name == POOL):
                event = RUN_CRASHED if run.state.is_crashed() else RUN_FAILED
                report_end(client, event, run, why=run.state.message or "it left no message")


def has_crashed(run: FlowRun) -> bool:
    """Whether the process of the flow run's newest start was on this machine and is gone."""
    return not _is_pending(run) and run.labels.get(START) == run.run_count and _has_ended(run)


def may_begin(run: FlowRun) -> bool:
    """Whether the flow run was started on this machine, but no process is there: it has yet to begin, or was killed.

    A retry keeps the labels of the old process until it runs.
    """
    if _is_pending(run):  # this machine's worker submitted it
        return run.labels.get("prefect.worker.name") == worker_name() and str(run.id) not in _ids_of_processes()
    return run.labels.get(START) != run.run_count and _has_ended(run)


def _is_pending(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_pending()


def _has_ended(run: FlowRun) -> bool:
    return has_ended(str(run.labels.get(PROCESS, "")))


def _ids_of_processes() -> set[str]:
    """Return the IDs of the flow runs that processes of this machine work on."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.add(process.environ().get("PREFECT__FLOW_RUN_ID", ""))
    return found


def report_to_prefect(runs: Sequence[EndedRun]) -> list[EndedRun]:
    """Set the final states of flow runs that have none, or that Prefect guessed; return the runs that were set.

    A flow run that was started again since is left alone: its new process reports for it.
    """
    corrected = []
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
                if flow_run.state is None or not flow_run.state.is_final() or is_guess(flow_run.state, run):
                    client.set_flow_run_state(flow_run_id, _state(run), force=True)
                    corrected.append(run)
            mark_prefect_knows(run.run_id, run.ending)
    return corrected


def _is_started_again(flow_run: FlowRun, run: EndedRun) -> bool:
    """Whether Retry in Prefect started the flow run again: it waits, or runs and has not resumed its run yet."""
    waits = flow_run.state is not None and (flow_run.state.is_scheduled() or flow_run.state.is_pending())
    return waits or 0 < run.prefect_starts < flow_run.run_count


def is_guess(state: State[Any], run: EndedRun) -> bool:
    """Whether Prefect guessed the state: a process that could not report its end looks failed or crashed."""
    known = run.ending.cause not in {"", "killed"}
    return known and state.type in {StateType.CRASHED, StateType.FAILED} and state.type != _state(run).type


def _state(run: EndedRun) -> State[Any]:
    message = f"{run.ending.why or 'it finished'}; {REPORTED_LATER}"
    if run.ending.status == "FINISHED":
        return Completed(message=message)
    if run.ending.cause == "stopped":
        return Cancelled(message=message)
    return Crashed(message=message) if run.ending.cause == "killed" else Failed(message=message)
