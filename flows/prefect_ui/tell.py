"""Calls Prefect without depending on it: what it does not accept is lost with a warning, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prefect.runtime import flow_run

from flows.servers.embedded import NOTICED_WITHIN_S, is_gone

logger = logging.getLogger(__name__)


def tell_prefect(what: str, call: Callable[[], object]) -> None:
    """Call Prefect. If it does not accept `what`, that is logged; nothing is called once the embedded server is gone,
    which has been logged then.
    """
    if is_gone():
        return
    try:
        call()
    except Exception as error:
        if not is_gone(within_s=NOTICED_WITHIN_S):
            logger.warning("Prefect did not accept %s (%s)", what, error)


def outermost_flow_run() -> str:
    """Return the ID of the outermost flow run, which people see; empty outside flows. Prefect knows it, where flows
    call flows: once the embedded server is gone, this is the ID of the flow run that is known here.
    """
    return str((flow_run.id if is_gone() else flow_run.root_flow_run_id) or "")
