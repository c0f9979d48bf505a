"""Several Docker hosts on this machine: daemons in network namespaces, one image, and storage that all of them see.

Each test session takes a slot, by a lock that the kernel drops when the session ends in whatever way. Whoever holds a
slot's lock may remove all that is in it: sessions run side by side, and the next one sweeps after a killed one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.containers import Bind
from infra.hosts import DockerHost
from tests.support.rig import images
from tests.support.rig.certificates import make_authority, make_certificate
from tests.support.rig.daemons import Daemon
from tests.support.rig.network import INTERFACE, Network

NUM_HOSTS = 3
SLOTS = 8
PROGRAMS = ("dockerd", "containerd", "ip", "tc", "nsenter", "unshare", "openssl")
STATE, DATA = Path("/run/shardline-rig"), Path("/var/tmp/shardline-rig")
USER = "10001:10001"
CGROUPS = Path("/sys/fs/cgroup")


def why_no_rig() -> str | None:
    """Why this machine cannot have a rig; None if it can."""
    if os.geteuid() != 0:
        return "the rig needs root: it makes network namespaces and starts Docker daemons"
    if programs := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"the rig needs {', '.join(programs)}: tests/rig/install.sh installs them"
    if (done := subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)).returncode:
        return f"the rig may not make network namespaces here: {done.stderr.strip()}"
    return None


@dataclass(frozen=True)
class RigHost:
    """A host of the rig; `socket` reaches its daemon in a partition too."""

    index: int
    name: str
    url: str
    tls_dir: Path
    address: str
    interface: str
    home: str
    socket: str

    def docker_host(self, **over: Any) -> DockerHost:
        """For infra's functions."""
        config = {"name": self.name, "url": self.url, "tls_dir": self.tls_dir, "address": self.address}
        return DockerHost(**{**config, "interface": self.interface, "home": self.home, **over})


@dataclass(frozen=True)
class Container:
    """As the rig sees it on a host: of any kind, in any state."""

    id: str
    name: str
    status: str
    labels: dict[str, str]


class Rig:
    """Hosts host0, host1 and host2; what tests do to them, and how all of it goes away.

    With `bridges` the daemons make networks of their own for containers, as an ordinary Docker host does.
    """

    def __init__(self, *, num_hosts: int = NUM_HOSTS, bridges: bool = False) -> None:
        self.slot, self._lock = _take_slot()
        self.bridges = bridges
        self.network = Network(self.slot, num_hosts)
        self.folder, self.state = DATA / str(self.slot), STATE / str(self.slot)
        self.home, self.tls_dir, self.wrong_tls_dir = (self.folder / name for name in ("home", "client", "stranger"))
        self.user, self.gateway, self.mounts = USER, self.network.gateway, images.mounts()
        self.daemons = [self._daemon(i) for i in range(num_hosts)]
        self.hosts = [
            RigHost(i, d.name, d.url, self.tls_dir, d.address, INTERFACE, str(self.home), d.socket)
            for i, d in enumerate(self.daemons)
        ]
        self.image = ""
        self._changed: set[int] = set()

    def _daemon(self, i: int) -> Daemon:
        name = f"host{i}"
        return Daemon(
            name=name,
            namespace=self.network.namespaces[i],
            state=self.state / name,
            data=self.folder / name,
            address=self.network.addresses[i],
            tls_dir=self.folder / "daemons",
            cgroup=f"/shardline-rig{self.slot}",
            bridges=self.bridges,
        )

    def up(self) -> None:
        self.network.make()
        for name in ("authority", "other-authority"):
            make_authority(self.folder / name)
        make_certificate(self.folder / "daemons", authority=self.folder / "authority", addresses=self.network.addresses)
        make_certificate(self.tls_dir, authority=self.folder / "authority", addresses=[])
        make_certificate(self.wrong_tls_dir, authority=self.folder / "other-authority", addresses=[])
        self.make_home("home")
        for daemon in self.daemons:
            daemon.start()
        with ThreadPoolExecutor(len(self.daemons)) as pool:
            ids = set(pool.map(self._ready, self.daemons))
        assert len(ids) == 1, f"one archive gave several images: {ids}"
        (self.image,) = ids

    def _ready(self, daemon: Daemon) -> str:
        daemon.wait()
        client = daemon.client()
        try:
            return images.load(client)
        finally:
            client.close()

    def favour(self) -> None:
        """Its containers compute before whatever else runs here: for what is to be timed. By cgroups v1 or v2."""
        name = f"shardline-rig{self.slot}"
        for folder, file, most in (("cpu", "cpu.shares", 262_144), ("", "cpu.weight", 10_000)):
            path = CGROUPS / folder / name / file
            if (CGROUPS / folder).is_dir() and (folder or (CGROUPS / "cgroup.controllers").exists()):
                path.parent.mkdir(exist_ok=True)  # Docker takes a parent that is there
                path.write_text(str(most))

    def down(self) -> None:
        """All of the slot: processes, networks, mounts, files."""
        _sweep(self.slot)
        for daemon in self.daemons:
            if daemon.process is not None:
                daemon.process.wait()
        os.close(self._lock)

    @property
    def binds(self) -> tuple[Bind, ...]:
        """`mounts` for infra's Job."""
        return tuple(Bind(source, target) for source, target in (mount.split(":") for mount in self.mounts))

    def host_config(self, i: int, **over: Any) -> dict[str, Any]:
        """Fields of launch.hosts[i]."""
        host = self.hosts[i]
        fields = {"name": host.name, "docker": host.url, "tls": str(host.tls_dir), "address": host.address}
        return {**fields, "interface": host.interface, **over}

    def make_home(self, name: str = "", *, size_mib: int = 0) -> Path:
        """A folder that the ranks' user may write, at the same path on each host; `size_mib`: a disk of its own."""
        path = self.folder / name if name else Path(tempfile.mkdtemp(dir=self.home))
        path.mkdir(exist_ok=True)
        if size_mib:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "shardline-rig", path], check=True)
        uid, gid = map(int, USER.split(":"))
        os.chown(path, uid, gid)
        path.chmod(0o755)
        return path

    def partition(self, host: RigHost) -> None:
        """Cut its network: data and control plane."""
        self._changed.add(host.index)
        self.network.cut(host.index, off=True)

    def heal(self, host: RigHost) -> None:
        self.network.cut(host.index, off=False)

    def shape(self, host: RigHost, rate: str) -> None:
        """Its network takes at most so much each way, such as 100mbit; empty: no limit."""
        self._changed.add(host.index)
        self.network.shape(host.index, rate)

    def kill_daemon(self, host: RigHost) -> None:
        """kill -9 dockerd; its containers go on."""
        self._changed.add(host.index)
        self.daemons[host.index].kill()

    def start_daemon(self, host: RigHost) -> None:
        """Start it again and wait until it answers; nothing if it runs."""
        daemon = self.daemons[host.index]
        if not daemon.alive():
            daemon.start()
            daemon.wait()

    def power_off(self, host: RigHost) -> None:
        """The host goes away as one without power: daemon, containers, network. start_daemon() and heal() boot it."""
        self.partition(host)
        self.network.end_processes(host.index)
        process = self.daemons[host.index].process
        assert process is not None
        process.wait()

    def containers(self, host: RigHost) -> list[Container]:
        """All on the host, ended ones too; also in a partition."""
        client = self.daemons[host.index].client()
        try:
            rows = client.api.containers(all=True)
        finally:
            client.close()
        return [Container(row["Id"], row["Names"][0].lstrip("/"), row["State"], row["Labels"]) for row in rows]

    def reset(self) -> None:
        """Between tests: all hosts up, connected and empty."""
        for host in self.hosts:
            if host.index in self._changed:
                self.heal(host)
                self.shape(host, "")
                self.start_daemon(host)
            client = self.daemons[host.index].client()
            try:
                for row in client.api.containers(all=True):
                    client.api.remove_container(row["Id"], force=True, v=True)
            finally:
                client.close()
        self._changed.clear()


def _take_slot() -> tuple[int, int]:
    """The first slot that is free, and its lock; every free slot is swept."""
    STATE.mkdir(parents=True, exist_ok=True)
    taken: tuple[int, int] | None = None
    for slot in range(SLOTS):
        lock = os.open(STATE / f"slot{slot}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _sweep(slot)
        if taken is None:
            taken = slot, lock
        else:
            os.close(lock)
    assert taken is not None, f"all {SLOTS} slots of {STATE} are taken by other sessions"
    return taken


def _sweep(slot: int) -> None:
    """Processes first, then what they held; also what a killed session left, in any state."""
    Network(slot, 0).remove()
    folders = [STATE / str(slot), DATA / str(slot)]
    inside = [path for path in _mount_points() if any(path.is_relative_to(folder) for folder in folders)]
    if inside:
        subprocess.run(["umount", "--lazy", *map(str, reversed(inside))], check=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        assert not folder.exists(), f"{folder} cannot be removed"
    for parent in CGROUPS.glob(f"**/shardline-rig{slot}"):
        for path in sorted(filter(Path.is_dir, [parent, *parent.rglob("*")]), reverse=True):
            path.rmdir()


def _mount_points() -> list[Path]:
    """In the order they were made."""
    rows = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(row.split()[4].replace("\\040", " ")) for row in rows]
