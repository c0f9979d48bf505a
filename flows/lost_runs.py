"""Runs whose end one of the two systems has not heard of: the process was killed, or a server was away."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.report import write_page
from tasks import ending
from tasks.ending import Ended, prefect_knows
from tasks.places import tracking_uri
from training.credentials import without_credentials

logger = logging.getLogger(__name__)


def reconcile() -> list[Ended]:
    """Tell MLflow, then Prefect, how they ended; returns those of which Prefect did not know."""
    return tell(ending.reconcile())


def tell(runs: Sequence[Ended]) -> list[Ended]:
    """Write the pages of those that nobody has told of; then as `tell_prefect`."""
    for run in runs:
        if run.found:
            _write_page(run)
    return tell_prefect(runs)


def _write_page(run: Ended) -> None:
    done = run.ending.status == "FINISHED"
    ended = "" if done else without_credentials(run.ending.why, uri=tracking_uri()) or run.ending.cause
    try:
        write_page(run.run_id, ended=ended, flow_run_id=run.prefect_flow_run_id)
    except Exception as trouble:
        logger.warning("no report page of %s (%s)", run.run_id, trouble)


def tell_prefect(runs: Sequence[Ended]) -> list[Ended]:
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
                if flow_run.state is None or not flow_run.state.is_final():
                    client.set_flow_run_state(flow_run_id, _state(run), force=True)
                    told.append(run)
            prefect_knows(run.run_id, run.ending)
    return told


def _is_started_again(flow_run: FlowRun, run: Ended) -> bool:
    """By Retry in Prefect's pages: it waits for its turn, or runs and has not taken its run up yet."""
    waits = flow_run.state is not None and (flow_run.state.is_scheduled() or flow_run.state.is_pending())
    return waits or 0 < run.prefect_starts < flow_run.run_count


def _state(run: Ended) -> State[Any]:
    message = f"{run.ending.why or 'it came to its end'}; nobody was there to say so, it was found later"
    if run.ending.status == "FINISHED":
        return Completed(message=message)
    if run.ending.cause == "stopped":
        return Cancelled(message=message)
    return Crashed(message=message) if run.ending.cause == "killed" else Failed(message=message)
