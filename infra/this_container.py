"""Describes the container that this process runs in, so that another container like it can be started."""

from __future__ import annotations

import socket
from typing import Any

import docker

SOCKET = "/var/run/docker.sock"


def like_this_one() -> dict[str, Any]:
    """Return docker-py's arguments for a container with the same image, settings, limits, mounts and network.

    The daemon's socket and the group that may open it are left out, because they give root's rights on the machine.
    Raises RuntimeError if this process does not run in a container of the daemon at the socket.
    """
    client = docker.from_env()
    try:
        found = client.api.inspect_container(socket.gethostname())
        image = client.api.inspect_image(found["Image"])
    except docker.errors.DockerException as error:
        raise RuntimeError(f"the Docker daemon at {SOCKET} does not show this container: {error}") from None
    finally:
        client.close()
    config, host = found["Config"], found["HostConfig"]
    return {
        "image": config["Image"],
        "environment": dict(
            entry.split("=", 1) for entry in config["Env"] if entry not in (image["Config"]["Env"] or [])
        ),
        "networks": sorted(found["NetworkSettings"]["Networks"]),
        "volumes": [bind for bind in host["Binds"] or [] if SOCKET not in bind],
        "mem_limit": str(host["Memory"]),
        "entrypoint": config["Entrypoint"],
        "user": config["User"],
        "mounts": [mount for mount in host.get("Mounts") or [] if mount["Target"] != SOCKET],
        "tmpfs": host["Tmpfs"],
        "init": host["Init"],
        "read_only": host["ReadonlyRootfs"],
        "cap_drop": host["CapDrop"],
        "security_opt": host["SecurityOpt"],
        "nano_cpus": host["NanoCpus"],
        "pids_limit": host["PidsLimit"],
        "shm_size": host["ShmSize"],
        "device_requests": host["DeviceRequests"],
        "log_config": host["LogConfig"],
    }


def remove_ended(label: str, *, older_than_hours: int) -> list[str]:
    """Remove the ended containers with that label; return their ids."""
    client = docker.from_env()
    try:
        done = client.containers.prune(filters={"label": label, "until": f"{older_than_hours}h"})
        return list(done["ContainersDeleted"] or [])
    finally:
        client.close()
