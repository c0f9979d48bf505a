"""Hosts of the rig as network namespaces on a switch, and a cable from the switch to us; cuts, and slow lines.

The switch is in a namespace of its own: in the root one, Docker's FORWARD DROP would stop what it passes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

INTERFACE = "eth0"


def ip(*words: str, check: bool = True) -> str:
    return _run("ip", *words, check=check)


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


class Network:
    """Slot N holds 198.18.N.0/24 (RFC 2544's range for tests of networks): we are .1, hosts are .11 and on."""

    def __init__(self, slot: int, num_hosts: int) -> None:
        self.slot = slot
        self.switch = f"shardline-rig{slot}-switch"
        self.cable = f"slrig{slot}"
        self.gateway = f"198.18.{slot}.1"
        self.namespaces = [f"shardline-rig{slot}-host{i}" for i in range(num_hosts)]
        self.addresses = [f"198.18.{slot}.{11 + i}" for i in range(num_hosts)]

    def make(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        self._plug(self.cable, "launcher", self.gateway, namespace="")
        for i, (namespace, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            self._plug(INTERFACE, f"port{i}", address, namespace=namespace)

    def _plug(self, name: str, port: str, address: str, *, namespace: str) -> None:
        where = ["-n", namespace] if namespace else []
        peer = ["peer", "name", name, "netns", namespace or str(os.getpid())]
        ip("-n", self.switch, "link", "add", port, "type", "veth", *peer)
        ip("-n", self.switch, "link", "set", port, "master", "switch", "up")
        ip(*where, "addr", "add", f"{address}/24", "dev", name)
        ip(*where, "link", "set", name, "up")

    def cut(self, i: int, *, off: bool) -> None:
        """Nothing gets to the host or away from it; what is under way is lost."""
        ip("-n", self.switch, "link", "set", f"port{i}", "down" if off else "up")

    def shape(self, i: int, rate: str) -> None:
        """Both ways at most so fast ("100mbit"); empty: as fast as it goes."""
        for namespace, device in ((self.namespaces[i], INTERFACE), (self.switch, f"port{i}")):
            _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
            if rate:
                tbf = ["tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *tbf)

    def end_processes(self, i: int) -> None:
        """SIGKILL all that runs in the host's namespace: daemon, shims, and containers, whose network it is."""
        end_all_in(self.namespaces[i])

    def remove(self) -> None:
        """Also what a killed session left, in any state."""
        for name in _namespaces(f"shardline-rig{self.slot}-"):
            end_all_in(name)
            ip("netns", "del", name)
        if Path(f"/sys/class/net/{self.cable}").exists():
            ip("link", "del", self.cable, check=False)  # the kernel may just be taking it away with the switch


def _namespaces(prefix: str) -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.iterdir() if path.name.startswith(prefix)] if folder.exists() else []


def end_all_in(namespace: str) -> None:
    deadline = time.monotonic() + 10
    while pids := [int(word) for word in ip("netns", "pids", namespace).split()]:
        assert os.getpid() not in pids
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"{pids} in {namespace} do not end"
        time.sleep(0.01)
