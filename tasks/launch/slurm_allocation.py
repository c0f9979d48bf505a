"""The nodes of a run under Slurm: a batch job only holds them, as long as the run's launcher lives.

Attempts are steps in this job (slurm.py), so that an attempt after a failure need not queue. The job's script checks a
lease that the launcher renews, so that the nodes are released after kill -9 of the launcher. If Shardline itself runs
inside a job, that job's nodes are used.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infra import slurm
from infra.hosts import HostError
from tasks.launch.lease import Lease
from tasks.runs.errors import RunFailed, RunStopped
from tasks.workspace.paths import home
from tasks.workspace.processes import process_key
from training.config.launch import LaunchConfig
from training.config.run import RunConfig
from training.config.slurm import SlurmConfig
from training.records.record import Record, sha256_config

logger = logging.getLogger(__name__)

FOLDER = "allocation"  # in the run's folder
FIRST_LOOK_S, LONGEST_LOOK_S = 0.5, 15.0  # between two requests to slurmctld while the job waits
SIGNAL_RESOLUTION_S = 60.0  # sbatch's manual on --signal: "may be sent up to 60 seconds earlier than specified"
ENDING_S = 60.0  # time for a job to end; Slurm's KillWait is 30 s

SCRIPT = """\
#!/bin/sh
# Holds the nodes of a Shardline run. It ends when the run's lease has not been renewed for {seconds} s.
seen=
while now=$(cat {lease} && stat -c %y {lease}) && [ "$now" != "$seen" ]; do
    seen=$now
    sleep {seconds}
done
"""


class AllocationRecord(Record):
    """runs/ID/allocation/job.json: the Slurm nodes of a run."""

    job_id: str
    """ID of the Slurm job that holds the nodes."""
    machines: tuple[str, ...] = ()
    """Names of the nodes in Slurm, in the order of the run's hosts; empty while the job waits for them."""
    began_at: float = 0.0
    """Time at which the job started, in seconds since 1970: a job that slurmctld starts again has other nodes."""


@dataclass(frozen=True)
class QueuedJob:
    """The reason why there are no nodes yet."""

    job_id: str
    reason: str

    def __str__(self) -> str:
        return f"Slurm job {self.job_id} waits for nodes ({self.reason}); `scancel {self.job_id}` ends it"


class Allocation:
    """The nodes of one run: the nodes of its record, or new ones when those are gone."""

    def __init__(self, launch: LaunchConfig, *, run_dir: Path) -> None:
        self.launch, self.wanted, self.run_dir = launch, launch.slurm, run_dir
        self.folder = run_dir / FOLDER
        self.lease = Lease(self.folder / "lease", lease_s=launch.lease_s)

    @property
    def surrounds_us(self) -> bool:
        """Whether this process runs inside a job: then no other job is submitted."""
        return bool(job_around_us())

    @property
    def record(self) -> AllocationRecord | None:
        path = self.folder / "job.json"
        return AllocationRecord.read(path) if path.exists() else None

    @property
    def machines(self) -> tuple[str, ...]:
        """The nodes' names, in the order of the run's hosts; empty while there are none."""
        return self.record.machines if self.record else ()

    @property
    def job_id(self) -> str:
        return self.record.job_id if self.record else ""

    def job(self) -> slurm.Job | None:
        """Return the job's current state; None if there is none, or Slurm has forgotten it."""
        return slurm.job(self.job_id) if self.job_id else None

    # Getting one

    def waits_for(self) -> QueuedJob | None:
        """Submit a job for nodes if there is none; return why there are no nodes yet, or None once there are."""
        if self.surrounds_us:
            self._take(slurm.job(job_around_us()))
            return None
        job = self.job()
        if job is None or job.ended:
            job = slurm.job(self._submit())
        if job is None or job.state != "RUNNING":
            return QueuedJob(self.job_id, f"{job.state}: {job.reason}" if job else "not known yet")
        self._take(job)
        return None

    def _take(self, job: slurm.Job | None) -> None:
        if job is None or not job.nodes:
            raise RunFailed(f"Slurm reports no nodes for job {job_around_us()}", cause="lost host")
        if len(job.nodes) < self.wanted.nodes and job.id != self.job_id:
            raise ValueError(
                f"launch.slurm.nodes = {self.wanted.nodes}, but job {job.id} has {len(job.nodes)}: lower it, or ask "
                f"for more (sbatch --nodes={self.wanted.nodes})"
            )
        if self.record is None or (job.id, job.began_at) != (self.job_id, self.record.began_at):
            machines = job.nodes[: self.wanted.nodes]
            self._write(AllocationRecord(job_id=job.id, machines=machines, began_at=job.began_at))
            logger.info("Slurm job %s: %s", job.id, ", ".join(self.machines))

    def _write(self, record: AllocationRecord) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        record.write(self.folder / "job.json")

    def _submit(self) -> str:
        lease = shlex.quote(str(self.lease.path))
        job_id = slurm.submit(
            SCRIPT.format(lease=lease, seconds=math.ceil(self.launch.lease_s)),
            name=f"shardline-{self.run_dir.name}",
            comment=slurm.comment_of(self.run_dir.name, launcher=process_key(os.getpid())),
            options=options_of(self.wanted, log=self.folder / "job.log"),
        )
        self._write(AllocationRecord(job_id=job_id))
        logger.info("submitted Slurm job %s for %d nodes", job_id, self.wanted.nodes)
        return job_id

    def ensure(self) -> None:
        """Wait until there are nodes, however long the job queues. Raises RunStopped if it was cancelled."""
        began_at, told = time.monotonic(), ""
        while True:
            self.raise_if_cancelled()
            with patience():
                queued = self.waits_for()
                if queued is None:
                    return
                if str(queued) != told:
                    told = str(queued)
                    logger.warning("%s", queued)
            time.sleep(min(LONGEST_LOOK_S, FIRST_LOOK_S + (time.monotonic() - began_at) / 20))

    # The job's end

    def why_replaced(self, job: slurm.Job) -> str:
        """Return why another attempt cannot use the job's nodes; empty if it can."""
        if job.waits or self.surrounds_us:
            return ""
        if job.state != "RUNNING":
            return f"it is {job.state}"
        if job.preempted:
            return "it is being preempted"
        if job.ends_at and job.ends_at - time.time() < self.wanted.signal_s + SIGNAL_RESOLUTION_S:
            return f"its time limit is reached in {job.ends_at - time.time():.0f} s"
        if job.batch_host not in job.nodes:
            return f"it lost node {job.batch_host}, whose script held it"
        left = len(set(self.machines or job.nodes) & set(job.nodes))
        if left < (self.launch.min_hosts or self.wanted.nodes):
            return f"{left} of its {self.wanted.nodes} nodes are left"
        return ""

    def raise_if_cancelled(self) -> None:
        """Raise RunStopped if somebody has cancelled the job, because Slurm's users stop jobs this way."""
        if self.was_cancelled():
            raise RunStopped(
                f"Slurm job {self.job_id} was cancelled by somebody: `shardline resume {self.run_dir.name}` asks "
                "for new nodes and goes on"
            )

    def was_cancelled(self) -> bool:
        """Whether somebody else has cancelled the job.

        Waits for the job's end, because Slurm reports the reason only then.
        """
        deadline = time.monotonic() + ENDING_S
        while True:
            with suppress(HostError):  # slurmctld does not answer, so the job's state is unknown
                job = self.job()
                if job is None or job.state != "COMPLETING":
                    return job is not None and job.state == "CANCELLED"
            if time.monotonic() > deadline:
                return False
            time.sleep(FIRST_LOOK_S)

    def release(self) -> None:
        """Give the nodes back, and end all programs on them."""
        if self.job_id and not self.surrounds_us:
            slurm.cancel(self.job_id)
        (self.folder / "job.json").unlink(missing_ok=True)


def require_slurm() -> None:
    """Raise ValueError if this machine cannot ask Slurm. A controller that does not answer now may do so later."""
    try:
        slurm.our_jobs()
    except HostError as error:
        if not error.unreachable:
            raise ValueError(str(error)) from None


@contextmanager
def held_nodes(launch: LaunchConfig, *, run_dir: Path) -> Iterator[Allocation | None]:
    """Hold the run's nodes while the block runs; Slurm gets them back afterwards. The caller waits for the nodes inside
    the block. An earlier job of this run, whose launcher was killed, is used again. Yields None for other launchers.
    """
    if launch.launcher != "slurm":
        yield None
        return
    allocation = Allocation(launch, run_dir=run_dir)
    allocation.folder.mkdir(parents=True, exist_ok=True)
    _forget_ended(allocation)
    with allocation.lease:
        try:
            yield allocation
        finally:
            try:
                allocation.release()
            except HostError as error:
                logger.warning(
                    "could not give back Slurm job %s (%s): it ends by itself within %.0f s of its lease's end",
                    allocation.job_id,
                    error,
                    2 * launch.lease_s,
                )


def _forget_ended(allocation: Allocation) -> None:
    """Forget an ended job of an earlier start, so that it does not count as cancelled now.

    Other jobs of the run are cancelled: a launcher may have been killed before it could record a job that it had
    submitted.
    """
    if allocation.surrounds_us:
        (allocation.folder / "job.json").unlink(missing_ok=True)
        return
    with patience():
        job = allocation.job()
        if job is None or job.ended or allocation.why_replaced(job):
            allocation.release()
        for other in slurm.our_jobs(allocation.run_dir.name):
            if other.id != allocation.job_id:
                slurm.cancel(other.id)


@contextmanager
def patience() -> Iterator[None]:
    """Ignore that slurmctld does not answer; the caller asks again."""
    try:
        yield
    except HostError as error:
        if not error.unreachable:
            raise
        logger.warning("%s", error)


def note_run(run_id: str, config: RunConfig) -> None:
    """Record the run that this process begins if it runs in a Slurm job, because that job may be requeued."""
    if job_around_us():
        path = _note(config)
        path.parent.mkdir(exist_ok=True)
        path.write_text(run_id)


def run_before_requeue(config: RunConfig) -> str:
    """Return the ID of the run that this Slurm job began with this config before it was requeued; empty without one."""
    is_requeued = job_around_us() and int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    return _note(config).read_text() if is_requeued and _note(config).exists() else ""


def _note(config: RunConfig) -> Path:
    return home() / "slurm-jobs" / f"{job_around_us()}-{sha256_config(config)[:12]}"


def job_around_us() -> str:
    """Return the ID of the job that this process runs in; empty outside Slurm."""
    return os.environ.get("SLURM_JOB_ID", "")


def options_of(wanted: SlurmConfig, *, log: Path) -> Sequence[str]:
    """Return the options of sbatch. A failed node does not end the job; Shardline, not Slurm, starts a new attempt."""
    given = {
        "partition": wanted.partition,
        "account": wanted.account,
        "qos": wanted.qos,
        "reservation": wanted.reservation,
        "constraint": wanted.constraint,
        "gpus-per-node": wanted.gpus_per_node or "",
        "cpus-per-task": wanted.cpus_per_node or "",
        "mem": f"{math.ceil(wanted.memory_gib * 1024)}M" if wanted.memory_gib else "",
        "time": math.ceil(wanted.time_limit_s / 60) or "",
    }
    return [
        f"--nodes={wanted.nodes}",
        "--ntasks-per-node=1",
        *(f"--{name}={value}" for name, value in given.items() if value),
        f"--signal=TERM@{wanted.signal_s}",
        "--no-kill",
        "--no-requeue",
        "--open-mode=append",
        f"--output={str(log).replace('%', '%%')}",  # % begins sbatch's placeholders
        *(word for line in wanted.options for word in shlex.split(line)),
    ]
