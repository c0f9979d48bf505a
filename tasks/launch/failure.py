"""Finds the one cause of an attempt's end in what is known of every host's node. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from training.config.launch import Cause
from training.records.node import NodeEnd, RankFailure
from training.records.record import Record

DONE, SIGKILLED, SIGKILL, SIGTERM = 0, 137, 9, 15
UNKNOWN = 255  # what a daemon says of a container whose end it did not see
TOLD_TO_STOP = {130, 143}  # training/node/__main__.py's exit code; and a shell's, for one that had not started yet
LAST_LINES = 25
PEER_IS_GONE = re.compile(
    r"Connection (closed|reset|refused|was likely closed)|Broken pipe|connectFullMesh|remote process exited|"
    r"NCCL (WARN|error|communicator was aborted)|ncclRemoteError|DistNetworkError|DistStoreError|No route to host|"
    r"Network is unreachable|Socket (Timeout|closed)|failed to recv, got 0 bytes|Stale file handle",
    re.IGNORECASE,
)
TIMED_OUT = re.compile(r"timed? ?out|collective operation timeout|watchdog (hang|got stuck)", re.IGNORECASE)
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA (driver )?error: out of memory|Triton Error \[CUDA\]: out of memory|"
    r"Cuda failure (\d+ )?'out of memory'|STATUS_\w*ALLOC\w*_FAILED|can't allocate memory|Cannot allocate memory|"
    r"MemoryError|std::bad_alloc"
)
SHARED_MEMORY_FULL = re.compile(
    r"(shared memory segment|failed to extend) /dev/shm/|/dev/shm\b.*No space left|out of shared memory|"
    r"(shared memory\(shm\) for|write to) file </torch_.*No space left"
)
GPU_FAULT = re.compile(
    r"unspecified launch failure|uncorrectable (ECC|NVLink) error|hardware stack error|GPU is lost|"
    r"fallen off the bus|\bXid\b"
)
BAD_LOSS = re.compile(r"NonFiniteLoss|loss scale already at minimum")  # ours, and DeepSpeed's in fp16
SENT_A_SIGNAL = re.compile(r"Signal (9|15)\b")  # as torchrun says it of a rank
BAD_CONFIG = ("ValueError", "pydantic", "ModuleNotFoundError", "ImportError")
TELLING = re.compile(r"Error|Watchdog caught|rank \d+ failed: ")  # of a log's last lines


# No other host's end can be behind these.
FIRST_CAUSES = {"out of memory", "gpu fault", "bad loss", "lost host", "killed"}
CURES: Mapping[str, str] = {
    "out of memory": "lower train.micro_batch or train.context, spread the state over the ranks "
    "(parallel.strategy=zero2, zero3), or raise the host's memory_gib",
    "lost host": "check that the host is on and that `docker -H URL info` answers from here, or under Slurm what "
    "`sinfo -N -l` says of it; launch.min_hosts lets the run continue without it",
    "network": "check the routes and the firewall between the hosts, and each host's `address` and `interface` "
    "(`ip -brief address`)",
    "daemon": "see what Docker's log says there (journalctl -u docker)",
    "killed": "something sent SIGKILL or SIGTERM: `dmesg` there tells whether the machine had run out of memory, "
    "`journalctl -u docker` whether it or its daemon was shut down",
    "gpu fault": "`nvidia-smi -q` and `dmesg | grep Xid` on the host tell more: reset or replace the GPU; "
    "launch.min_hosts lets the run continue without the host",
    "timeout": "one rank waited for another: stacks/ in the run folder says where each was; parallel.timeout_s is how "
    "long they wait",
}


def cause_of(error: str) -> Cause:
    """The cause that the last line of a failed rank names by itself."""
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
    """Return what a user can do about the failure; None if the error itself says all there is."""
    if SHARED_MEMORY_FULL.search(error):
        return "/dev/shm of the container is full: raise launch.shm_gib"
    return CURES.get(cause)


@dataclass(frozen=True)
class NodeState:
    """A node program as its launcher sees it. `exit_code` counts once `running` is false; 137 says SIGKILL.

    `oom_killed`: the kernel killed one of its processes for want of memory. `hangs`: its heartbeat is too old.
    `reason`: why its host or scheduler ended it, in words, if they say so.
    """

    running: bool
    exit_code: int = 0
    oom_killed: bool = False
    hangs: bool = False
    reason: str = ""


@dataclass(frozen=True)
class HostStatus:
    """The last state of one host's node, and the record of its end. `lost`: nobody answers there."""

    state: NodeState | None
    end: NodeEnd | None
    lost: bool = False
    gone: bool = False  # somebody removed it: a container, a job's step, a pod
    ended_by_us: bool = False  # it went on until we killed it: its end tells nothing
    last_lines: tuple[str, ...] = ()  # of its log: a node that cannot write its record, on a full disk, still prints

    @property
    def done(self) -> bool:
        """Whether its record says so; or its exit code, while a file server does not show the record yet."""
        if self.end is not None:
            return self.end.ending == "done"
        return self.state is not None and not self.state.running and not self.gone and self.state.exit_code == DONE

    @property
    def hangs(self) -> bool:
        """Whether the host was given up though its daemon answers: its node has stopped."""
        return self.lost and self.state is not None and self.state.hangs

    @property
    def reason(self) -> str:
        """Why its host or scheduler ended it, in words; empty if nobody says so."""
        return self.state.reason if self.state is not None else ""

    @property
    def unexplained(self) -> int | None:
        """Exit code of a node that has ended and left no record of why."""
        if self.end is not None or self.state is None or self.state.running:
            return None
        return self.state.exit_code

    @property
    def told_to_stop(self) -> bool:
        """Whether it got SIGTERM; that its lease was withdrawn, or not renewed, is not meant."""
        return self.end.asked == "signal" if self.end is not None else self.unexplained in TOLD_TO_STOP


class AttemptOutcome(Record):
    """The end of an attempt. `host`: where the failure began; `detail`: one line; `lines`: the end of the log there.

    `gpu`: after a GPU's fault, the local rank that used it; None where its node left no record.
    """

    cause: Cause | Literal["done", "stopped"]
    host: str = ""
    gpu: int | None = None
    detail: str = ""
    lines: tuple[str, ...] = ()


def classify(hosts: Mapping[str, HostStatus], *, stop_requested: bool = False) -> AttemptOutcome:
    """The first cause in this order that any host shows: what kills one host's ranks shows as lost peers on others.

    `stop_requested`: a user asked for the run to stop. Otherwise a node that got SIGTERM does not end the run:
    a machine or a daemon that shuts down tells all its containers so.
    """
    return next(_outcomes(hosts, stop_requested=stop_requested))


def _outcomes(hosts: Mapping[str, HostStatus], *, stop_requested: bool) -> Iterator[AttemptOutcome]:
    known = {name: host for name, host in hosts.items() if not host.ended_by_us}
    if all(host.done for host in hosts.values()) and len(known) == len(hosts):
        yield AttemptOutcome(cause="done")
    for name, host in hosts.items():  # also one that we ended: its other ranks may have waited for the one killed
        if host.state is not None and host.state.oom_killed:
            yield _outcome(
                "out of memory",
                name,
                host,
                "the kernel killed a rank: memory, or its container's share of it, is used up",
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
                "its ranks no longer saw the lease renewed: its storage does not answer",
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
    # What one rank failed of shows on all others as a peer that is gone, or did not come in time.
    yield from _by_error(known, "error", "killed", "timeout", "network")
    for name, host in known.items():
        if host.end is not None and host.end.ending in {"stopped", "killed"}:
            yield _outcome("stopped", name, host, f"it was stopped ({host.end.asked})")
    for name, host in known.items():
        if not host.done:
            code = host.state.exit_code if host.state is not None else "unknown"
            yield _outcome("error", name, host, f"exit code {code}, and no error in its log")
    yield AttemptOutcome(cause="error", detail="all hosts were stopped by us")


def _by_error(hosts: Mapping[str, HostStatus], *causes: Cause) -> Iterator[AttemptOutcome]:
    """Outcomes that the ranks' own errors name, in the order of `causes`."""
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
    return _outcome("killed", name, host, f"its node got SIGTERM, and not from us: {why}")


def _failures(host: HostStatus) -> tuple[RankFailure, ...]:
    return host.end.failures if host.end is not None else ()


def _errors(hosts: Mapping[str, HostStatus]) -> Iterator[tuple[str, HostStatus, int | None, str]]:
    """Each rank's error, by host and local rank; where a node left no record, one line of its log."""
    for name, host in hosts.items():
        failures = host.end.failures if host.end is not None and host.end.ending == "failed" else ()
        # torchrun ends the others when one rank fails: that they died of it tells nothing.
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
