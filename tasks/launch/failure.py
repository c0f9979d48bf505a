"""Finds the cause of an attempt's end from the states and records of all hosts' nodes. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from training.config.launch import Cause
from training.records.node import NodeEnd
from training.records.record import Record

DONE, SIGKILLED, SIGKILL, SIGTERM = 0, 137, 9, 15
UNKNOWN = 255  # exit code that a daemon reports for a container whose end it did not see
TOLD_TO_STOP = {130, 143}  # training/node/__main__.py's exit code; and a shell's, for one that had not started yet
LAST_LINES = 25
PEER_IS_GONE = re.compile(
    r"Connection (closed|reset|refused|was likely closed)|Broken pipe|connectFullMesh|remote process exited|"
    r"NCCL (WARN|error|communicator was aborted)|ncclRemoteError|DistNetworkError|DistStoreError|No route to host|"
    r"Network is unreachable|Socket (Timeout|closed)|failed to recv, got 0 bytes|Stale file handle|"
    r"Address already in use|EADDRINUSE",
    re.IGNORECASE,
)
PORT_IN_USE = re.compile(r"Address already in use|EADDRINUSE", re.IGNORECASE)
TIMED_OUT = re.compile(r"timed? ?out|collective operation timeout|watchdog (hang|got stuck)", re.IGNORECASE)
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA (driver )?error: out of memory|Triton Error \[CUDA\]: out of memory|"
    r"Cuda failure (\d+ )?'out of memory'|STATUS_\w{0,40}ALLOC\w{0,40}_FAILED|can't allocate memory|"
    r"Cannot allocate memory|MemoryError|std::bad_alloc"
)
SHARED_MEMORY_FULL = re.compile(
    r"(shared memory segment|failed to extend) /dev/shm/|/dev/shm\b.{0,500}No space left|out of shared memory|"
    r"(shared memory\(shm\) for|write to) file </torch_.{0,500}No space left"
)
GPU_FAULT = re.compile(
    r"unspecified launch failure|uncorrectable (ECC|NVLink) error|hardware stack error|GPU is lost|"
    r"fallen off the bus|\bXid\b"
)
BAD_LOSS = re.compile(r"NonFiniteLoss|loss scale already at minimum")  # Shardline's error, and DeepSpeed's in fp16
SENT_A_SIGNAL = re.compile(r"Signal (9|15)\b")  # torchrun's sentence about a rank
BAD_CONFIG = ("ValueError", "pydantic", "ModuleNotFoundError", "ImportError")
TELLING = re.compile(r"Error|Watchdog caught|rank \d+ failed: ")  # among a log's last lines


# Causes that another attempt may not meet; all others would end it the same way.
RETRIED: set[str] = {"lost host", "network", "daemon", "killed", "timeout", "gpu fault"}
# The end of another host cannot cause these.
FIRST_CAUSES = {"out of memory", "gpu fault", "bad loss", "lost host", "killed"}
CURES: Mapping[str, str] = {
    "out of memory": "lower train.micro_batch or train.context, spread the state over the ranks "
    "(parallel.strategy=zero2, zero3), or raise the host's memory_gib",
    "lost host": "check that the host is on and that `docker -H URL info` answers from here, or under Slurm what "
    "`sinfo -N -l` says of it; launch.min_hosts lets the run continue without it",
    "network": "check the routes and the firewall between the hosts, and each host's `address` and `interface` "
    "(`ip -brief address`)",
    "daemon": "read Docker's log there (journalctl -u docker)",
    "killed": "something sent SIGKILL or SIGTERM: `dmesg` there shows whether the machine had run out of memory, "
    "`journalctl -u docker` whether it or its daemon was shut down",
    "gpu fault": "`nvidia-smi -q` and `dmesg | grep Xid` on the host show details: reset or replace the GPU; "
    "launch.min_hosts lets the run continue without the host",
    "timeout": "one rank waited for another: stacks/ in the run folder says where each was; parallel.timeout_s is how "
    "long they wait",
}


def cause_of(error: str) -> Cause:
    """Return the cause that the last line of a failed rank names."""
    if OUT_OF_MEMORY.search(error):
        return "out of memory"
    if BAD_LOSS.search(error):
        return "bad loss"
    if error.startswith(BAD_CONFIG) or SHARED_MEMORY_FULL.search(error):
        return "bad config"
    if GPU_FAULT.search(error):
        return "gpu fault"
    if PEER_IS_GONE.search(error):
        return "network"
    if TIMED_OUT.search(error):
        return "timeout"
    return "killed" if SENT_A_SIGNAL.search(error) else "error"


def cure_of(cause: Cause, error: str) -> str | None:
    """Return the cure of the failure, for the user; None if the error itself is enough."""
    if SHARED_MEMORY_FULL.search(error):
        return "/dev/shm of the container is full: raise launch.shm_gib"
    if PORT_IN_USE.search(error):
        return (
            "another program listens at the port where ranks meet: stop it (`ss -ltnp` there shows it), or set "
            "another launch.port"
        )
    return CURES.get(cause)


@dataclass(frozen=True)
class NodeState:
    """A node program as its launcher sees it. `exit_code` is valid once `running` is false; 137: SIGKILL.

    `oom_killed`: the kernel killed one of its processes because memory ran out. `hangs`: its heartbeat is too old.
    `reason`: a sentence why its host or scheduler ended it, if they report one.
    """

    running: bool
    exit_code: int = 0
    oom_killed: bool = False
    hangs: bool = False
    reason: str = ""


@dataclass(frozen=True)
class HostStatus:
    """The last state of one host's node, and the record of its end. `lost`: the host does not answer."""

    state: NodeState | None
    end: NodeEnd | None
    lost: bool = False
    gone: bool = False  # somebody removed the node: a container, a job's step or a pod
    ended_by_us: bool = False  # it ran until the launcher killed it, so its end has no cause of its own
    last_lines: tuple[str, ...] = ()  # of its log: on a full disk a node cannot write its record, but still prints

    @property
    def done(self) -> bool:
        """Whether its record says done, or its exit code, while a file server does not show the record yet."""
        if self.end is not None:
            return self.end.ending == "done"
        return self.state is not None and not self.state.running and not self.gone and self.state.exit_code == DONE

    @property
    def hangs(self) -> bool:
        """Whether the host counts as lost although its daemon answers: its node has stopped."""
        return self.lost and self.state is not None and self.state.hangs

    @property
    def reason(self) -> str:
        """A sentence why its host or scheduler ended it; empty if unknown."""
        return self.state.reason if self.state is not None else ""

    @property
    def unexplained(self) -> int | None:
        """The exit code of a node that ended without a record."""
        if self.end is not None or self.state is None or self.state.running:
            return None
        return self.state.exit_code

    @property
    def told_to_stop(self) -> bool:
        """Whether it got SIGTERM. A lease that was withdrawn or not renewed does not count."""
        return self.end.asked == "signal" if self.end is not None else self.unexplained in TOLD_TO_STOP


class AttemptOutcome(Record):
    """The end of an attempt to run a program on all hosts."""

    cause: Cause | Literal["done", "stopped"]
    """How the attempt ended: done, stopped, or the kind of its failure."""
    host: str = ""
    """Name of the host where the failure began; empty if it was none in particular."""
    gpu: int | None = None
    """After a GPU's fault, the local rank that used the GPU; None otherwise, or if its node left no record."""
    detail: str = ""
    """What happened, in one line; empty if all is done."""
    lines: tuple[str, ...] = ()
    """Last lines of the log of `host`."""


def classify(hosts: Mapping[str, HostStatus], *, stop_requested: bool = False) -> AttemptOutcome:
    """Return the first cause, in this order, that any host shows. Other hosts report only lost peers.

    `stop_requested`: a user asked the run to stop. Otherwise a SIGTERM to a node does not end the run, because a
    machine or daemon that shuts down sends it to all its containers.
    """
    return next(_outcomes(hosts, stop_requested=stop_requested))


def _outcomes(hosts: Mapping[str, HostStatus], *, stop_requested: bool) -> Iterator[AttemptOutcome]:
    known = {name: host for name, host in hosts.items() if not host.ended_by_us}
    if all(host.done for host in hosts.values()) and len(known) == len(hosts):
        yield AttemptOutcome(cause="done")
    # Also of nodes that the launcher ended: their ranks may have waited for a killed one.
    for name, host in hosts.items():
        if host.state is not None and host.state.oom_killed:
            yield _outcome(
                "out of memory",
                name,
                host,
                "the kernel killed a rank because the memory, or its container's share, is used up",
            )
    yield from _by_error(known, "out of memory", "gpu fault", "bad loss", "bad config")
    for name, host in known.items():
        if host.hangs:
            yield _outcome("lost host", name, host, "its node hangs: no heartbeat, and no steps")
        elif host.lost:
            yield _outcome("lost host", name, host, "its daemon does not answer any more")
        elif host.end is not None and host.end.asked == "lease stale":
            yield _outcome(
                "lost host",
                name,
                host,
                "its ranks did not see the lease renewed: the host's shared storage does not answer",
            )
        elif host.unexplained == UNKNOWN:
            why = host.reason or "its machine or daemon restarted (exit code 255)"
            yield _outcome("lost host", name, host, why)
    for name, host in known.items():
        if host.told_to_stop:
            yield _told_to_stop(name, host, stop_requested=stop_requested)
    for name, host in known.items():
        if host.end is None and host.gone:
            yield _outcome("killed", name, host, "its node was removed")
        elif host.unexplained == SIGKILLED:
            yield _outcome("killed", name, host, "its node was killed (exit code 137)")
        elif host.end is not None and (
            killed := [each.rank for each in host.end.failures if each.exit_code == -SIGKILL]
        ):
            yield _outcome("killed", name, host, f"rank {killed[0]} was killed (SIGKILL)")
    # The failure of one rank appears on all others as a peer that is gone, or that is late.
    yield from _by_error(known, "error", "killed", "timeout", "network")
    for name, host in known.items():
        if host.end is not None and host.end.ending in {"stopped", "killed"}:
            yield _outcome("stopped", name, host, f"it was stopped ({host.end.asked})")
    for name, host in known.items():
        if not host.done:
            code = host.state.exit_code if host.state is not None else "unknown"
            yield _outcome("error", name, host, f"exit code {code}, and no error in its log")
    yield AttemptOutcome(cause="error", detail="the launcher stopped all hosts")


def _by_error(hosts: Mapping[str, HostStatus], *causes: Cause) -> Iterator[AttemptOutcome]:
    """Yield the outcomes that the ranks' own errors name, in the order of `causes`."""
    for cause in causes:
        for name, host, local_rank, error in _errors(hosts):
            if error and cause_of(error) == cause:
                outcome = _outcome(cause, name, host, error)
                yield outcome.model_copy(update={"gpu": local_rank}) if cause == "gpu fault" else outcome


def _told_to_stop(name: str, host: HostStatus, *, stop_requested: bool) -> AttemptOutcome:
    if stop_requested:
        return _outcome("stopped", name, host, "it was stopped (SIGTERM)")
    if host.state is not None and host.state.running:
        return _outcome("daemon", name, host, "it got SIGTERM while its daemon did not answer: the daemon shuts down")
    why = host.reason or "the machine shuts down, or its daemon"
    return _outcome("killed", name, host, f"its node got SIGTERM, but not from the launcher: {why}")


def _errors(hosts: Mapping[str, HostStatus]) -> Iterator[tuple[str, HostStatus, int | None, str]]:
    """Return each rank's error, by host and local rank; for a node without a record, one line of its log."""
    for name, host in hosts.items():
        failures = host.end.failures if host.end is not None and host.end.ending == "failed" else ()
        # When one rank fails, torchrun ends the others; their deaths have no cause of their own.
        for failure in [failure for failure in failures if failure.exit_code != -SIGTERM] or failures:
            yield name, host, failure.local_rank, failure.cause
        if not failures and (host.end is None or host.end.ending == "failed"):
            errors = (
                line for line in reversed(_lines(host)) if TELLING.search(line) and "ChildFailedError" not in line
            )
            yield name, host, None, next(errors, "")


def _lines(host: HostStatus) -> tuple[str, ...]:
    return host.end.last_lines if host.end is not None else host.last_lines


def _outcome(cause: Cause | Literal["stopped"], name: str, host: HostStatus, detail: str) -> AttemptOutcome:
    return AttemptOutcome(cause=cause, host=name, detail=detail, lines=_lines(host)[-LAST_LINES:])
