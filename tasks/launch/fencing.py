"""Fencing: ends everything of a run on its Docker hosts, whoever started it, before anything new starts there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from pathlib import Path

from infra import containers
from infra.hosts import DockerHost, HostError, connect, on_each
from tasks.launch.launcher import ANSWER_S, ASKED
from tasks.launch.lease import withdraw_leases

logger = logging.getLogger(__name__)


def remove_containers(
    hosts: Sequence[DockerHost],
    run_id: str,
    run_dir: Path,
    *,
    grace_s: float = 0.0,
    timeout_s: float = ANSWER_S,
    keep: Collection[str] = (),
    keep_lease: Path | None = None,
) -> dict[str, HostError]:
    """Remove all containers of the run from every host; with `grace_s`, ranks save a checkpoint first.

    `keep`: IDs of containers that stand by for the next attempt and have no task; `keep_lease`: their lease.

    Returns the hosts whose containers could not be removed, each with the error; most of them do not answer. Ranks
    there end when they see that the lease of their attempt is gone.
    """

    def stop_on(host: DockerHost) -> None:
        with closing(connect(host, timeout_s=timeout_s)) as client:
            running = [found for found in containers.find(client, run=run_id) if found.status == "running"]
        if running:  # Docker answers when the containers have ended
            with closing(connect(host, timeout_s=grace_s + timeout_s)) as client:
                for container in running:
                    containers.stop(client, container.id, grace_s=grace_s)

    def remove_on(host: DockerHost) -> int:
        with closing(connect(host, timeout_s=timeout_s)) as client:
            found = [each for each in containers.find(client, run=run_id) if each.id not in keep]
            for container in found:
                containers.remove(client, container.id)
            return len(found)

    if grace_s:
        ask_to_stop(run_dir)
        on_each(hosts, stop_on)
    withdraw_leases(run_dir, keep=keep_lease)  # first, so that a launcher that lives knows the reason
    removed = on_each(hosts, remove_on)
    for name, found in removed.items():
        if not isinstance(found, HostError) and found:
            logger.warning("%s: removed %d containers of an earlier attempt at %s", name, found, run_id)
    return {name: result for name, result in removed.items() if isinstance(result, HostError)}


def ask_to_stop(run_dir: Path) -> None:
    """Mark that the nodes were asked to end, so that their launcher, if it lives, does not start them again."""
    for lease in run_dir.glob("*/*/lease"):
        with suppress(OSError):  # a full disk; the lease, which is removed next, has the same effect
            lease.with_name(ASKED).touch()
