"""Prepares a Prefect server: the work pool, a queue that trains one run at a time, the deployments of prefect.yaml.

A deployment takes its settings from the file when it is made. Later they are Prefect's, where people change them on its
page; a deploy brings its code, schema and form up to date.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfoNotFoundError

import httpx
import tzlocal
import yaml
from pydantic import ValidationError

from flows.presets import PRESETS_FILE, with_overrides
from flows.servers.form import form_schema
from tasks.runs.folder import flattened
from training.config.credentials import without_url_credentials
from training.config.run import RunConfig

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.responses import DeploymentResponse

logger = logging.getLogger(__name__)

POOL, TRAINING_QUEUE = "shardline", "training"
MOST_CHARS = 500  # of a refusal that is logged


@dataclass
class Changes:
    """The outcome of a deploy for one deployment. Settings by their names, such as `config.data.path`."""

    made: bool = False  # there was none
    kept: list[str] = field(default_factory=list)  # are in Prefect otherwise than in prefect.yaml, and stayed so
    dropped: list[str] = field(default_factory=list)  # this version's config has no such field


def worker_name() -> str:
    """Return the name of this machine's worker. Prefect labels the runs that the worker submits with it."""
    return f"shardline-{socket.gethostname()}"


def make_pool(*, kind: str = "process", template: dict[str, Any] | None = None) -> None:
    """Make the pool and its queue on the server of PREFECT_API_URL, where they are missing.

    `template`: Prefect's base job template, which a pool that exists gets too; default that of a process worker.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    made = WorkPoolCreate(
        name=POOL, type=kind, base_job_template=template or ProcessWorker.get_default_base_job_template()
    )
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(made)
        except ObjectAlreadyExists:
            if template:
                client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_queue(TRAINING_QUEUE, work_pool_name=POOL, concurrency_limit=1)


def deploy(*, reset: Collection[str] = ()) -> dict[str, Changes]:
    """Make prefect.yaml's deployments on the server of PREFECT_API_URL, where they are missing.

    Of one that exists the code, the schema and the form change; fields that this version's config lacks are dropped, so
    that the next run is not refused. `reset`: deployments that become as the file has them. Returns what happened to
    each. Raises ValueError for a name that is in no entry.
    """
    from prefect.client.orchestration import get_client

    entries = {entry["name"]: entry for entry in yaml.safe_load(PRESETS_FILE.read_text())["deployments"]}
    if unknown := [name for name in reset if name not in entries]:
        raise ValueError(f"there is no deployment {unknown[0]!r}: choose {', '.join(entries)}")
    with get_client(sync_client=True) as client:
        found = {name: _deployed(client, entry, reset=name in reset) for name, entry in entries.items()}
    made = [name for name, changes in found.items() if changes.made]
    if made and len(made) < len(found):
        logger.info("made the deployments that Prefect did not have: %s", ", ".join(made))
    return found


def _deployed(client: SyncPrefectClient, entry: Mapping[str, Any], *, reset: bool) -> Changes:
    """Make one deployment, or bring it up to date."""
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.exceptions import ObjectNotFound
    from prefect.flows import load_flow_from_entrypoint

    flow: Any = load_flow_from_entrypoint(entry["entrypoint"])
    schema = form_schema(flow)
    code: dict[str, Any] = {
        "entrypoint": entry["entrypoint"],
        "version": flow.version,
        "parameter_openapi_schema": schema,
    }
    place: dict[str, Any] = {
        "work_pool_name": entry["work_pool"]["name"],
        "work_queue_name": entry["work_pool"]["work_queue_name"],
    }
    usual: dict[str, Any] = {"paused": False, "job_variables": {}, "enforce_parameter_schema": True}
    name, file = entry["name"], _of_file(entry)
    try:
        known = client.read_deployment_by_name(f"{flow.name}/{name}")
    except ObjectNotFound:
        flow_id = client.create_flow_from_name(flow.name)
        settings = file | {"schedules": _schedules(file)}
        client.create_deployment(flow_id, name, pull_steps=[], **code, **place, **usual, **settings)
        return Changes(made=True)
    now, changes = _of_server(known), Changes()
    wanted = deepcopy(file if reset else now)
    _drop_unknown(name, wanted["parameters"], schema["properties"], changes)
    changes.kept = _differences(file, wanted) + (["paused"] if known.paused and not reset else [])
    update = {key: value for key, value in wanted.items() if value != now[key] and key != "schedules"}
    update |= {key: value for key, value in code.items() if value != getattr(known, key)}
    update |= place if reset or known.work_pool_name is None else {}  # None: the pool was deleted
    update |= usual if reset else {}
    try:
        if update:
            client.update_deployment(known.id, DeploymentUpdate(**update))
        if wanted["schedules"] != now["schedules"]:
            for schedule in known.schedules:
                client.delete_deployment_schedule(known.id, schedule.id)
            client.create_deployment_schedules(known.id, _schedules(wanted))
    except httpx.HTTPStatusError as error:
        why = without_url_credentials(error.response.text)[:MOST_CHARS]
        logger.warning(
            "Prefect refuses to bring deployment %s up to date, its runs may fail: %s (%s)", name, why, _way_back(name)
        )
        return changes
    _say(name, changes)
    return changes


def _differences(file: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of settings that differ. A field that is missing is its default: Prefect's form writes all."""
    old, new = (_values(settings) for settings in (file, now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return each parameter and each field of the config, with defaults, and the other settings, by name."""
    parameters = dict(settings["parameters"])
    if "config" in parameters:
        with contextlib.suppress(ValidationError):  # `_drop_unknown` warns of it
            parameters["config"] = RunConfig.model_validate(parameters["config"]).model_dump(mode="json")
    return dict(flattened(parameters)) | {name: value for name, value in settings.items() if name != "parameters"}


def _timezone() -> str:
    try:
        return tzlocal.get_localzone_name() or "UTC"
    except ZoneInfoNotFoundError as error:
        logger.warning("schedules take UTC: this machine's time zone is not clear (%s)", error)
        return "UTC"


def _of_file(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry of prefect.yaml. Times of day that name no time zone are this machine's."""
    schedules = []
    for each in entry.get("schedules", ()):
        when = {key: each[key] for key in ("cron", "interval", "rrule") if key in each}
        if "interval" not in when:
            when["timezone"] = each.get("timezone") or _timezone()
        schedules.append(when | {"active": each.get("active", True)})
    return {
        "parameters": deepcopy(entry.get("parameters", {})),
        "tags": list(entry.get("tags", ())),
        "schedules": sorted(schedules, key=str),
        "concurrency_limit": entry.get("concurrency_limit"),
        "description": entry["description"],
    }


def _of_server(known: DeploymentResponse) -> dict[str, Any]:
    """Return the settings that Prefect has, in the form of `_of_file`."""
    schedules = []
    for each in known.schedules:
        schedule: dict[str, Any] = each.schedule.model_dump(mode="json")
        when: dict[str, Any] = {key: schedule[key] for key in ("cron", "interval", "rrule") if key in schedule}
        if "interval" not in when:
            when["timezone"] = schedule.get("timezone")
        more = {"parameters": each.parameters} if each.parameters else {}
        schedules.append(when | {"active": each.active} | more)
    limit = known.global_concurrency_limit
    return {
        "parameters": deepcopy(known.parameters),
        "tags": known.tags,
        "schedules": sorted(schedules, key=str),
        "concurrency_limit": limit.limit if limit else None,
        "description": known.description,
    }


def _schedules(settings: Mapping[str, Any]) -> list[DeploymentScheduleCreate]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule

    found = []
    for each in settings["schedules"]:
        if "interval" in each:
            schedule: Any = IntervalSchedule(interval=timedelta(seconds=each["interval"]))
        elif "cron" in each:
            schedule = CronSchedule(cron=each["cron"], timezone=each["timezone"])
        else:
            schedule = RRuleSchedule(rrule=each["rrule"], timezone=each["timezone"])
        found.append(DeploymentScheduleCreate(schedule=schedule, active=each["active"]))
    return found


def _drop_unknown(name: str, parameters: dict[str, Any], known: Collection[str], changes: Changes) -> None:
    """Take off, in place, parameters that the flow does not have, and what RunConfig has no field for; warn of other
    reasons for which a run would be refused.
    """
    for key in [key for key in parameters if key not in known]:
        del parameters[key]
        changes.dropped.append(key)
    if not (config := parameters.get("config")):
        return
    try:
        RunConfig.model_validate(config)
    except ValidationError as error:
        for problem in error.errors(include_input=False, include_url=False):
            if problem["type"] == "extra_forbidden":
                *sections, last = problem["loc"]
                part: Any = config
                for section in sections:
                    part = part[section]
                del part[last]
                changes.dropped.append(".".join(map(str, ("config", *problem["loc"]))))
    try:
        with_overrides(deepcopy(config), ())
    except ValueError as error:
        why = "; ".join(str(error).splitlines())
        logger.warning("deployment %s will refuse its runs: %s: change it on its page (%s)", name, why, _way_back(name))


def _way_back(name: str) -> str:
    return f"`shardline deploy --reset {name}` takes prefect.yaml's settings"


def _say(name: str, changes: Changes) -> None:
    if changes.kept:
        kept = ", ".join(changes.kept)
        logger.info("deployment %s keeps what was set in Prefect: %s (%s)", name, kept, _way_back(name))
    if changes.dropped:
        logger.warning(
            "deployment %s loses settings that this version does not have: %s", name, ", ".join(changes.dropped)
        )


def reconcile_now() -> None:
    """Start a run of `reconcile`: what ended while the servers were stopped need not wait for its schedule."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException

    try:
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("Reconcile/reconcile")
            client.create_flow_run_from_deployment(deployment.id)
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning("could not start a run of `reconcile` (%s); its schedule starts one within the hour", error)
