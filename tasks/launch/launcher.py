"""The interface between recovery and the ways to start programs: local processes, Docker hosts, a scheduler.

A launcher knows its hosts, starts the node program (training/node) on each of them for one attempt, and ends remains of
earlier attempts there. Attempts, causes, fencing, the choice of hosts and new plans are implemented once, above it:
attempt.py, failure.py, host_set.py and recovery.py.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from infra.hosts import HostError
from tasks.launch.failure import AttemptOutcome, HostStatus, NodeState
from training.records.evaluation_plan import EvaluationPlan
from training.records.node import NodeEnd, NodeTask
from training.records.plan import CustomProgramPlan, RunPlan

ANSWER_S = 5.0  # a host that takes longer counts as silent; the next request follows at once
DONE, STOPPED = 0, 130  # training/node/__main__.py's exit codes for a regular end
STOP_GRACE_S = 120.0
CHECKPOINT_GIB_PER_S = 0.1  # the slowest disk for which the launcher waits until checkpoints are written

LaunchedPlan = RunPlan | CustomProgramPlan | EvaluationPlan


def grace_s(plan: LaunchedPlan | None) -> float:
    """Return the seconds that ranks get to save a checkpoint when they must stop; without a plan the minimum."""
    gib = plan.predicted.checkpoint_gib if isinstance(plan, RunPlan) else 0.0
    return STOP_GRACE_S + 2 * gib / CHECKPOINT_GIB_PER_S


@dataclass(frozen=True)
class Program:
    """The program that each host's node runs. `ranks`: host's name -> number, in the order of ranks. Secrets reach a
    node only over its standard input.
    """

    run_id: str
    ranks: Mapping[str, int]
    module: str = ""
    script: str = ""
    args: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()  # before each rank's command
    working_dir: str = "/"
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    grace_s: float = 120.0
    compile_cache: Path | None = None  # in the shared folder, because a container's folder ends with it

    @property
    def secret_input(self) -> bytes:
        """The secrets as a node reads them; empty without secrets."""
        return json.dumps(dict(self.secrets)).encode() if self.secrets else b""


class Host(Protocol):
    """A machine that runs a node: its name, the address at which other hosts' ranks reach it, and its interface."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def interface(self) -> str: ...


class Node(ABC):
    """The node program on one host in one attempt, watched by a thread or a poll of its launcher.

    The ranks of a silent host may have ended: then their node's record counts.
    """

    def __init__(self, host: str, *, end_path: Path) -> None:
        self.host, self.end_path = host, end_path
        self.stood_by = False  # a standby, which had imported its program before the attempt began
        self.gone = False  # the host answers, but has no such node
        self.last_lines: tuple[str, ...] = ()  # of a node that failed, without secrets
        self.answered_at = time.monotonic()

    @property
    @abstractmethod
    def state(self) -> NodeState | None:
        """The last known state; None before the first one."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM, so that its ranks save a checkpoint. Raises HostError if the host does not answer."""

    @abstractmethod
    def remove(self) -> None:
        """Kill the node if it lives, keep the end of its log, and remove everything of it from its host.

        Raises HostError if that fails, without a long wait for a silent host: fencing tries again later.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop watching the node."""

    @property
    def ended(self) -> bool:
        return self.gone or self._has_ended or self._record_in_silence() is not None

    @property
    def failed(self) -> bool:
        """Whether its end makes other nodes fail: it neither finished nor stopped as asked."""
        if self.state is not None and self._has_ended:
            return self.state.exit_code not in {DONE, STOPPED}
        record = self._record_in_silence()
        return self.gone or (record is not None and record.ending in {"failed", "killed"})

    @property
    def hangs(self) -> bool:
        return self.state is not None and self.state.hangs

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.answered_at

    @property
    def is_silent(self) -> bool:
        """Whether its host has not answered in time."""
        return not self.gone and not self._has_ended and self.silent_s > ANSWER_S

    @property
    def _has_ended(self) -> bool:
        return self.state is not None and not self.state.running

    def _answered(self) -> None:
        self.answered_at = time.monotonic()

    def _record_in_silence(self) -> NodeEnd | None:
        return self._record() if self.is_silent else None

    def _record(self) -> NodeEnd | None:
        return NodeEnd.read(self.end_path) if self.end_path.exists() else None

    def status(self, *, lost: bool) -> HostStatus:
        """Return the host's status. `lost`: the attempt has given the host up, and its state is unknown."""
        end = self._record()
        return HostStatus(
            state=self.state,
            end=end,
            lost=lost,
            gone=self.gone,
            ended_by_us=not self.ended and not lost and end is None,  # the record may be visible before the state
            last_lines=self.last_lines,
        )


class Launcher(Protocol):
    """The interface that recovery uses to start, watch and end node programs.

    Requests to hosts are made to all of them at once.
    """

    pid_for_nodes: int  # this process's PID if nodes run on this machine and end with it; otherwise 0
    heartbeat: str  # a file that nodes write each second, if something checks it; empty: none
    ranks_send_metrics: bool  # whether ranks send to MLflow themselves

    @property
    def signals_are_the_users(self) -> bool:
        """Whether a SIGTERM to a node is a user's order to stop, not a machine's shutdown."""

    def hosts(self) -> Sequence[Host]:
        """Return all hosts of the config. Raises ValueError for mistakes that can be found without asking a host."""

    def master_port(self) -> int:
        """Return the TCP port on the first host for the rendezvous of the next attempt's ranks."""

    def take_over(self) -> None:
        """End ranks of an earlier start that still run on this machine."""

    def fence(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """End and remove earlier attempts on these hosts; return name -> why that was not possible."""

    def check(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """Return name -> reason, for the hosts that cannot take part at the moment."""

    def environment(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the variables, and the secret ones, with which ranks reach MLflow and the store."""

    def compile_cache(self) -> Path | None:
        """Return the folder for compiled code between attempts; None if torch's own folder outlives them."""

    def prepare(self) -> None:
        """Prepare an attempt: give the run's files to the user that ranks run as."""

    def start(
        self, program: Program, tasks: Mapping[str, Path], *, add: Callable[[Node], None]
    ) -> Mapping[str, HostError]:
        """Start `python -m training.node TASK` on all hosts at once, secrets over its standard input as a JSON object.

        `add` is called with each node as soon as it may exist, so that an interruption cannot lose one. Returns name ->
        why a node could not be started there.
        """

    def stand_by(self, task: NodeTask, program: Program, host: Host) -> None:
        """Start a node that imports the program and then waits for a task of the next attempt.

        Blocks until it has started. Raises HostError; does nothing for launchers without standbys.
        """

    def close(self) -> None:
        """Remove the standbys. Nothing is started after this call."""

    def log_path(self, host: str) -> Path:
        """Return the file with the output of the host's ranks."""

    def place(self, outcome: AttemptOutcome) -> str:
        """Describe where a failure began: the host, and the GPU as the host's config names it."""
