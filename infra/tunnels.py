"""Docker over ssh: the machine's own ssh client forwards the daemon's socket to a socket here.

The SDK has an ssh transport, but its reads have no timeout: a request to a host that lost its network would hang. A
forwarded unix socket has timeouts like any other, and ssh uses all settings of the user's ~/.ssh/config.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

DOCKER_SOCKET = "/var/run/docker.sock"
POLL_S = 0.02

_lock = threading.Lock()
_tunnels: dict[str, _Tunnel] = {}


@dataclass(frozen=True)
class _Tunnel:
    """An ssh process. It ends with this process, also after kill -9: its remote `cat` reads a pipe from here."""

    process: subprocess.Popen[bytes]
    folder: Path

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def local_socket(url: str, *, timeout_s: float) -> Path:
    """Return the path of a local socket to the daemon of ssh://[USER@]HOST[:PORT][/SOCKET]; one tunnel per URL.

    Raises ConnectionError with ssh's output, TimeoutError if it takes longer than `timeout_s`.
    """
    with _lock:
        tunnel = _tunnels.get(url)
        if tunnel is None or tunnel.process.poll() is not None:
            if tunnel is not None:
                tunnel.close()
            tunnel = _tunnels[url] = _start(url, timeout_s=timeout_s)
            atexit.register(tunnel.close)
    _wait(tunnel, url, timeout_s=timeout_s)
    return tunnel.folder / "docker.sock"


def _start(url: str, *, timeout_s: float) -> _Tunnel:
    parts = urlsplit(url)
    folder = Path(tempfile.mkdtemp(prefix="shardline-ssh-"))  # 0700: the socket gives root's rights there
    settings = {
        "BatchMode": "yes",  # a prompt for a password would wait forever
        "ConnectTimeout": max(1, round(timeout_s)),
        "ExitOnForwardFailure": "yes",
        "ServerAliveInterval": 5,
        "ServerAliveCountMax": 3,
        "ControlMaster": "no",
        "ControlPath": "none",  # the user's own ssh master would hold the forwarding, and end when the user logs out
    }
    command = ["ssh", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]
    command += ["-L", f"{folder}/docker.sock:{parts.path or DOCKER_SOCKET}"]
    command += ["-p", str(parts.port)] if parts.port else []
    command += ["-l", parts.username] if parts.username else []
    with (folder / "ssh.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--", str(parts.hostname), "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,  # a Ctrl-C must not end ssh: the containers are stopped through this tunnel
        )
    return _Tunnel(process, folder)


def _wait(tunnel: _Tunnel, url: str, *, timeout_s: float) -> None:
    """Wait until the socket exists: ssh makes it after the login."""
    deadline = time.monotonic() + timeout_s
    while not (tunnel.folder / "docker.sock").exists():
        if tunnel.process.poll() is not None:
            output = (tunnel.folder / "ssh.log").read_text(errors="replace").strip()
            raise ConnectionError(f"ssh ended with code {tunnel.process.returncode}: {output}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"ssh to {url} timed out after {timeout_s:.0f} s")
        time.sleep(POLL_S)
