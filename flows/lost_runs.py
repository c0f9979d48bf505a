"""Runs whose end one of the two systems has not heard of: the process was killed, or a server was away."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed

from tasks import ending
from tasks.ending import Ended, prefect_knows

logger = logging.getLogger(__name__)


def reconcile() -> list[Ended]:
    """Tell MLflow, then Prefect, how they ended; returns those of which Prefect did not know."""
    return tell_prefect(ending.reconcile())


def tell_prefect(runs: Sequence[Ended]) -> list[Ended]:
    """A flow run that Prefect has seen end is left as it is."""
    told = []
    with get_client(sync_client=True) as client:
        for run in runs:
            flow_run_id = UUID(run.prefect_flow_run_id)
            try:
                state = client.read_flow_run(flow_run_id).state
            except ObjectNotFound:
                logger.warning("this Prefect server does not know flow run %s of %s", flow_run_id, run.run_id)
            else:
                if state is None or not state.is_final():
                    client.set_flow_run_state(flow_run_id, _state(run), force=True)
                    told.append(run)
            prefect_knows(run.run_id, run.ending)
    return told


def _state(run: Ended) -> State[Any]:
    message = f"{run.ending.why or 'it came to its end'}; nobody was there to say so, it was found later"
    if run.ending.status == "FINISHED":
        return Completed(message=message)
    if run.ending.cause == "stopped":
        return Cancelled(message=message)
    return Crashed(message=message) if run.ending.cause == "killed" else Failed(message=message)
