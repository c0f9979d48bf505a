"""Names for processes that outlive the reuse of pids."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil


def process_key(pid: int) -> str:
    """Names a process beyond the reuse of its pid: HOST/PID/START/KERNEL. Empty if it is gone."""
    try:
        return f"{socket.gethostname()}/{pid}/{psutil.Process(pid).create_time():.2f}/{_kernel()}"
    except psutil.NoSuchProcess:
        return ""


def _kernel() -> str:
    """Whose pids they are: this boot's, in this container's namespace. Cloned machines have one name, but not this."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not boot.exists():
        return ""
    return f"{boot.read_text().strip()[:8]}-{pids.stat().st_ino}"


def is_local(key: str) -> bool:
    """Whether the process of that key, if it lives, would be seen here."""
    host, _, rest = key.partition("/")
    return host == socket.gethostname() and rest.rpartition("/")[2] == _kernel()


def local_process(key: str) -> psutil.Process | None:
    """The process that `process_key` named, if it still runs and is of this host; never another one with its pid."""
    pid = int(key.split("/")[1]) if key else 0
    return psutil.Process(pid) if key and process_key(pid) == key else None
