"""Processes of this machine: names that stay unique when PIDs are reused, ending processes, and free ports."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tasks.workspace.wait import until

PR_SET_PDEATHSIG = 1  # prctl(2)
ALIVE_EVERY_S = 0.02  # between two checks whether a process that must end still lives


def process_key(pid: int) -> str:
    """Return a name that stays unique when PIDs are reused, and when the clock is set: HOST/PID/START/KERNEL.

    START: clock ticks between the boot of the machine and the start of the process. HOST is only for people. Empty if
    the process is gone, or has ended and waits for its parent (a zombie).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = stat.rpartition(")")[2].split()  # what is before is the command's name: anything, also ")"
    return "" if state in "ZX" else f"{socket.gethostname()}/{pid}/{fields[18]}/{_kernel()}"


def _kernel() -> str:
    """Return a name of the kernel that gives the PIDs: its boot and PID namespace, which differ on cloned machines."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip() if boot.exists() else ''}-{pids.stat().st_ino}"


def is_local(key: str) -> bool:
    """Return whether the process of that key, if it lives, is visible here."""
    host, _, identity = key.partition("/")
    return host == socket.gethostname() and identity.endswith(f"/{_kernel()}")


def pid_of(key: str) -> int:
    return int(key.split("/")[1])


def local_process(key: str) -> psutil.Process | None:
    """The process that `process_key` named, if it still runs and is of this host; never another one with its pid.

    The host may have got another name since.
    """
    if not key.endswith(f"/{_kernel()}"):
        return None
    with suppress(psutil.NoSuchProcess):  # it ends at this moment
        process = psutil.Process(pid_of(key))
        return process if process_key(process.pid).partition("/")[2] == key.partition("/")[2] else None
    return None


def has_ended(key: str) -> bool:
    """Return whether the process of that key was of this host and has ended; False where that cannot be known here."""
    return is_local(key) and local_process(key) is None


def stop_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends in any way (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_process(
    process: subprocess.Popen[Any] | psutil.Process, *, grace_s: float, with_descendants: bool = False
) -> None:
    """End a process with SIGTERM, or with SIGKILL if it still runs after `grace_s` seconds (0: SIGKILL at once).

    `with_descendants`: also all processes that it started, even in other sessions, as torchrun's ranks are. Returns
    when all have ended.
    """
    members = [process, *(_descendants(process) if with_descendants else ())]
    if grace_s:
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        until(lambda: not any(map(is_alive, members)), timeout_s=grace_s, every_s=ALIVE_EVERY_S)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            if is_alive(member):
                member.kill()
    until(lambda: not any(map(is_alive, members)), timeout_s=float("inf"), every_s=ALIVE_EVERY_S)


def _descendants(process: subprocess.Popen[Any] | psutil.Process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True) if is_alive(process) else []
    except psutil.NoSuchProcess:
        return []


def is_alive(process: subprocess.Popen[Any] | psutil.Process) -> bool:
    """Return whether the process still runs. A zombie does not count, and a zombie child is reaped."""
    if isinstance(process, subprocess.Popen):
        return process.poll() is None
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which no program listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
