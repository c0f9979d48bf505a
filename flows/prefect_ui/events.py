"""Events in Prefect of what somebody should know; automations send them on (flows/servers/alerts.py).

That Prefect does not take an event is logged, and changes nothing else.
"""

from __future__ import annotations

import logging
import socket
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event

from flows.prefect_ui.links import prefect_page
from flows.servers.alerts import GATE_REFUSED, RUN_CRASHED, RUN_FAILED, TAKEN_BACK
from tasks.launch.failure import cure_of
from tasks.runs.errors import RunFailed
from tasks.workspace.paths import command, home
from training.records.results import RegisteredModel
from training.tracking.redaction import without_secrets

logger = logging.getLogger(__name__)

REPORTED = "shardline.reported"  # label of a flow run: of which of its starts it was said how that ended
MAX_CHARS = 2000  # of a reason: the last lines of a log are in the run's page


def emit(event: str, title: str, *, why: str, cure: str, about: str, run: str = "", link: str = "") -> None:
    """Emit an event. `about`: the run or model that it is about; `why` and `cure` are sentences for people."""
    payload = {
        "title": title,
        "run": run,
        "why": without_secrets(why)[:MAX_CHARS],
        "cure": cure,
        "link": link,
        "host": socket.gethostname(),
    }
    resource = {"prefect.resource.id": f"shardline.{about}", "prefect.resource.name": about}
    try:
        emit_event(event, resource=resource, payload=payload)
    except Exception as error:
        logger.warning("Prefect did not accept the event %s of %s (%s)", event, about, error)


def report_failure(flow_run_id: UUID, error: Exception) -> None:
    """Say that a flow run failed, whose process ends with this error."""
    cure = cure_of(error.cause, error.detail) if isinstance(error, RunFailed) else None
    try:
        with get_client(sync_client=True) as client:
            report_end(client, RUN_FAILED, client.read_flow_run(flow_run_id), why=str(error), cure=cure or "")
    except Exception as refusal:
        logger.warning("could not tell Prefect that the flow run failed (%s): `reconcile` tells it later", refusal)


def report_end(client: SyncPrefectClient, event: str, flow_run: FlowRun, *, why: str, cure: str = "") -> None:
    """Say that a flow run failed or crashed, once for each of its starts, whoever sees it first."""
    if flow_run.labels.get(REPORTED) == flow_run.run_count:
        return
    run = run_of(flow_run)
    again = f"`{command('shardline')} resume {run}` continues it" if run else "start it again on its page in Prefect"
    emit(
        event,
        f"{run or flow_run.name} {'crashed' if event == RUN_CRASHED else 'failed'}",
        why=why,
        cure=f"{cure}; then {again}" if cure else again,
        about=run or flow_run.name,
        run=run,
        link=prefect_page(str(flow_run.id)),
    )
    client.update_flow_run_labels(flow_run.id, {REPORTED: flow_run.run_count})


def run_of(flow_run: FlowRun) -> str:
    """ID of the run that an outermost flow run works on; empty if there is none in SHARDLINE_HOME."""
    for path in home().glob("*/run.json"):
        if flow_run.name == path.parent.name or f'"begun_by":"{flow_run.id}"' in path.read_text().replace(" ", ""):
            return path.parent.name
    return ""


def report_refusal(model: RegisteredModel, *, run: str = "", flow_run_id: str = "") -> None:
    """Say that the gates refused a version."""
    shardline = command("shardline")
    emit(
        GATE_REFUSED,
        f"the gates refused {model.name}/{model.version}",
        why=model.verdict,
        cure=f"the champion stays; `{shardline} promote {model.name} --version {model.version}` judges it again, "
        "--force skips the gates",
        about=f"{model.name}/{model.version}",
        run=run,
        link=prefect_page(flow_run_id),
    )


def report_taken_back(model: str, *, version: int, now: int, why: str, flow_run_id: str = "") -> None:
    """Say that a champion was taken back."""
    emit(
        TAKEN_BACK,
        f"{model}/{version} is no longer champion, {model}/{now} is",
        why=why,
        cure=f"`{command('shardline')} history {model}` has the figures; a version that is better is promoted as any",
        about=f"{model}/{version}",
        link=prefect_page(flow_run_id),
    )
