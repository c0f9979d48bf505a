"""Runs whose process was killed before it could say how they ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from tasks import track

logger = logging.getLogger(__name__)


def reconcile() -> None:
    """Close them in MLflow, and mark them crashed in Prefect."""
    mark_crashed(track.reconcile())


def mark_crashed(runs: Sequence[track.LostRun]) -> None:
    """In Prefect; MLflow knows already."""
    with get_client(sync_client=True) as client:
        for lost in runs:
            if lost.prefect_flow_run_id:
                crashed: State[Any] = Crashed(message="its process was killed without a word; found later")
                try:
                    client.set_flow_run_state(UUID(lost.prefect_flow_run_id), crashed, force=True)
                except ObjectNotFound:
                    logger.warning("this Prefect server does not know flow run %s", lost.prefect_flow_run_id)
