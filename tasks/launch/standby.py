"""Standbys: each host has a node that has imported the ranks' program and waits until an attempt needs it.

A restart then needs no imports, which take most of its time. Standbys are asked for once an attempt has made steps for
launch.standby_after_s, so that short runs pay nothing, and get the next attempt's tasks when it starts. They have their
own lease, because they outlive attempts; like all nodes they end when it is no longer renewed.
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
    """Return the path of the lease of the run's standbys."""
    return run_dir / "attempts" / FOLDER / "lease"


def fits(standby: NodeTask, task: NodeTask) -> bool:
    """Whether a node that imported for `standby` may run `task`: the environment of the imports must be the same."""
    return task.is_ours and standby.environment == task.environment


class Standbys:
    """The standbys of one program's attempts. A thread starts them, because a host may be slow."""

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
                self.launcher.prepare()  # the ranks' user must be able to write the folder
                for name, result in on_each(hosts, start_on).items():
                    if isinstance(result, HostError):
                        logger.info("no standby on %s: %s", name, result)
            except OSError as error:  # a full disk: training continues without standbys
                logger.warning("standbys could not be started (%s)", error)

        self._thread = threading.Thread(target=start, name="standbys", daemon=True)
        self._thread.start()

    def _hold_lease(self) -> None:
        """Hold a lease; make a new one if fencing has withdrawn the last one while there were no standbys."""
        if self._lease is not None and self._lease.path.exists():
            return
        if self._lease is not None:
            self._lease.withdraw()
        self.folder.mkdir(parents=True, exist_ok=True)
        lease = Lease(self.folder / "lease", lease_s=self.lease_s)
        lease.__enter__()
        self._lease = lease

    def wait(self) -> None:
        """Wait until starting standbys are ready, so that the next attempt can use them."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for ready in self.folder.glob("*.ready"):
            ready.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the standbys.

        Any that cannot be removed, for example after an interruption, end without their lease.
        """
        try:
            self.wait()
            self.launcher.close()
        finally:
            if self._lease is not None:
                self._lease.withdraw()
