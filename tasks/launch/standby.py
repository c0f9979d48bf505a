"""Nodes that stand by: each host has one that has imported the ranks' program and waits for an attempt to need it.

A restart then costs no imports, which take most of it. Standbys are asked for once an attempt has made steps for
launch.standby_after_s, so that short runs pay nothing, and are handed the next attempt's tasks when it starts. They
have a lease of their own, since they outlive attempts; like all nodes they end when it is no longer renewed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.hosts import HostError, on_each
from tasks.launch.launcher import Host, Launcher, Program
from tasks.launch.lease import Lease
from training.records.node import NodeTask

logger = logging.getLogger(__name__)

FOLDER = "standby"  # beside the attempts' folders


def standby_lease(run_dir: Path) -> Path:
    """The lease of the nodes that stand by for the run."""
    return run_dir / "attempts" / FOLDER / "lease"


def fits(standby: NodeTask, task: NodeTask) -> bool:
    """Whether a node that imported for `standby` may run `task`: what the imports saw must be the same."""
    return (standby.module, standby.num_ranks, standby.prefix, standby.environment) == (
        task.module,
        task.num_ranks,
        task.prefix,
        task.environment,
    )


class Standbys:
    """The standbys of one program's attempts: started in a thread, since a host may take its time."""

    def __init__(self, launcher: Launcher, run_dir: Path, *, lease_s: float) -> None:
        self.launcher, self.folder = launcher, run_dir / "attempts" / FOLDER
        self.lease_s = lease_s
        self._lease: Lease | None = None
        self._thread: threading.Thread | None = None

    def start(self, program: Program, hosts: Sequence[Host], tasks: Mapping[str, Path]) -> None:
        """Start one on each host, for a task like that of the attempt which runs there now."""

        def start_on(host: Host) -> None:
            ready, lease = self.folder / f"{host.name}.ready", str(self.folder / "lease")
            ready.unlink(missing_ok=True)
            task = NodeTask.read(tasks[host.name]).model_copy(update={"lease": lease, "ready": str(ready)})
            task.write(self.folder / f"{host.name}.json")
            self.launcher.stand_by(task, program, host)

        def start() -> None:
            try:
                self._hold_lease()
                self.launcher.prepare()  # our folder is to be written by the ranks' user
                for name, result in on_each(hosts, start_on).items():
                    if isinstance(result, HostError):
                        logger.info("no standby on %s: %s", name, result)
            except OSError as error:  # a full disk: training goes on without them
                logger.warning("standbys could not be started (%s)", error)

        self._thread = threading.Thread(target=start, name="standbys", daemon=True)
        self._thread.start()

    def _hold_lease(self) -> None:
        """Hold a lease; a new one if fencing has withdrawn the last, as it may while nothing stands by."""
        if self._lease is not None and self._lease.path.exists():
            return
        if self._lease is not None:
            self._lease.withdraw()
        self.folder.mkdir(parents=True, exist_ok=True)
        lease = Lease(self.folder / "lease", lease_s=self.lease_s)
        lease.__enter__()
        self._lease = lease

    def wait(self) -> None:
        """Wait until those that are being started have been: the next attempt takes them."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for ready in self.folder.glob("*.ready"):
            ready.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what stands by. What cannot be removed, or is not since we are interrupted, ends without its lease."""
        try:
            self.wait()
            self.launcher.close()
        finally:
            if self._lease is not None:
                self._lease.withdraw()
