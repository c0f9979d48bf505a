"""The model servers of this machine: what runs, and ending one in order."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import UTC, datetime

import httpx
import psutil

from tasks.serving.server_record import ServerRecord, local_records
from tasks.workspace.processes import is_alive, local_process, pid_of
from tasks.workspace.wait import until
from training.records.record import Record

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
POLL_S = 0.1
TIMEOUT_S = 120.0  # for a server to end: its DRAIN_S, and its engine


class RunningServer(Record):
    """A server of this machine, or one replica of it."""

    url: str
    """Address at which clients reach the server, with all its replicas."""
    own_url: str
    """Address at which this process answers, and no other replica."""
    ref: str
    """Model that the server was asked to serve, such as quickstart@champion."""
    model: str
    """Name of the model in the registry."""
    version: int | None
    """Number of the version that it serves; None if it does not answer."""
    status: str
    """Status that the server reports, killed, or that it does not answer."""
    pid: int
    """Number of the server's process."""
    since: str
    """Time at which the process started, in ISO 8601 and UTC; empty if it was killed."""


class StoppedServer(Record):
    """A server that has ended, with all its replicas."""

    url: str
    """Address of the server that was stopped."""
    pids: tuple[int, ...]
    """Numbers of the processes that have ended, one for each replica."""


def list_servers() -> tuple[RunningServer, ...]:
    """Return the servers and replicas with a record in this SHARDLINE_HOME, by address; killed ones too."""
    rows = [_row(record) for _, record in local_records()]
    return tuple(sorted(rows, key=lambda row: (row.url, row.own_url)))


def _row(record: ServerRecord) -> RunningServer:
    pid, version, since = pid_of(record.process), None, ""
    if (process := local_process(record.process)) is None:
        status = "killed"
    else:
        since = datetime.fromtimestamp(process.create_time(), UTC).isoformat(timespec="seconds")
        try:  # trust_env: a proxy of the environment is no way to a server beside us
            health = httpx.get(f"{record.url}/health", timeout=ANSWER_S, trust_env=False).raise_for_status().json()
            status, version = str(health["status"]), int(health["version"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            status = f"does not answer ({type(error).__name__})"
    return RunningServer(
        url=record.clients_url,
        own_url=record.url,
        ref=record.ref,
        model=record.model,
        version=version,
        status=status,
        pid=pid,
        since=since,
    )


def stop_server(url: str) -> StoppedServer:
    """End the server at `url` with all its replicas: each finishes its requests. Returns when they have ended.

    Raises ValueError if none is there, RuntimeError if one does not come to an end.
    """
    found = [each for each in local_records() if url.rstrip("/") in (each[1].url, each[1].clients_url)]
    if not found:
        known = sorted({record.clients_url for _, record in local_records()})
        raise ValueError(f"no server of this machine is at {url}: those that run are at {', '.join(known) or 'none'}")
    processes = [process for _, record in found if (process := local_process(record.process))]
    supervisors = {process for _, record in found if (process := local_process(record.supervisor))}
    for process in supervisors or processes:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            process.terminate()
    logger.info("sent SIGTERM to the server at %s; it finishes its requests", url)

    def running() -> list[int]:
        return [process.pid for process in {*processes, *supervisors} if is_alive(process)]

    if not until(lambda: not running(), timeout_s=TIMEOUT_S, every_s=POLL_S):
        pids = " ".join(map(str, running()))
        raise RuntimeError(f"the server at {url} still runs {TIMEOUT_S:.0f} s after SIGTERM: `kill -9 {pids}`")
    for path, record in found:
        if path.exists() and ServerRecord.read(path).process == record.process:  # a killed server leaves it
            path.unlink()
    return StoppedServer(url=url, pids=tuple(sorted(process.pid for process in processes)))
