"""Turns SHARDLINE_HOME/alerts.yaml (who gets which events) into Prefect's blocks and automations.

Each receiver is a block, which holds its address, and one automation that sends it the events. Both are Prefect's own
kinds, so any Prefect server runs them. Secrets are named in the file (env:NAME, file:PATH), never written there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args
from urllib.parse import quote, urlencode

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.workspace.paths import home
from tasks.workspace.wait import until

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import Automation, AutomationCore

logger = logging.getLogger(__name__)

FILE = "alerts.yaml"
RUN_FAILED, RUN_CRASHED = "shardline.run.failed", "shardline.run.crashed"
RUN_STUCK, DISK_FILLS = "shardline.run.stuck", "shardline.run.disk"
GATE_REFUSED, TAKEN_BACK = "shardline.gate.refused", "shardline.champion.taken-back"
TEST = "shardline.alerts.test"  # every receiver gets it
Event = Literal[
    "shardline.run.failed",
    "shardline.run.crashed",
    "shardline.run.stuck",
    "shardline.run.disk",
    "shardline.gate.refused",
    "shardline.champion.taken-back",
]
EVENTS: tuple[Event, ...] = get_args(Event)
AUTOMATION, BLOCK = "Shardline tells ", "shardline-alerts-"  # the names begin with this
DELIVERED_WITHIN_S = 60.0
POLL_S = 0.5

SUBJECT = "Shardline: {{ event.payload.title }}"
BODY = """{{ event.payload.why }}

What to do: {{ event.payload.cure }}
Machine: {{ event.payload.host }}{% if event.payload.link %}
{{ event.payload.link }}{% endif %}"""
JSON = "{{ dict(event.payload, event=event.event, at=event.occurred | string) | tojson }}"

Secret = Annotated[
    str,
    Field(
        pattern=r"^(env|file):.+$",
        description="env:NAME, an environment variable, or file:PATH, a file beside alerts.yaml or elsewhere. "
        "Never write the secret itself here.",
    ),
]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Receiver(Part):
    events: tuple[Event, ...] = Field(EVENTS, min_length=1, description="The events that this receiver gets.")


class Slack(Receiver):
    """A channel of Slack, reached by its incoming webhook."""

    kind: Literal["slack"]
    url: Secret


class Email(Receiver):
    """Mail addresses, reached by a mail server that speaks SMTP."""

    kind: Literal["email"]
    to: tuple[str, ...] = Field(min_length=1, description="The addresses that get the message.")
    sender: str = Field(description="The address that the message comes from.")
    server: str = Field(pattern=r"^[A-Za-z0-9.-]+$", description="Host name of the mail server.")
    port: int = Field(587, ge=1, le=65535, description="Its port.")
    security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="TLS from the first byte (tls), after STARTTLS, or none: only for a server on loopback."
    )
    user: str = Field("", description="The user's name at the mail server; empty sends without signing in.")
    password: Secret | None = Field(None, description="The user's password.")


class Webhook(Receiver):
    """An HTTP address that gets each event as JSON, by POST."""

    kind: Literal["webhook"]
    url: Secret
    headers: dict[str, Secret] = Field({}, description="Headers of the request, for example Authorization.")


AnyReceiver = Annotated[Slack | Email | Webhook, Field(discriminator="kind")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")]


class AlertsFile(Part):
    alerts: dict[Name, AnyReceiver] = Field(description="Receivers, each under a name that you choose.")


@dataclass(frozen=True)
class Address:
    """A receiver with its secrets, ready for Prefect. repr does not show it, so that no log contains secrets."""

    events: tuple[Event, ...]
    save_block: Callable[[str], UUID]
    action: Literal["send-notification", "call-webhook"]


def read_alerts(path: Path | None = None) -> dict[str, Address]:
    """Read SHARDLINE_HOME/alerts.yaml and its secrets; empty without the file. Call this before Prefect is used.

    Variables that it names are removed from this process's environment, so that no run inherits them.
    Raises ValueError, with the cure, for a wrong file or a missing secret.
    """
    path = path or home() / FILE
    if not path.exists():
        return {}
    try:
        file = AlertsFile.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_input=False)]
        raise ValueError(f"{path} is wrong (docs/alerts.md has an example): {'; '.join(problems)}") from None
    secrets = Secrets(path)
    found = {name: _address(name, receiver, secrets) for name, receiver in file.alerts.items()}
    secrets.forget()
    return found


class Secrets:
    """Reads the secrets that references in alerts.yaml name."""

    def __init__(self, path: Path) -> None:
        self.path, self.variables = path, set[str]()

    def read(self, reference: str, *, of: str) -> str:
        kind, _, place = reference.partition(":")
        if kind == "env":
            self.variables.add(place)
            secret = os.environ.get(place, "")
            problem, cure = f"the environment has no {place}", "export it, or name a file (file:PATH)"
        else:
            file = self.path.parent / place
            secret = file.read_text().strip() if file.is_file() else ""
            problem, cure = f"{file} is empty or not there", "write the secret into it, with mode 0600"
        if not secret:
            raise ValueError(f"{self.path}: {of} is {reference}, and {problem}: {cure}")
        return secret

    def forget(self) -> None:
        for name in self.variables:
            os.environ.pop(name, None)


def _address(name: str, receiver: AnyReceiver, secrets: Secrets) -> Address:
    if isinstance(receiver, Webhook):
        url = secrets.read(receiver.url, of=f"alerts.{name}.url")
        headers = {key: secrets.read(value, of=f"alerts.{name}.headers") for key, value in receiver.headers.items()}

        def save_webhook(block: str) -> UUID:
            from prefect.blocks.webhook import Webhook as WebhookBlock

            content: Any = {"content-type": "application/json", **headers}
            return _saved(WebhookBlock(url=url, headers=content), block)

        return Address(receiver.events, save_webhook, "call-webhook")
    if isinstance(receiver, Slack):
        url = secrets.read(receiver.url, of=f"alerts.{name}.url")
    else:
        password = secrets.read(receiver.password, of=f"alerts.{name}.password") if receiver.password else ""
        url = _email_url(receiver, password=password)

    def save_notification(block: str) -> UUID:
        # Prefect has no block for SMTP. Its block for Slack passes any URL to Apprise, which sends mail too.
        from prefect.blocks.notifications import SlackWebhook

        return _saved(SlackWebhook(url=url), block)

    return Address(receiver.events, save_notification, "send-notification")


def _saved(block: Any, name: str) -> UUID:
    saved: UUID = block.save(name, overwrite=True)
    return saved


def _email_url(receiver: Email, *, password: str) -> str:
    """Return the mail server as a URL of Apprise."""
    sign_in = f"{quote(receiver.user, safe='')}:{quote(password, safe='')}@" if receiver.user else ""
    scheme = "mailto" if receiver.security == "none" else "mailtos"
    mode = {"starttls": "starttls", "tls": "ssl", "none": "insecure"}[receiver.security]
    query = {"from": receiver.sender, "to": ",".join(receiver.to), "smtp": receiver.server, "mode": mode}
    return f"{scheme}://{sign_in}{receiver.server}:{receiver.port}/?{urlencode(query | {'format': 'text'})}"


def set_up_alerts(addresses: Mapping[str, Address]) -> None:
    """Make the blocks and automations on the server of PREFECT_API_URL, or change them; remove those of other names.

    An automation that somebody switched off in Prefect's pages stays off.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        known = {each.name: each for each in ours(client)}
        for name, address in addresses.items():
            wanted = _automation(name, address, block=address.save_block(f"{BLOCK}{name}"))
            if (old := known.pop(wanted.name, None)) is None:
                client.create_automation(wanted)
            else:
                client.update_automation(old.id, wanted.model_copy(update={"enabled": old.enabled}))
        for stale in known.values():
            client.delete_automation(stale.id)
            for action in stale.actions:
                if (block := getattr(action, "block_document_id", None)) is not None:
                    client.delete_block_document(block)
    if addresses:
        logger.info("alerts go to %s", ", ".join(addresses))


def ours(client: SyncPrefectClient) -> list[Automation]:
    return [each for each in client.read_automations() if each.name.startswith(AUTOMATION)]


def _automation(name: str, address: Address, *, block: UUID) -> AutomationCore:
    from prefect.events.actions import CallWebhook, SendNotification
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    action = (
        CallWebhook(block_document_id=block, payload=JSON)
        if address.action == "call-webhook"
        else SendNotification(block_document_id=block, subject=SUBJECT, body=BODY)
    )
    return AutomationCore(
        name=f"{AUTOMATION}{name}",
        description=f"Of {', '.join(address.events)}. Made from {FILE}: what is changed here lasts until the next "
        "`shardline up` or `shardline alerts`.",
        enabled=True,
        trigger=EventTrigger(
            expect={*address.events, TEST},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[action],
    )


def send_test() -> dict[str, str]:
    """Send a test event to every receiver; return receiver -> whether it arrived, as Prefect's automations report."""
    from prefect.client.orchestration import get_client
    from prefect.events import emit_event

    since = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        names = {f"prefect.automation.{each.id}": each.name.removeprefix(AUTOMATION) for each in ours(client)}
        payload = {
            "title": "a test",
            "run": "",
            "why": "somebody called `shardline alerts --test`",
            "cure": "nothing",
            "link": "",
            "host": os.uname().nodename,
        }
        resource = {"prefect.resource.id": f"shardline.test-{time.time_ns()}", "prefect.resource.name": "a test"}
        emit_event(TEST, resource=resource, payload=payload)
        outcomes: dict[str, str] = {}

        def all_answered() -> bool:
            for event in _action_events(client, since):
                if (name := names.get(event["resource"]["prefect.resource.id"])) is not None:
                    outcomes[name] = _outcome(event)
            return len(outcomes) == len(names)

        until(all_answered, timeout_s=DELIVERED_WITHIN_S, every_s=POLL_S)
    return {name: outcomes.get(name, f"no answer within {DELIVERED_WITHIN_S:g} s") for name in names.values()}


def _action_events(client: SyncPrefectClient, since: datetime) -> list[dict[str, Any]]:
    names = [f"prefect.automation.action.{what}" for what in ("executed", "failed")]
    content = {"filter": {"occurred": {"since": since.isoformat()}, "event": {"name": names}}}
    reply = client.request("POST", "/events/filter", json=content)
    events: list[dict[str, Any]] = reply.json()["events"]
    return events


def _outcome(event: Mapping[str, Any]) -> str:
    payload = event["payload"]
    if event["event"].endswith("failed"):
        return f"not delivered: {payload.get('reason', '')} {payload.get('notification_log', '')}".strip()
    status = payload.get("status_code", 200)
    return "delivered" if status < 400 else f"not delivered: it answered {status}"
