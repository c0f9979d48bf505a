"""Emits events in Prefect that people should hear of; automations forward them (flows/servers/alerts.py).

If Prefect does not accept an event, that is logged and has no other effect.
"""

from __future__ import annotations

import socket
from functools import partial
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event

from flows.prefect_ui.links import prefect_page
from flows.prefect_ui.tell import tell_prefect
from flows.servers.alerts import GATE_REFUSED, RUN_CRASHED, RUN_FAILED, TAKEN_BACK
from tasks.launch.failure import cure_of
from tasks.runs.errors import RunFailed
from tasks.workspace.paths import command, home
from tasks.workspace.skip import skip_unreadable
from training.records.results import RegisteredModel
from training.tracking.redaction import without_secrets

REPORTED = "shardline.reported"  # label of a flow run: the number of the start whose end was reported last
MAX_CHARS = 2000  # length of a reason; the run's page has the last lines of the log


def emit(event: str, title: str, *, why: str, cure: str, about: str, run: str = "", link: str = "") -> None:
    """Emit an event. `about`: the run or model; `why` and `cure`: sentences for people."""
    payload = {
        "title": title,
        "run": run,
        "why": without_secrets(why)[:MAX_CHARS],
        "cure": cure,
        "link": link,
        "host": socket.gethostname(),
    }
    resource = {"prefect.resource.id": f"shardline.{about}", "prefect.resource.name": about}
    tell_prefect(f"the event {event} of {about}", partial(emit_event, event, resource=resource, payload=payload))


def report_failure(flow_run_id: UUID, error: Exception) -> None:
    """Report that a flow run failed: its process ends with this error."""
    cure = cure_of(error.cause, error.detail) if isinstance(error, RunFailed) else None

    def report() -> None:
        with get_client(sync_client=True) as client:
            report_end(client, RUN_FAILED, client.read_flow_run(flow_run_id), why=str(error), cure=cure or "")

    tell_prefect("that the flow run failed; `reconcile` reports it later", report)


def report_end(client: SyncPrefectClient, event: str, flow_run: FlowRun, *, why: str, cure: str = "") -> None:
    """Report that a flow run failed or crashed, once for each of its starts, whichever process sees it first."""
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
    """Return the ID of the run that an outermost flow run works on; empty if SHARDLINE_HOME has none."""
    for path in home().glob("*/run.json"):
        with skip_unreadable(f"whether flow run {flow_run.name} began run {path.parent.name} is unknown"):
            begun_by = f'"begun_by":"{flow_run.id}"'.encode()
            if flow_run.name == path.parent.name or begun_by in path.read_bytes().replace(b" ", b""):
                return path.parent.name
    return ""


def report_refusal(model: RegisteredModel, *, run: str = "", flow_run_id: str = "") -> None:
    """Report that the gates refused a version."""
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
    """Report that a champion was rolled back."""
    emit(
        TAKEN_BACK,
        f"{model}/{version} is no longer champion, {model}/{now} is",
        why=why,
        cure=f"`{command('shardline')} history {model}` has the figures; a better version can be promoted as usual",
        about=f"{model}/{version}",
        link=prefect_page(flow_run_id),
    )
