"""The hosts of a launch: reads them from the config or a hosts file, fills in missing fields, and checks them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError

from infra.containers import Bind
from infra.hosts import DockerHost
from training.config.launch import HostConfig, LaunchConfig
from training.config.run import CheckpointConfig

SHARED_MEMORY_WITH_GPUS_GIB, SHARED_MEMORY_GIB = 16.0, 1.0
TLS_FILES, NO_TLS = ("ca.pem", "cert.pem", "key.pem"), "none"


def read_hosts(launch: LaunchConfig) -> tuple[HostConfig, ...]:
    """Return the hosts of the config or of its hosts file, each with a name; without any, this machine's own daemon.

    Raises ValueError, naming the host, the field and the cure, for hosts that cannot work.
    """
    hosts = read_hosts_file(Path(launch.hosts_file).expanduser()) if launch.hosts_file else launch.hosts
    named = tuple(host.model_copy(update={"name": host.name or default_name(host)}) for host in hosts or [HostConfig()])
    for what, of, cure in (
        ("name", lambda host: host.name, "give each host a `name` of its own"),
        ("daemon", lambda host: host.docker, "write one entry per daemon, with all its GPUs and slots"),
        ("address", lambda host: host.address, "give each host the `address` at which the others reach it"),
    ):
        check_unlike(named, what, of, cure=cure)
    if launch.min_hosts > len(named):
        raise ValueError(f"launch.min_hosts = {launch.min_hosts} of {len(named)} hosts: lower it, or add hosts")
    for host in named:
        check_host(host, alone=len(named) == 1)
    return named


def read_hosts_file(path: Path) -> tuple[HostConfig, ...]:
    """Read a YAML list of hosts, or a mapping with that list under `hosts`; a relative `tls` starts at the file."""
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"launch.hosts_file = {path} does not exist: give the path of a YAML list of hosts") from None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"launch.hosts_file = {path} is not valid YAML: {error}") from None
    entries = content.get("hosts") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} has no list of hosts: write `- name: gpu1` with its fields below, for each host")
    return tuple(_host(entry, where=f"{path}: host {i}", folder=path.parent) for i, entry in enumerate(entries, 1))


def _host(entry: Any, *, where: str, folder: Path) -> HostConfig:
    try:
        host = HostConfig.model_validate(entry)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'entry'}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{where}: {problems}. Its fields: {', '.join(HostConfig.model_fields)}") from None
    if host.tls in ("", NO_TLS):
        return host
    return host.model_copy(update={"tls": str(folder.absolute() / Path(host.tls).expanduser())})


def default_name(host: HostConfig) -> str:
    """Return the name of the machine in the daemon's URL, or of this one: short, and valid in a file's name."""
    machine = urlsplit(host.docker).hostname if not host.docker.startswith("unix:") else socket.gethostname()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", machine or "host").strip("-._")[:64]


def shared_memory_gib(host: DockerHost, launch: LaunchConfig) -> float:
    """Return the size of a container's /dev/shm. NCCL uses about 10 MiB of it per pair of GPUs and channel."""
    return launch.shm_gib or (SHARED_MEMORY_WITH_GPUS_GIB if host.gpus or host.gpu_ids else SHARED_MEMORY_GIB)


def docker_hosts(hosts: Sequence[HostConfig], *, home: Path) -> tuple[DockerHost, ...]:
    """Turn hosts of `read_hosts` into infra's. `home`: SHARDLINE_HOME here; a host may mount that storage elsewhere."""
    return tuple(
        DockerHost(
            name=host.name,
            url=host.docker,
            tls_dir=Path(host.tls).expanduser().absolute() if host.tls not in ("", NO_TLS) else None,
            address=host.address,
            interface=host.interface,
            gpus=host.gpus,
            gpu_ids=host.gpu_ids,
            home=host.home or str(home),
            cpus=host.cpus,
            memory_gib=host.memory_gib,
        )
        for host in hosts
    )


def slots(host: HostConfig, *, gpus_found: int) -> int:
    """Return the number of ranks on the host: as configured, otherwise one per GPU of its container, at least one.

    Raises ValueError for more ranks than GPUs.
    """
    if not host.gpus and not host.gpu_ids:
        return host.slots or 1
    if host.slots > gpus_found:
        raise ValueError(f"host {host.name}: {host.slots} slots on {gpus_found} GPUs: set slots=0 for one per GPU")
    return host.slots or gpus_found


def binds(host: DockerHost, launch: LaunchConfig, *, home: Path) -> tuple[Bind, ...]:
    """Return the mounts: launch.mounts, and the shared folder at the launcher's path, so that a plan's paths are valid.

    Raises ValueError for a mount that is not SOURCE:TARGET with absolute paths.
    """
    more = []
    for mount in launch.mounts:
        source, _, target = mount.partition(":")
        if not (source.startswith("/") and target.startswith("/")) or ":" in target:
            raise ValueError(f"launch.mounts: {mount!r} is not SOURCE:TARGET with two absolute paths, e.g. /data:/data")
        more.append(Bind(source=source, target=target, read_only=True))
    return (Bind(source=host.home, target=str(home), read_only=False), *more)


def memory_binds(saving: CheckpointConfig, *, run_id: str) -> tuple[Bind, ...]:
    """Mount the run's folder in the host's memory. It outlives the ranks' containers; preflight has made it."""
    if not saving.memory_every_steps:
        return ()
    folder = f"{saving.memory_dir}/{run_id}"
    return (Bind(source=folder, target=folder, read_only=False),)


def rank_user(launch: LaunchConfig) -> str:
    """Return launch.user, or this process's user, who may write the run's folder; never root."""
    if launch.user:
        return launch.user
    return "10001:10001" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"


# Checks that need no host


def check_unlike(hosts: Iterable[HostConfig], what: str, of: Callable[[HostConfig], str], *, cure: str) -> None:
    seen: dict[str, str] = {}
    for host in hosts:
        if of(host) in seen:
            pair = (
                f"{host.name} and {seen[of(host)]}" if host.name != seen[of(host)] else f"two hosts named {host.name}"
            )
            raise ValueError(f"{pair} have the same {what}, {of(host)}: {cure}")
        seen[of(host)] = host.name


def check_host(host: HostConfig, *, alone: bool) -> None:
    """Raise ValueError for mistakes in a host's entry that can be found without asking its daemon."""
    check_tls(host)
    check_place(host, alone=alone)
    if host.home and not host.home.startswith("/"):
        raise ValueError(f"host {host.name}: home = {host.home} is relative: give an absolute path on that host")
    if host.gpu_ids and host.gpus not in (0, len(host.gpu_ids)):
        raise ValueError(f"host {host.name}: gpus = {host.gpus}, but {len(host.gpu_ids)} gpu_ids: give one of them")
    gpus = len(host.gpu_ids) or host.gpus
    if 0 < gpus < host.slots:
        raise ValueError(
            f"host {host.name}: {host.slots} slots on {gpus} GPUs: each rank needs a GPU of its own; set slots=0"
        )


def check_tls(host: HostConfig) -> None:
    tcp = host.docker.startswith("tcp:")
    if host.tls and not tcp:
        raise ValueError(f"host {host.name}: tls is for tcp:// daemons, not {host.docker}: leave it out")
    if tcp and not host.tls:
        raise ValueError(
            f"host {host.name}: without TLS whoever reaches {host.docker} is root on that host: give in tls the folder "
            f"of this client's certificates, or an ssh:// address; tls: {NO_TLS} goes without"
        )
    folder = Path(host.tls).expanduser()
    missing = [name for name in TLS_FILES if tcp and host.tls != NO_TLS and not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"host {host.name}: {folder} has no {', '.join(missing)}: put the daemon's CA (ca.pem) and this "
            "client's certificate and key (cert.pem, key.pem) there"
        )


def check_place(host: HostConfig, *, alone: bool) -> None:
    """Raise ValueError unless ranks can connect there. Names will not do: a Debian host's own name is 127.0.1.1."""
    try:
        address = ipaddress.ip_address(host.address)
    except ValueError:
        raise ValueError(
            f"host {host.name}: address = {host.address!r} is not an IP address: hosts may resolve names differently; "
            "`ip -brief address` on the host lists its addresses"
        ) from None
    if not alone and (address.is_loopback or address.is_unspecified):
        raise ValueError(
            f"host {host.name}: address = {host.address} cannot be reached from other hosts: give its address on the "
            "network between them (`ip -brief address`)"
        )
    if not alone and not host.interface:
        raise ValueError(
            f"host {host.name}: interface is empty: with several hosts, give the one that has {host.address} "
            "(`ip -brief address`), or gloo may choose another"
        )
