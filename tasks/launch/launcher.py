"""The seam between recovery and the ways to start a program on machines: local processes, Docker hosts, a scheduler.

A launcher knows its hosts, starts the node program (training/node) on each of them for one attempt, and ends what an
earlier attempt left there. Attempts, causes, fencing, the choice of hosts and new plans are written once, above it:
attempt.py, failure.py, host_set.py and recovery.py.
"""

from __future__ import annotations

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

ANSWER_S = 5.0  # a host that takes longer counts as silent; the next question comes at once
DONE, STOPPED = 0, 130  # training/node/__main__.py's exit codes of an end in order
ASKED = "stop-asked"  # beside an attempt's lease: `shardline stop`, or a resume elsewhere, tells its ranks to stop
STOP_GRACE_S = 120.0
CHECKPOINT_GIB_PER_S = 0.1  # the slowest disk that a checkpoint on its way, and the last one, are waited for

LaunchedPlan = RunPlan | CustomProgramPlan | EvaluationPlan


def grace_s(plan: LaunchedPlan | None) -> float:
    """Seconds that ranks get to save a checkpoint when they are told to stop; of a run without a plan, the least."""
    gib = plan.predicted.checkpoint_gib if isinstance(plan, RunPlan) else 0.0
    return STOP_GRACE_S + 2 * gib / CHECKPOINT_GIB_PER_S


@dataclass(frozen=True)
class Program:
    """The program that each host's node runs. `ranks`: how many, by host's name, in the order of ranks.

    Secrets reach a node over its standard input only.
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
    compile_cache: Path | None = None  # in the shared folder; a container's own would be gone at the next attempt


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

    A host that is silent may hide that its ranks have long come to their end: then their node's record counts.
    """

    def __init__(self, host: str, *, end_path: Path) -> None:
        self.host, self.end_path = host, end_path
        self.stood_by = False  # it had imported its program before the attempt began
        self.gone = False  # the host answers, and has no such node
        self.last_lines: tuple[str, ...] = ()  # of one that failed, without secrets
        self.answered_at = time.monotonic()

    @property
    @abstractmethod
    def state(self) -> NodeState | None:
        """The last that was seen of it; None before that."""

    @abstractmethod
    def terminate(self) -> None:
        """Send it SIGTERM: it tells its ranks to save a checkpoint. Raises HostError if the host does not answer."""

    @abstractmethod
    def remove(self) -> None:
        """Kill it if it lives, keep the end of its log, and leave nothing of it on its host.

        Raises HostError if that could not be done, without waiting long for a host that is silent: fencing will.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop watching it."""

    @property
    def ended(self) -> bool:
        return self.gone or self._has_ended or self._record_in_silence() is not None

    @property
    def failed(self) -> bool:
        """Whether it ended in a way that makes others fail: not done, and not stopped in order."""
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
        """Whether its host did not answer in time."""
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
        """Return how the host stands. `lost`: the attempt gave it up, and what it does is not known any more."""
        end = self._record()
        return HostStatus(
            state=self.state,
            end=end,
            lost=lost,
            gone=self.gone,
            ended_by_us=not self.ended and not lost and end is None,  # its record may come before its state
            last_lines=self.last_lines,
        )


class Launcher(Protocol):
    """The questions and orders that recovery has for a way to start node programs.

    Whatever is asked of hosts is asked of all at once.
    """

    pid_for_nodes: int  # ours, where nodes run on this machine and end with us; else 0
    heartbeat: str  # a file that nodes touch each second, where something looks at it; empty: none
    ranks_send_metrics: bool  # whether ranks reach MLflow themselves

    @property
    def signals_are_the_users(self) -> bool:
        """Whether a SIGTERM to a node is a user's order to stop, not a machine's shutdown."""

    def hosts(self) -> Sequence[Host]:
        """All hosts of the config. Raises ValueError for mistakes that show without asking any of them."""

    def master_port(self) -> int:
        """The TCP port on the first host at which the next attempt's ranks meet."""

    def take_over(self) -> None:
        """End ranks of an earlier start that outlived it on this machine."""

    def fence(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """End and remove what is left of earlier attempts there; name -> why that was not possible."""

    def check(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """Name -> why the host cannot take part as it is, of those that cannot."""

    def environment(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the variables, and the secret ones, with which ranks reach MLflow and the store."""

    def compile_cache(self) -> Path | None:
        """The folder where compiled code is kept between attempts; None where torch's own place outlives them."""

    def prepare(self) -> None:
        """Do what each attempt needs before its start: give the run's files to the user that ranks run as."""

    def start(
        self, program: Program, tasks: Mapping[str, Path], *, add: Callable[[Node], None]
    ) -> Mapping[str, HostError]:
        """Start `python -m training.node TASK` on all hosts at once, secrets over its standard input as a JSON object.

        `add` is called with each node as soon as it may be there, so that an interruption leaves none unknown.
        Returns name -> why it could not be started there.
        """

    def stand_by(self, task: NodeTask, program: Program, host: Host) -> None:
        """Start a node that imports the program and waits, for the next attempt's start to hand a task to.

        Blocks for as long as that takes to start. Raises HostError; does nothing where it would be of no use.
        """

    def close(self) -> None:
        """Remove what stands by. Nothing is started after it."""

    def log_path(self, host: str) -> Path:
        """The file that holds what the host's ranks print."""

    def place(self, outcome: AttemptOutcome) -> str:
        """The host where a failure began, and the GPU as its config names it."""
