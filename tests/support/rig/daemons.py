"""dockerd in a network namespace: start it, wait until it answers, kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import docker
import requests
from docker.errors import APIError

START_S = 30.0
NO_BRIDGES = ("--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false", "--userland-proxy=false")


@dataclass
class Daemon:
    """One dockerd and the containerd it starts. `state` has a short path: unix sockets lie in it (108 characters)."""

    name: str
    namespace: str  # empty: the root one
    state: Path
    data: Path
    address: str
    tls_dir: Path
    cgroup: str
    bridges: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def socket(self) -> str:
        return f"unix://{self.state}/docker.sock"

    @property
    def url(self) -> str:
        return f"tcp://{self.address}:2376"

    def start(self) -> None:
        """Start it; wait() says when it answers."""
        self.state.mkdir(parents=True, exist_ok=True)
        self.data.mkdir(parents=True, exist_ok=True)
        self._end_containerd()
        words = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "sh", "-c"]
        words += ['hostname "$0"; exec "$@"', self.name, "dockerd", *self._options()]
        # Not `ip netns exec`: it mounts another /sys, without the cgroups.
        with (self.state / "dockerd.log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def _end_containerd(self) -> None:
        """A killed dockerd's: it dies with it, but where process 1 does not reap, the next dockerd takes the zombie for
        a live one and waits for it in vain. Containers hang on their shims, and are taken over."""
        path = self.state / "exec" / "containerd" / "containerd.pid"
        if path.exists():
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
            path.unlink()

    def _options(self) -> list[str]:
        tls = [f"--tls{part}={self.tls_dir}/{file}.pem" for part, file in (("cacert", "ca"), ("cert", "cert"))]
        return [
            f"--data-root={self.data}",
            f"--exec-root={self.state}/exec",
            f"--pidfile={self.state}/dockerd.pid",
            f"--host={self.socket}",
            f"--host={self.url}",
            "--tlsverify",
            *tls,
            f"--tlskey={self.tls_dir}/key.pem",
            *([] if self.bridges else NO_BRIDGES),
            "--live-restore",  # containers outlive their daemon, as on well-kept hosts
            f"--cgroup-parent={self.cgroup}",
            "--log-level=warn",
        ]

    def wait(self) -> None:
        """Until it answers on its socket."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while not self._answers():
            log = (self.state / "dockerd.log").read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"dockerd of {self.name} ended:\n{log}"
            assert time.monotonic() < deadline, f"dockerd of {self.name} does not answer:\n{log}"
            time.sleep(0.02)

    def _answers(self) -> bool:
        if not (self.state / "docker.sock").exists():
            return False
        client = self.client()
        try:
            return bool(client.ping())
        except (requests.RequestException, APIError):
            return False
        finally:
            client.close()

    def client(self) -> docker.DockerClient:
        """Over the unix socket: it works in a partition too."""
        return docker.DockerClient(base_url=self.socket, version="1.41", timeout=30)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL to dockerd alone; its containers go on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
