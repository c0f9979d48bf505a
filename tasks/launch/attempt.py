"""One attempt at running a program: a node on each host, watched until all have ended or one failed.

recovery.py decides what happens next. Each request to a host that hangs waits at most ANSWER_S, and all hosts are asked
at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from infra.hosts import HostError, on_each
from tasks.launch.failure import FIRST_CAUSES, AttemptOutcome, classify
from tasks.launch.launcher import Host, Launcher, Node, Program
from tasks.launch.lease import ASKED, Lease
from tasks.launch.rank_environment import node_environment
from tasks.workspace.paths import fresh
from tasks.workspace.wait import until
from training.config.launch import LaunchConfig
from training.records.node import NodeTask

logger = logging.getLogger(__name__)

POLL_S = 0.2
SETTLE_S = 2.0  # wait after the first failure for others: peers of a dead rank fail within 0.5 s


class Attempt:
    """The nodes of one attempt. Leaving the context ends and removes them on all hosts that answer.

    `left`: hosts whose nodes could not be removed. Ranks there end when they see that the lease is gone.
    """

    def __init__(
        self, program: Program, hosts: Sequence[Host], launcher: Launcher, launch: LaunchConfig, *, folder: Path
    ) -> None:
        self.program, self.hosts, self.launcher, self.launch, self.folder = program, hosts, launcher, launch, folder
        self.lease = Lease(folder / "lease", lease_s=launch.lease_s)
        self.nodes: dict[str, Node] = {}
        self.tasks: dict[str, Path] = {}
        self.left: dict[str, HostError] = {}
        self.replaced_by_another = False  # another launcher withdrew the lease
        self.progress_at, self.pace_s = time.monotonic(), 0.0

    def __enter__(self) -> Attempt:
        self.lease.__enter__()
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _start(self) -> None:
        """Start the nodes on all hosts at once. If one host refuses, remove all."""
        port = self.launcher.master_port()
        self.tasks = {host.name: self._write_task(host, number, port) for number, host in enumerate(self.hosts)}
        errors = self.launcher.start(self.program, self.tasks, add=self._add)
        self.left |= {name: error for name, error in errors.items() if error.unreachable}  # the node may run there
        if errors:
            raise HostError(
                "\n".join(map(str, errors.values())),
                hosts=tuple(errors),
                unreachable=all(error.unreachable for error in errors.values()),
            )

    def _add(self, node: Node) -> None:
        self.nodes[node.host] = node

    def _write_task(self, host: Host, number: int, port: int) -> Path:
        program = self.program
        task = NodeTask(
            module=program.module,
            script=program.script,
            args=program.args,
            prefix=program.prefix,
            num_nodes=len(self.hosts),
            node_rank=number,
            num_ranks=program.ranks[host.name],
            first_rank=sum(program.ranks[other.name] for other in self.hosts[:number]),
            world_size=sum(program.ranks[other.name] for other in self.hosts),
            master_address=self.hosts[0].address,
            master_port=port,
            local_address=host.address,
            interface=host.interface,
            environment=node_environment(
                {**program.environment, **self._compile_caches(host)},
                self.launch,
                threads=program.threads,
                host=host.name,
            ),
            secrets_on_stdin=bool(program.secrets),
            heartbeat=self.launcher.heartbeat,
            launcher_pid=self.launcher.pid_for_nodes,
            lease=str(self.lease.path),
            lease_s=self.launch.lease_s,
            grace_s=program.grace_s,
            end=str(self.end_path(host.name)),
        )
        path = self.folder / f"{host.name}.json"
        task.write(path)
        return path

    def _compile_caches(self, host: Host) -> dict[str, str]:
        """Return variables that name a cache folder per host for torch.compile and Triton.

        Hosts may have different CPUs, and code that was compiled for one may not run on another.
        """
        if self.program.compile_cache is None:
            return {}
        folder = self.program.compile_cache / host.name
        return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}

    def end_path(self, name: str) -> Path:
        return end_path(self.folder / f"{name}.json")

    # Watching

    def wait(self, on_poll: Callable[[], bool]) -> AttemptOutcome:
        """Wait until all nodes have ended, one has failed, or a host is lost.

        `on_poll` returns whether training has made steps since its last call.
        """
        while not self._all_ended():
            if on_poll():
                now = time.monotonic()
                self.progress_at, self.pace_s = now, now - self.progress_at
            if any(node.failed for node in self.nodes.values()) or self.lost():
                self._settle()
                break
            time.sleep(POLL_S)
        on_poll()
        return self._outcome()

    def _all_ended(self) -> bool:
        return all(node.ended for node in self.nodes.values())

    def lost(self) -> list[str]:
        """Return the names of lost hosts: they have been silent for too long, or their node hangs.

        A silent host gets more time while steps are made, because its ranks then live. A node hangs if it has no
        heartbeat and steps are overdue too.
        """
        steps_are_due_s = max(self.launch.lost_after_s, 2 * self.pace_s)  # minutes may lie between two rows
        progresses = time.monotonic() - self.progress_at < steps_are_due_s
        patience_s = self.launch.daemon_grace_s if progresses else self.launch.lost_after_s
        return [
            name
            for name, node in self.nodes.items()
            if not node.ended and (node.silent_s > patience_s or (node.hangs and not progresses))
        ]

    def _settle(self) -> None:
        """Wait until the first failure is visible: the failure seen now may be a result of another host's."""
        until(
            lambda: self._all_ended() or self._outcome().cause in FIRST_CAUSES, timeout_s=SETTLE_S, every_s=POLL_S / 2
        )

    def _outcome(self) -> AttemptOutcome:
        self.replaced_by_another = not self.lease.path.exists()
        if self.replaced_by_another:
            return AttemptOutcome(
                cause="stopped", detail="another launcher has taken the run over: it withdrew our lease"
            )
        lost = set(self.lost())
        statuses = {name: node.status(lost=name in lost) for name, node in self.nodes.items()}
        told = any(status.told_to_stop for status in statuses.values())
        asked = told and (self.launcher.signals_are_the_users or fresh(self.folder / ASKED).exists())
        return classify(statuses, stop_requested=asked)

    # Ending it

    def stop(self) -> None:
        """Send SIGTERM to all ranks at once, so that they save a checkpoint together, and wait for their end."""
        for name, result in on_each(self._started(), lambda host: self.nodes[host.name].terminate()).items():
            if isinstance(result, HostError):
                logger.warning(
                    "could not send SIGTERM to %s, so its ranks are ended by withdrawing their lease: %s", name, result
                )
        until(self._all_ended, timeout_s=self.program.grace_s + SETTLE_S, every_s=POLL_S)

    def _started(self) -> list[Host]:
        return [host for host in self.hosts if host.name in self.nodes]

    def _close(self) -> None:
        """End everything of this attempt on hosts that answer, and on hosts that see the storage."""
        for node in self.nodes.values():
            node.close()
        self.lease.withdraw()
        ended = on_each(self._started(), lambda host: self.nodes[host.name].remove())
        self.left |= {name: error for name, error in ended.items() if isinstance(error, HostError)}


def end_path(task: Path) -> Path:
    """Return the path to which the node of this task writes the record of its end."""
    return task.with_name(f"{task.stem}.end.json")


def new_folder(attempts: Path) -> Path:
    """Make the folder of the next attempt, for its tasks, lease and nodes' records: ATTEMPTS/1, ATTEMPTS/2, …"""
    taken = [int(path.name) for path in attempts.glob("*") if path.name.isdigit()]
    folder = attempts / str(max(taken, default=0) + 1)
    folder.mkdir(parents=True)
    return folder
