"""The launcher for Slurm: each attempt is a step on every node of the run's allocation, with its own srun.

Hosts are named by their place, node0, node1 and so on, so that a plan stays valid for the machines of the next
allocation.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from infra import slurm
from infra.hosts import HostError, on_each
from infra.slurm import NodeInfo
from tasks.hardware.slurm_nodes import JobNodes, check_nodes, command, container_options, measure_nodes
from tasks.launch.attempt import end_path
from tasks.launch.failure import UNKNOWN, AttemptOutcome, NodeState
from tasks.launch.launcher import DONE, Host, Node, Program, grace_s
from tasks.launch.lease import ask_to_stop, withdraw_leases
from tasks.launch.local import end_of_log
from tasks.launch.remote import RemoteLauncher
from tasks.launch.slurm_allocation import Allocation
from tasks.launch.standby import FOLDER, fits, standby_lease
from tasks.runs.errors import RunFailed
from tasks.runs.folder import read_plan
from tasks.workspace.paths import fresh
from tasks.workspace.wait import until
from training.config.launch import LaunchConfig
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.node import NodeEnd, NodeTask

logger = logging.getLogger(__name__)

POLL_S = 2.0  # between two requests to slurmctld, because it serves a whole cluster
STEP_S = 10.0  # time for a step to end after SIGTERM or SIGKILL
PORTS = range(1024, 65_536)
# srun's messages when it could not start, or lost, its program; "task 0" is about the program's own end.
SRUN_FAILED = re.compile(r"srun: error: (?!.*task \d)|Node failure on|slurmstepd.* error: execve\(\)")
OUT_OF_MEMORY = re.compile(r"task 0: Out Of Memory|[Dd]etected \d+ oom[-_]kill event|oom-kill event")


@dataclass(frozen=True)
class SlurmHost:
    """A place in the run's allocation. In the next allocation another machine has this place."""

    name: str
    place: int
    allocation: Allocation
    interface: str = "auto"
    cpus: float = 0.0  # a step sees exactly the GPUs that it may use

    @property
    def memory_gib(self) -> float:
        return self.allocation.wanted.memory_gib

    @property
    def machine(self) -> str:
        """The node's name in Slurm. Raises HostError while the place has no node."""
        machines = self.allocation.machines
        if self.place >= len(machines):
            raise HostError(f"{self.name}: Slurm has not given it a machine yet", hosts=(self.name,), unreachable=True)
        return machines[self.place]

    @property
    def address(self) -> str:
        return slurm.resolved(slurm.node_infos([self.machine])[self.machine])


def hosts_of(launch: LaunchConfig, allocation: Allocation) -> tuple[SlurmHost, ...]:
    return tuple(SlurmHost(f"node{place}", place, allocation) for place in range(launch.slurm.nodes))


class StepNode(Node):
    """A step. Its srun is a child process, which ends with it; slurmctld tells whether the machine still answers."""

    def __init__(
        self, host: SlurmHost, process: subprocess.Popen[bytes], *, step: str, end_path: Path, log: Path, log_from: int
    ) -> None:
        super().__init__(host.name, end_path=end_path)
        self.process, self.step, self.log, self.log_from = process, step, log, log_from
        self.job_id, self.machine = host.allocation.job_id, host.machine
        self._end: NodeState | None = None

    @property
    def state(self) -> NodeState | None:
        if self._end is None and (code := self.process.poll()) is not None:
            self._end = self._ended(code if code >= 0 else 128 - code)
        return self._end or NodeState(running=True)

    def _ended(self, code: int) -> NodeState:
        """Return the step's exit code. srun's is 0 also after a node's failure, 1 if slurmctld did not answer."""
        self.last_lines = end_of_log(self.log, self.log_from)
        text = "\n".join(self.last_lines)
        record = NodeEnd.read(path) if (path := fresh(self.end_path)).exists() else None
        if record is None and (code == DONE or SRUN_FAILED.search(text)):
            code = UNKNOWN
        return NodeState(running=False, exit_code=code, oom_killed=bool(OUT_OF_MEMORY.search(text)))

    def terminate(self) -> None:
        slurm.terminate(self._steps())

    def remove(self) -> None:
        """Kill the step, and wait until Slurm has removed it."""
        try:
            if self.process.poll() is None:
                if self.is_silent:
                    raise HostError(
                        f"{self.host} ({self.machine}): Slurm has had no answer from it for {self.silent_s:.0f} s",
                        hosts=(self.host,),
                        unreachable=True,
                    )
                slurm.kill(self._steps())
                self.process.wait(STEP_S)
        except subprocess.TimeoutExpired:
            message = f"{self.host} ({self.machine}): its step has not ended within {STEP_S:.0f} s"
            raise HostError(message, hosts=(self.host,), unreachable=True) from None
        finally:
            end_srun(self.process)

    def _steps(self) -> list[str]:
        return [step.id for step in slurm.steps(self.job_id) if step.name == self.step]

    def close(self) -> None:
        """Do nothing: the node has no thread or connection of its own."""


@dataclass(frozen=True)
class Standby:
    """A step that has imported its program and waits for a task on its standard input."""

    process: subprocess.Popen[bytes]
    step: str
    task: NodeTask


def end_srun(process: subprocess.Popen[bytes]) -> None:
    """End only srun; Slurm, or the lease, ends the programs that it started."""
    process.kill()
    process.wait()


class SlurmLauncher(RemoteLauncher):
    """Steps on the nodes of the run's allocation, which slurm_allocation.py holds."""

    heartbeat = ""  # not used: slurmctld knows whether a machine answers

    def __init__(self, launch: LaunchConfig, *, run_dir: Path, mlflow_run_id: str = "") -> None:
        super().__init__(launch, run_dir=run_dir, mlflow_run_id=mlflow_run_id)
        self.allocation = Allocation(launch, run_dir=run_dir)
        self.standbys: dict[str, Standby] = {}  # host's name -> standby
        self.numbers = count(1)
        self.port_numbers = count()

    @property
    def signals_are_the_users(self) -> bool:
        """Whether a user cancelled the job. Slurm also sends SIGTERM before a time limit and for a preemption.

        Inside a job this is always true: the job's script ends with this process, so no other attempt can be made in
        it.
        """
        return self.allocation.surrounds_us or self.allocation.was_cancelled()

    def hosts(self) -> Sequence[SlurmHost]:
        return hosts_of(self.launch, self.allocation)

    def master_port(self) -> int:
        """Return a port that depends on the job, because jobs may share a node.

        Each attempt has another one, because a program of somebody else may listen at the last one.
        """
        number = int(self.allocation.job_id) % 1000 + 1000 * next(self.port_numbers)
        return PORTS[(self.launch.port - PORTS.start + number) % len(PORTS)]

    def fence(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """End steps of earlier attempts.

        Nodes that are no longer useful are given back, which ends everything on them.
        """
        withdraw_leases(self.run_dir, keep=standby_lease(self.run_dir) if self.standbys else None)
        self.allocation.raise_if_cancelled()
        try:
            job = self.allocation.job()
            if job is None or job.waits or job.ended or self._release_if_unusable(job):
                return {}
            return self._end_steps(job, [host for host in self.hosts() if host.name in {each.name for each in hosts}])
        except HostError as error:
            if not error.unreachable:
                raise
            return {host.name: HostError(str(error), hosts=(host.name,), unreachable=True) for host in hosts}

    def _release_if_unusable(self, job: slurm.Job) -> bool:
        """Whether the job's nodes were given back, because another attempt cannot use them."""
        why = self.allocation.why_replaced(job)
        if why:
            logger.warning("giving back Slurm job %s: %s", job.id, why)
            self.allocation.release()
        return bool(why)

    def _end_steps(self, job: slurm.Job, hosts: Sequence[SlurmHost]) -> dict[str, HostError]:
        infos = slurm.node_infos(self.allocation.machines)
        errors = {host.name: error for host in hosts if (error := self._error(host, job, infos[host.machine]))}
        well = {host.machine for host in hosts if host.name not in errors}

        keep = {standby.step for standby in self.standbys.values()}

        def left() -> dict[str, str]:
            steps = slurm.steps(job.id)
            return {step.id: step.node for step in steps if step.node in well and step.name not in keep}

        if steps := left():
            logger.warning("Slurm job %s: ending steps of an earlier attempt on %s", job.id, ", ".join(steps.values()))
            slurm.kill(steps)
            until(lambda: not left(), timeout_s=STEP_S, every_s=POLL_S / 4)
        for host in hosts:  # the machine is gone, and Slurm has not noticed it yet (SlurmdTimeout)
            if host.machine in left().values():
                message = f"{host.name} ({host.machine}): an earlier step has not ended within {STEP_S:.0f} s"
                errors[host.name] = HostError(message, hosts=(host.name,), unreachable=True)
        return errors

    def _error(self, host: SlurmHost, job: slurm.Job, info: NodeInfo) -> HostError | None:
        """Return why the host cannot take part, or None. A draining node may finish its jobs."""
        if host.machine in job.nodes and info.responds and not info.is_down:
            return None
        state = f"Slurm has taken it from job {job.id}" if host.machine not in job.nodes else "it does not respond"
        return HostError(f"{host.name} ({host.machine}): {state} ({info.state})", hosts=(host.name,), unreachable=True)

    def prepare(self) -> None:
        """Wait for nodes, if they were given back. Raises RunStopped if the job was cancelled."""
        if self.allocation.surrounds_us:
            self._check_own_job()
        self.allocation.ensure()

    def _check_own_job(self) -> None:
        job = self.allocation.job()
        left = len(set(self.allocation.machines) & set(job.nodes)) if job else self.launch.slurm.nodes
        needed = self.launch.min_hosts or self.launch.slurm.nodes
        if left < needed:
            raise RunFailed(
                f"{left} of {self.launch.slurm.nodes} nodes of Slurm job {self.allocation.job_id} are left, {needed} "
                "are needed, and inside a job there are no others: `scontrol requeue` it, or start Shardline on a "
                "login node",
                cause="lost host",
            )

    def start(
        self, program: Program, tasks: Mapping[str, Path], *, add: Callable[[Node], None]
    ) -> Mapping[str, HostError]:
        watch = Watch()

        def start_on(host: SlurmHost) -> None:
            task, log = tasks[host.name], self.log_path(host.name)
            step, log_from = f"{task.parent.name}.{host.name}", log.stat().st_size if log.exists() else 0
            standby = self._hand_over(host, task, program)
            if standby is not None:
                process, step = standby.process, standby.step
            else:
                process = self._start(program, host, str(task), step=step, secret=program.secret_input)
            node = StepNode(host, process, step=step, end_path=end_path(task), log=log, log_from=log_from)
            node.stood_by = standby is not None
            watch.nodes.append(node)
            add(node)

        started = on_each([host for host in self.hosts() if host.name in tasks], start_on)
        watch.start()
        return {name: result for name, result in started.items() if isinstance(result, HostError)}

    def stand_by(self, task: NodeTask, program: Program, host: Host) -> None:
        path = standby_lease(self.run_dir).with_name(f"{host.name}.json")
        (slurm_host,) = (each for each in self.hosts() if each.name == host.name)
        step = f"{FOLDER}-{next(self.numbers)}.{host.name}"
        process = self._start(program, slurm_host, "--stand-by", str(path), step=step, waits_for_input=True)
        self.standbys[host.name] = Standby(process, step, task)

    def _hand_over(self, host: SlurmHost, path: Path, program: Program) -> Standby | None:
        """Give the task to the host's standby; return None if no standby can take it."""
        standby = self.standbys.pop(host.name, None)
        if standby is None or standby.process.poll() is not None:  # the standby ended with its job
            return None
        if not fits(standby.task, NodeTask.read(path)):
            logger.info("%s: its standby was started for other ranks: starting a new step", host.name)
            end_srun(standby.process)
            return None
        order = {"task": str(path), "secrets": dict(program.secrets)}
        slurm.give_input(standby.process, json.dumps(order).encode())
        return standby

    def close(self) -> None:
        for standby in self.standbys.values():  # the end of its input, or of its lease, ends it
            slurm.give_input(standby.process, b"")
            with suppress(subprocess.TimeoutExpired):
                standby.process.wait(STEP_S)
            end_srun(standby.process)
        self.standbys.clear()

    def _start(
        self,
        program: Program,
        host: SlurmHost,
        *words: str,
        step: str,
        secret: bytes = b"",
        waits_for_input: bool = False,
    ) -> subprocess.Popen[bytes]:
        return slurm.start(
            self.allocation.job_id,
            host.machine,
            command(self.launch, "-m", "training.node", *words),
            name=step,
            working_dir=program.working_dir,
            log=self.log_path(host.name),
            options=container_options(self.launch),
            secret=secret,
            waits_for_input=waits_for_input,
        )

    def place(self, outcome: AttemptOutcome) -> str:
        machines = dict(zip((host.name for host in self.hosts()), self.allocation.machines, strict=False))
        names = [f"{name} ({machines[name]})" if name in machines else name for name in outcome.host.split(", ")]
        return ", ".join(names) if outcome.gpu is None else f"{', '.join(names)}, GPU {outcome.gpu}"


class Watch(threading.Thread):
    """Polls slurmctld about the machines of an attempt until its steps have ended.

    While slurmctld itself does not answer, no machine counts as silent, because steps continue without it.
    """

    def __init__(self) -> None:
        super().__init__(name="watch Slurm", daemon=True)
        self.nodes: list[StepNode] = []

    def run(self) -> None:
        while nodes := [node for node in self.nodes if node.process.poll() is None]:
            try:
                infos = slurm.node_infos(sorted({node.machine for node in nodes}))
            except HostError:
                infos = {}
            for node in nodes:
                info = infos.get(node.machine)
                if info is None or (info.responds and not info.is_down):
                    node.answered_at = time.monotonic()
            time.sleep(POLL_S)


def prepare_nodes(config: RunConfig, *, run_dir: Path) -> tuple[SlurmLauncher, Inventory]:
    """End earlier steps of the run, check its nodes and measure them.

    Waits for nodes, which the caller holds (slurm_allocation.py). Raises HostsNotReady with all problems of all nodes.
    """
    launcher = SlurmLauncher(config.launch, run_dir=run_dir)
    launcher.allocation.ensure()
    stop_steps(run_dir, launcher.allocation.job_id, grace_s=grace_s(read_plan(run_dir)))
    nodes = JobNodes(launcher.allocation.job_id, launcher.hosts(), config.launch, run_dir, launcher.master_port())
    facts = check_nodes(nodes)
    slots = 1 if config.parallel.strategy == "single" else config.launch.slurm.ranks_per_node
    return launcher, measure_nodes(nodes, facts=facts, slots=slots)


def stop_steps(run_dir: Path, job_id: str, *, grace_s: float) -> None:
    """Stop the run's steps in that job; ranks that outlived their launcher save a checkpoint first."""
    if found := slurm.steps(job_id):
        logger.warning("Slurm job %s: stopping %d steps of an earlier start first", job_id, len(found))
        ask_to_stop(run_dir)
        slurm.terminate(step.id for step in found)
        until(lambda: not slurm.steps(job_id), timeout_s=grace_s, every_s=POLL_S / 4)
    withdraw_leases(run_dir)


def end_job(job: slurm.Job, *, run_dir: Path, grace_s: float) -> None:
    """End a job of the run: its ranks save a checkpoint, then Slurm gets the nodes back."""
    stop_steps(run_dir, job.id, grace_s=grace_s)
    slurm.cancel(job.id)
