"""Prepares a Prefect server: the work pool, a queue that trains one run at a time, the deployments of prefect.yaml.

What people set in Prefect's pages stays: SHARDLINE_HOME/up/deployed.json remembers what the file said when it was
deployed last, so what is otherwise in Prefect was set by somebody.
"""

from __future__ import annotations

import contextlib
import json
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

from flows.presets import PRESETS_FILE, Shape, shape_of, with_overrides
from flows.servers.form import form_schema
from tasks.workspace.paths import home
from training.config.credentials import without_url_credentials
from training.config.run import RunConfig
from training.records.record import read_fields, write_atomically

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.responses import DeploymentResponse

logger = logging.getLogger(__name__)

POOL, TRAINING_QUEUE = "shardline", "training"
MOST_CHARS = 500  # of a refusal that is logged
DEPLOYED = (
    "up/deployed.json"  # in SHARDLINE_HOME: ID of a deployment -> its settings in prefect.yaml at the last deploy
)
# What versions without that record deployed, where it was not as the file has it now. Their schedules had no time zone.
UNRECORDED = {"reconcile": {"tags": [], "schedules": [{"interval": 300, "active": True}]}}
SHAPE: Shape = {"parameters": {"config": shape_of(RunConfig)}}  # of a deployment's settings
_MISSING: Any = object()


@dataclass
class Changes:
    """The settings of one deployment that a deploy changed or left, by their names, such as `config.data.path`."""

    made: bool = False  # there was none
    followed: list[str] = field(default_factory=list)  # became as prefect.yaml has them now
    kept: list[str] = field(default_factory=list)  # stayed as somebody set them
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
    """Make prefect.yaml's deployments on the server of PREFECT_API_URL; those that exist follow the file.

    What somebody set in Prefect stays: parameters field by field, tags, schedules, limit, description. Fields that
    this version's config lacks are dropped, so that the next run is not refused. `reset`: deployments that become as
    the file has them. Returns what happened to each. Raises ValueError for a name that is in no entry.
    """
    from prefect.client.orchestration import get_client

    entries = {entry["name"]: entry for entry in yaml.safe_load(PRESETS_FILE.read_text())["deployments"]}
    if unknown := [name for name in reset if name not in entries]:
        raise ValueError(f"there is no deployment {unknown[0]!r}: choose {', '.join(entries)}")
    path = home() / DEPLOYED
    records = dict(read_fields(path)) if path.exists() else {}
    is_first = not records
    found = dict[str, Changes]()
    try:
        with get_client(sync_client=True) as client:
            for name, entry in entries.items():
                found[name] = _deployed(client, entry, records=records, reset=name in reset)
                if found[name].made and not is_first:
                    logger.info("made deployment %s, which Prefect did not have", name)
                _say(name, found[name])
    finally:
        write_atomically(path, json.dumps(records, indent=2))
    return found


def _deployed(client: SyncPrefectClient, entry: Mapping[str, Any], *, records: dict[str, Any], reset: bool) -> Changes:
    """Make or update one deployment, and its record."""
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
    name, file = entry["name"], _of_file(entry, timezone=_timezone())
    try:
        known = client.read_deployment_by_name(f"{flow.name}/{name}")
    except ObjectNotFound:
        flow_id = client.create_flow_from_name(flow.name)
        settings = file | {"schedules": _schedules(file)}
        made = client.create_deployment(flow_id, name, pull_steps=[], **code, **place, **usual, **settings)
        records[str(made)] = file
        return Changes(made=True)
    now, changes = _of_server(known), Changes()
    before = records.get(str(known.id)) or _of_file(entry, timezone=None) | UNRECORDED.get(name, {})
    old = now if reset else before
    wanted = deepcopy(_merged(file, old, now, filled=_filled(before), shape=SHAPE, changes=changes))
    wanted["parameters"] = {key: value for key, value in wanted["parameters"].items() if key in schema["properties"]}
    changes.dropped += [key for key in now["parameters"] if key not in schema["properties"]]
    if config := wanted["parameters"].get("config"):
        _drop_unknown(name, config, changes)
        if config.get("data", {}).get("path") == "":  # as earlier versions had it: the form takes it for a path
            del config["data"]["path"]
    changes.kept = [each for each in changes.kept if each not in changes.dropped]
    if known.paused:
        (changes.followed if reset else changes.kept).append("paused")
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
    records[str(known.id)] = file
    return changes


def _timezone() -> str:
    try:
        return tzlocal.get_localzone_name() or "UTC"
    except ZoneInfoNotFoundError as error:
        logger.warning("schedules take UTC: this machine's time zone is not clear (%s)", error)
        return "UTC"


def _of_file(entry: Mapping[str, Any], *, timezone: str | None) -> dict[str, Any]:
    """Return the settings of an entry of prefect.yaml. `timezone`: of the times of day that name none."""
    schedules = []
    for each in entry.get("schedules", ()):
        when = {key: each[key] for key in ("cron", "interval", "rrule") if key in each}
        if "interval" not in when:
            when["timezone"] = each.get("timezone", timezone)
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


def _filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with every field of the config: Prefect's form writes them all, beside what somebody set."""
    config = settings["parameters"].get("config")
    with contextlib.suppress(ValidationError):  # an older version's: then what the form wrote counts as set
        if config is not None:
            whole = RunConfig.model_validate(config).model_dump(mode="json")
            return {"parameters": settings["parameters"] | {"config": whole}}
    return {}


def _merged(
    file: Any,
    before: Any,
    now: Any,
    *,
    filled: Any,
    shape: Shape | None,
    changes: Changes,
    place: tuple[str, ...] = (),
) -> Any:
    """Merge three ways: what is as it was `before` becomes as the `file` has it, anything else stays as it is `now`.

    `filled`: what `before` meant, with defaults. `shape`: the sections; None for a value.
    """
    given = [value for value in (file, before, now) if value is not _MISSING]
    if shape is not None and all(isinstance(value, dict) for value in given):
        parts = [value if isinstance(value, dict) else {} for value in (file, before, now, filled)]
        merged = {}
        for key in {**parts[2], **parts[0], **parts[1]}:
            own = [part.get(key, _MISSING) for part in parts]
            merged[key] = _merged(*own[:3], filled=own[3], shape=shape.get(key), changes=changes, place=(*place, key))
        merged = {key: value for key, value in merged.items() if value is not _MISSING}
        return merged or (_MISSING if file is _MISSING else {})
    name = ".".join(place).removeprefix("parameters.")
    if before is _MISSING and now is not _MISSING and now == filled:  # a default, written by Prefect's form
        if file is _MISSING:
            return now
    elif now != before:
        changes.kept += [name] if file != now else []
        return now
    changes.followed += [name] if file != now else []
    return file


def _drop_unknown(name: str, config: dict[str, Any], changes: Changes) -> None:
    """Take off, in place, what RunConfig has no field for; warn of other reasons for which it would refuse a run."""
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
    if changes.followed:
        logger.info("deployment %s follows prefect.yaml in %s", name, ", ".join(changes.followed))
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
