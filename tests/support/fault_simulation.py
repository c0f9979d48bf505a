"""Recovery under faults, simulated: the same seed gives the same faults at the same moments, and the same end.

Real is `programs.train`, recovery, attempts, the choice of hosts, causes, leases, standbys, the launcher of containers
with its fencing, records of attempts, followed rows, the sender of metrics, the MLflow run with its final status and
its reconciliation, and the files they keep, in a real folder. Real too is what ranks do without torch: their log of
metrics, the choice of the newest whole checkpoint, and the deletion of old ones.

Simulated are time (nothing sleeps; threads are greenlets that one scheduler wakes in order), hosts and their daemons,
node programs, training, the disk's moods, MLflow's server, the planner's arithmetic for other hosts, and a user who
resumes a run that did not come to its end. Not simulated: a launcher that is killed before its plan is written, when
nothing runs yet (an MLflow run that is not in run.json by then stays open: nobody knows of it), and two launchers at a
time, which the lock on the run's folder keeps out.

`simulate(seed)` runs one seed and returns what it found to be wrong.
"""

from __future__ import annotations

import errno
import functools
import heapq
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

from infra.containers import Job, State
from infra.hosts import HostError
from tasks.launch import (
    attempt,
    docker_hosts,
    host_set,
    launcher,
    lease,
    programs,
    rank_logs,
    recovery,
    remote,
    standby,
)
from tasks.launch.docker_hosts import ContainerNode, DockerLauncher
from tasks.launch.failure import RETRIED
from tasks.launch.launcher import ANSWER_S, STOPPED, Host, Program
from tasks.launch.lease import FENCE_S
from tasks.planning.plan import plan_run
from tasks.runs.errors import RunFailed, RunStopped
from tasks.runs.owner import Owner
from tasks.tracking import client, mlflow_run
from tasks.tracking.final_status import ENDING, RunStatus, reconcile_mlflow
from tasks.tracking.mlflow_run import TrackedRun, tracked
from tasks.workspace import wait
from tests.support.configs import inventory, tiny_config
from training.checkpoint.retention import prune, remove_leftovers
from training.checkpoint.writer import NUM_TRIES
from training.config.launch import LaunchConfig
from training.records import record
from training.records.checkpoint import (
    CheckpointManifest,
    WrittenFile,
    checkpoint_folder,
    damage,
    finished_checkpoints,
    newest_intact,
)
from training.records.inventory import Inventory
from training.records.node import NodeEnd, NodeEnding, NodeTask, RankFailure, StopCause
from training.records.plan import RunPlan
from training.records.record import sha256_file
from training.records.train_result import TrainResult
from training.tracking import metrics_log, mlflow_sender, rows
from training.tracking.metrics_log import MetricsLog
from training.tracking.mlflow_sender import forget_after
from training.tracking.rows import METRICS, read_rows, row_files

RUN_ID = "run"
STEPS_AT_MOST = 14
FAULTS_UNTIL_S = 16.0  # most faults begin by then
FOR_GOOD_S = 600.0  # so long that nobody waits for the end of a fault
LIFE_S = 400.0  # a start of the run is to come to its end in this time
LIVES = 8
IMPATIENT = 4  # times that a user starts the run while faults last; then they wait until all is mended
GIVES_UP = 0.15  # a user, after a start that failed
NODE_S = 0.5  # between two looks of a node at its ranks, its lease and its orders
HEARTBEAT_S = 4.0  # a node without one for so long hangs
RENDEZVOUS_S = 12.0  # that ranks wait for each other at the start
COLLECTIVE_S = 6.0  # that a rank waits for another one's part of a step
STANDBY_REFUSED, STANDBY_FAILS, STANDBY_DIES = 0.1, 0.05, 0.15  # shares of those that are asked for
PATIENT_S = 100.0  # that a start tries at least to tell its end, while the disk is full and MLflow is away
RANKS = 6  # of the run; the hosts share them
POLL_S = 0.4  # in place of the launcher's 0.2 s, so that a seed takes four fifths of the time
GRACE_S = 8.0  # in place of tasks.launch.launcher.STOP_GRACE_S, so that less time passes
SWITCHES = 400_000  # more than this many and something turns in circles

T = TypeVar("T")


# Time, processes and threads


class Killed(BaseException):
    """Takes a thread of a killed process off the stack; what is run on its way out reaches nothing."""


class Process:
    """An operating system's process: its threads die and freeze together."""

    def __init__(self, world: Scheduler, name: str, *, cleans_up: bool = False) -> None:
        """`cleans_up`: its code has `finally` and `except` that write files; ranks have none."""
        self.name, self.cleans_up = name, cleans_up
        self.threads: list[Thread] = []
        self.dead = False
        self.frozen_until = 0.0
        self.writes_left = -1  # until it is killed while it writes a file; negative: it is not
        world.processes.append(self)


class Thread(greenlet):
    """A thread of a process, with the methods of threading.Thread that are used."""

    def __init__(self, world: Scheduler, process: Process, action: Callable[[], object]) -> None:
        super().__init__(self._run, parent=world.hub)
        self.world, self.process, self.action = world, process, action
        self.token = 0  # a wake-up that carries an older one is void
        self.interruption: BaseException | None = None
        self.was_started = False
        self.ended = Event(world)
        process.threads.append(self)

    def start(self) -> None:
        self.was_started = True
        self.world.wake(self, self.world.now)

    def join(self, timeout: float | None = None) -> None:
        if not self.was_started:
            raise RuntimeError("cannot join thread before it is started")
        self.ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def _run(self) -> None:
        try:
            self.action()
        except Killed:
            pass
        except BaseException:
            if not self.process.dead:
                self.world.violate(f"a thread of {self.process.name} died of: {traceback.format_exc()}")
        finally:
            self.ended.set()


class Event:
    """threading.Event."""

    def __init__(self, world: Scheduler) -> None:
        self.world, self.is_on = world, False
        self.waiting: list[Thread] = []

    def set(self) -> None:
        self.is_on = True
        for thread in self.waiting:
            self.world.wake(thread, self.world.now)
        self.waiting.clear()

    def clear(self) -> None:
        self.is_on = False

    def is_set(self) -> bool:
        return self.is_on

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_on:
            thread = self.world.thread()
            self.waiting.append(thread)
            try:
                self.world.sleep(math.inf if timeout is None else timeout)
            finally:
                if thread in self.waiting:
                    self.waiting.remove(thread)
        return self.is_on


class Scheduler:
    """Wakes one thread after the other, in the order of their times. It stands for the modules time and threading."""

    def __init__(self, *, trace: bool) -> None:
        self.now = 0.0
        self.hub = getcurrent()
        self.queue: list[tuple[float, int, Thread | Callable[[], None], int]] = []
        self.order = itertools.count()
        self.trace, self.story = trace, list[str]()
        self.violations: list[str] = []
        self.processes: list[Process] = []
        self.folder: Path | None = None  # the run's

    # time

    def monotonic(self) -> float:
        return 1000.0 + self.now

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.8e9 + self.now

    def sleep(self, seconds: float) -> None:
        thread = self.thread()
        if thread.process.dead:
            raise Killed
        self.wake(thread, self.now + max(0.0, seconds))
        self.hub.switch()
        if thread.interruption is not None:
            interruption, thread.interruption = thread.interruption, None
            raise interruption

    # threads

    def thread(self) -> Thread:
        thread = getcurrent()
        assert isinstance(thread, Thread)
        return thread

    def threading(self) -> SimpleNamespace:
        """What takes the place of the module, in code that starts threads of the process that runs it."""

        def new_thread(*, target: Callable[..., object], args: tuple[Any, ...] = (), **_: object) -> Thread:
            return Thread(self, self.thread().process, functools.partial(target, *args))

        return SimpleNamespace(Event=functools.partial(Event, self), Thread=new_thread)

    def spawn(self, process: Process, action: Callable[[], object]) -> Thread:
        thread = Thread(self, process, action)
        thread.start()
        return thread

    def wake(self, thread: Thread, when: float) -> None:
        thread.token += 1
        if when < math.inf:
            heapq.heappush(self.queue, (when, next(self.order), thread, thread.token))

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Have the scheduler itself do this; it may not sleep."""
        heapq.heappush(self.queue, (when, next(self.order), action, 0))

    def run(self, main: Thread) -> None:
        for _ in range(SWITCHES):
            if main.dead or not self.queue:
                break
            self.now, _, next_up, token = heapq.heappop(self.queue)
            if not isinstance(next_up, Thread):
                next_up()
            elif next_up.token == token and not next_up.dead:
                if next_up.process.frozen_until > self.now:
                    self.wake(next_up, next_up.process.frozen_until)
                else:
                    next_up.switch()
        if not main.dead:
            self.violate(f"no end after {self.now:.0f} s")
        for process in self.processes:
            self.kill(process)

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: from here on nothing that it would do has an effect."""
        here = getcurrent()
        if process.dead:
            return
        if isinstance(here, Thread) and here.process is process:  # the scheduler does it, before anything else
            heapq.heappush(self.queue, (self.now, -1, functools.partial(self.kill, process), 0))
            self.wake(here, math.inf)
            self.hub.switch()
        process.dead = True
        with self._out_of_reach(process):
            for thread in process.threads:
                if not thread.dead:
                    thread.parent = here
                    thread.throw(Killed if thread else GreenletExit)  # false: it has not begun

    @contextmanager
    def _out_of_reach(self, process: Process) -> Iterator[None]:
        """While a killed process's threads are taken off the stack, the run's folder is somewhere else."""
        if not process.cleans_up or self.folder is None or not self.folder.exists():
            yield
            return
        aside = self.folder.with_name(".aside")
        self.folder.rename(aside)
        try:
            yield
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            aside.rename(self.folder)

    # the story

    def tell(self, text: str) -> None:
        if self.trace:
            self.story.append(f"{self.now:7.2f} s  {text}")

    def violate(self, text: str) -> None:
        self.violations.append(text)
        self.tell(f"VIOLATION: {text}")


# MLflow


@dataclass
class ServedRun:
    """What MLflow's server knows of a run. As its database does, it keeps one of several identical metrics."""

    status: str = "RUNNING"
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[tuple[str, int, float, int], Any] = field(default_factory=dict)


class Mlflow:
    """MLflow's server and, as `client`, its MlflowClient. Requests take time, may fail, or only lose their answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runs: dict[str, ServedRun] = {}
        self.searches_lost = 0  # after the answer to a creation was, so that nobody knows of that run
        self.away_until = self.loses_answers_until = self.slow_until = 0.0

    def client(self, tracking_uri: str = "", registry_uri: str = "") -> Mlflow:
        return self

    def _request(self, change: Callable[[], T]) -> T:
        from mlflow.exceptions import MlflowException

        world = self.world
        world.sleep(world.random.uniform(1.0, 4.0) if world.now < self.slow_until else 0.05)
        if world.now < self.away_until:
            world.sleep(1.0)
            raise MlflowException("connection refused")
        answer = change()
        if world.now < self.loses_answers_until and world.random.random() < 0.5:
            world.tell("MLflow accepts a request, and its answer is lost")
            world.sleep(2.0)
            raise MlflowException("the request timed out")
        return answer

    def search_experiments(self, max_results: int) -> None:
        self._request(lambda: None)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        run_id = f"mlflow-{len(self.runs)}"
        self._request(lambda: self.runs.update({run_id: ServedRun(tags=dict(tags))}))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def search_runs(self, experiment_ids: list[str], filter_string: str, max_results: int) -> list[SimpleNamespace]:
        assert filter_string == f"tags.`{mlflow_run.RUN_ID}` = '{RUN_ID}'", "other runs are not simulated"
        self.searches_lost += 1
        found = self._request(lambda: [*self.runs])
        self.searches_lost -= 1
        return [SimpleNamespace(info=SimpleNamespace(run_id=run_id)) for run_id in found]

    def get_run(self, run_id: str) -> SimpleNamespace:
        run = self._request(lambda: self.runs[run_id])
        return SimpleNamespace(
            info=SimpleNamespace(status=run.status, lifecycle_stage="active"), data=SimpleNamespace(tags=dict(run.tags))
        )

    def update_run(self, run_id: str, status: str) -> None:
        self._request(lambda: setattr(self.runs[run_id], "status", status))

    set_terminated = update_run

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._request(lambda: self.runs[run_id].tags.update({key: value}))

    def delete_tag(self, run_id: str, key: str) -> None:
        self._request(lambda: self.runs[run_id].tags.pop(key))

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self._request(lambda: None)

    def log_batch(self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        new = {(each.key, each.step, each.value, each.timestamp): each for each in metrics}
        self._request(lambda: self.runs[run_id].metrics.update(new))

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return self._request(lambda: [each for each in self.runs[run_id].metrics.values() if each.key == key])


# Hosts, containers and what runs in them


class SimulatedHost:
    """A machine. `away`: until when it lacks power, its daemon, its storage, or the network to other hosts."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.name, self.address, self.interface = world, f"host{number}", f"10.0.0.{number + 1}", "eth0"
        self.away: defaultdict[str, float] = defaultdict(float)
        self.gpu_ids = ()
        self.containers: list[Container] = []

    def lacks(self, *what: str) -> bool:
        now = self.world.now
        return any(self.away[each] > now for each in what)

    def take_away(self, *what: str, seconds: float) -> None:
        for each in what:
            self.away[each] = max(self.away[each], self.world.now + seconds)

    def answer(self) -> None:
        """A question to its daemon. Raises HostError."""
        self.world.sleep(self.world.random.uniform(0.01, 0.05))
        if self.lacks("power", "daemon"):
            self.world.sleep(ANSWER_S)
            raise HostError(f"{self.name}: no answer", hosts=(self.name,), unreachable=True)
        if self.lacks("consent"):
            raise HostError(f"{self.name}: refused", hosts=(self.name,))


class Container:
    """The node program and its ranks on one host in one attempt; one that stands by has no attempt until it gets one.

    It keeps the promises of training/node: it looks at its lease every NODE_S while its host sees the storage, stops
    its ranks in order on SIGTERM and when the lease is stale, kills them when the lease is gone, and leaves a record of
    its end where the storage takes it, else lines in its log. Ranks of which one fails all fail. A standby imports the
    program of its task, says so with a file if the disk takes that, and ends if it is told to or its lease is gone.
    """

    def __init__(self, world: World, host: SimulatedHost, path: Path, *, name: str, stands_by: bool) -> None:
        self.world, self.host, self.stands_by = world, host, stands_by
        self.id = str(len(world.containers))
        self.process = Process(world, f"{name} on {host.name}")
        self.running, self.exit_code, self.oom_killed = True, 0, False
        self.is_ready = False  # it has imported what its ranks need
        self.asked: StopCause = ""
        self.failure: RankFailure | None = None
        self.last_lines: tuple[str, ...] = ()
        self.attempt, self.training = 0, Training()
        self.frozen_since = 0.0
        self.alone_since: float | None = None  # since when a peer is missing
        self.handed_over = Event(world)
        self._take(path)
        host.containers.append(self)
        world.containers.append(self)
        world.spawn(self.process, self._run)

    def _take(self, path: Path) -> None:
        self.task = NodeTask.read(path)
        self.lease, self.began_at = Path(self.task.lease), self.world.now
        self.lease_changed_at = self.world.now
        if not self.stands_by:
            self.attempt = int(path.parent.name)
            self.training = self.world.training(self.attempt, self.task)
            if any(each.host is self.host and each.running for each in self.training.containers):
                self.world.violate(f"two nodes have the task of {self.host.name} in attempt {self.attempt}")
            self.training.containers.append(self)

    def hand_over(self, path: Path) -> None:
        """It stands by no longer: it gets the task of an attempt."""
        self.stands_by = False
        self._take(path)
        self.world.tell(f"{self.process.name} takes over in attempt {self.attempt}")
        if self.hangs:
            self.world.violate(f"{self.process.name} takes over, and hangs")
        self.world.taken_over += 1
        self.handed_over.set()

    @property
    def is_frozen(self) -> bool:
        return self.process.frozen_until > self.world.now

    @property
    def hangs(self) -> bool:
        """Whether its heartbeat is too old."""
        return self.running and self.is_frozen and self.world.now - self.frozen_since > HEARTBEAT_S

    @property
    def takes_part(self) -> bool:
        """Whether its ranks can do their part of a step."""
        return self.running and not self.is_frozen and self.failure is None and not self.host.lacks("network")

    @property
    def free_for_s(self) -> float:
        """How long it has been able to see its lease."""
        able_since = max(self.began_at, self.host.away["storage"], self.process.frozen_until)
        return self.world.now - able_since

    # what happens to it

    def fail(self, cause: str, *, exit_code: int = 1) -> None:
        """One of its ranks fails."""
        if self.running and self.failure is None and not self.training.outcome:
            self.failure = RankFailure(rank=self.task.first_rank, exit_code=exit_code, cause=cause, local_rank=0)
            self.world.tell(f"{self.process.name}: its rank fails: {cause}")

    def terminate(self) -> None:
        """SIGTERM."""
        if self.running and not self.asked:
            self.asked = "signal"

    def end(self, exit_code: int) -> None:
        """Its process is no more."""
        if self.running:
            self.running, self.exit_code = False, exit_code
            self.world.tell(f"{self.process.name} has ended: exit code {exit_code}")
            self.world.kill(self.process)

    def remove(self) -> None:
        if self in self.host.containers:
            self.host.containers.remove(self)
        self.end(137)

    # what it does

    def _run(self) -> None:
        world = self.world
        if self.stands_by:
            self._stand_by()
        else:
            self._import()
        if self.task.node_rank == 0:
            runs = Trainer(world, self).run if self.task.module == "training.train" else self._run_other_program
            world.spawn(self.process, runs)
        lease_seen, stop_by = b"", math.inf
        while True:
            world.sleep(NODE_S)
            lease_seen = self._look_at_lease(lease_seen)
            if self.asked == "lease withdrawn":
                self._leave("killed", exit_code=137)
            if self.asked and stop_by == math.inf:
                stop_by = world.now + self.task.grace_s
            if self.training.outcome:
                self._leave("stopped" if self.asked else "done", exit_code=130 if self.asked else 0)
            self._look_at_peers()
            if self.failure is not None and not self.asked:
                self._leave("failed", exit_code=1)
            if self.failure is not None or world.now > stop_by:
                self._leave("stopped" if self.failure else "killed", exit_code=130 if self.failure else 137)

    def _import(self) -> None:
        self.world.sleep(self.world.start_s * self.world.random.uniform(0.8, 1.5))
        self.is_ready = True

    def _stand_by(self) -> None:
        """Return when a task was handed over."""
        self.world.spawn(self.process, self._import_to_stand_by)
        lease_seen = b""
        while True:
            self.handed_over.wait(NODE_S)
            if self.handed_over.is_set() and not self.asked:
                return
            lease_seen = self._look_at_lease(lease_seen)
            if self.asked == "lease withdrawn":
                self.world.check_is_over(self)
            if self.asked:
                self.end(STOPPED)

    def _import_to_stand_by(self) -> None:
        """Import the program; perhaps fail at it, or die some time later, while nothing is handed over."""
        world, ready, luck = self.world, Path(self.task.ready), self.world.random.random()
        self._import()
        if luck < STANDBY_FAILS and self.stands_by:
            self.end(STOPPED)
        if not self.host.lacks("storage") and world.now >= world.no_room_until and ready.parent.exists():
            ready.touch()
        if STANDBY_FAILS <= luck < STANDBY_FAILS + STANDBY_DIES:
            world.sleep(world.random.uniform(0.0, 8.0))
            if self.stands_by:
                self.end(137)

    def _run_other_program(self) -> None:
        """Run a program that keeps nothing, such as the export: it takes a second."""
        while not all(each.is_ready and each.takes_part for each in self.training.containers):
            self.world.sleep(NODE_S / 2)
        self.world.check_alone(self)
        self.world.sleep(1.0)
        self.training.outcome = "done"

    def _look_at_lease(self, seen: bytes) -> bytes:
        now = self.world.now
        if not self.host.lacks("storage"):
            try:
                found = self.lease.read_bytes()
            except FileNotFoundError:
                self.asked = "lease withdrawn"
                return seen
            if found != seen:
                self.lease_changed_at = now
                return found
        if now - self.lease_changed_at > self.task.lease_s and not self.asked:
            self.asked = "lease stale"
        return seen

    def _look_at_peers(self) -> None:
        """Ranks whose peer is dead fail soon; ranks whose peer hangs or is cut off, when their patience is over."""
        peers, world = self.training.containers, self.world
        if any(not peer.running or peer.failure is not None for peer in peers if peer is not self):
            self.fail("RuntimeError: Connection closed by peer [10.0.0.9]:29400")
        elif len(peers) == self.task.num_nodes and all(peer.takes_part for peer in peers):
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = world.now
        elif world.now - self.alone_since > (COLLECTIVE_S if self.training.began else RENDEZVOUS_S):
            self.fail("RuntimeError: Timed out waiting 6000ms for recv operation to complete")

    def _leave(self, ending: NodeEnding, *, exit_code: int) -> None:
        failures = (self.failure,) if ending == "failed" and self.failure is not None else ()
        self.last_lines = tuple(each.cause for each in failures)
        end = NodeEnd(
            ending=ending,
            exit_code=exit_code,
            asked=self.asked,
            seconds=1.0,
            failures=failures,
            last_lines=self.last_lines,
        )
        try:
            if self.host.lacks("storage"):
                raise OSError(errno.ESTALE, "Stale file handle")
            end.write(Path(self.task.end))
        except OSError:
            self.last_lines += tuple(f"rank {each.rank} failed: {each.cause}" for each in failures)
        self.end(exit_code)


@dataclass
class Training:
    """The ranks of one attempt, on all of its hosts. `outcome`: what the trainer came to, if to anything."""

    containers: list[Container] = field(default_factory=list)
    began: bool = False
    outcome: str = ""


class Rows(MetricsLog):
    """The real log of metrics on the simulated disk."""

    world: World

    def _append(self) -> None:
        self.world.check_room()
        super()._append()


class Trainer:
    """Training, as far as recovery depends on it. It keeps these promises of training/train.py, and no others:

    - it begins when the ranks of all hosts are there, at the newest checkpoint that is whole;
    - it first drops the rows after that step, and then writes each row once, a step's loss being the same each time;
    - a step ends only if the ranks of all hosts did their part;
    - every `checkpoint.every_steps` steps and at its end a checkpoint is begun. It is written while training goes on,
      one at a time, in a folder that gets its name once all is there; a kill leaves the nameless folder. What cannot be
      written is tried again, NUM_TRIES times in all;
    - told to stop (SIGTERM to any rank), it ends after the step that it is at, with a checkpoint;
    - result.json comes last, and all ranks leave then;
    - where ranks reach MLflow, a thread of the metrics rank sends rows, and is waited for at the end, but not for long;
    - any error ends its rank, and with it all.
    """

    def __init__(self, world: World, container: Container) -> None:
        self.world, self.container, self.training = world, container, container.training
        self.plan = world.plan_in_force()
        self.checkpoint_error: Exception | None = None
        self.writing: Thread | None = None

    def run(self) -> None:
        try:
            self._wait_for_ranks(lambda: all(each.is_ready for each in self.training.containers))
            self.training.began = True
            self.world.check_alone(self.container)
            self._train()
        except (OSError, RuntimeError) as error:
            self.container.fail(f"{type(error).__name__}: {error}")

    def _wait_for_ranks(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Wait until the ranks of all hosts do their part, and the first host's storage answers."""
        num_nodes, found = self.container.task.num_nodes, self.training.containers
        while not (
            len(found) == num_nodes
            and all(each.takes_part for each in found)
            and condition()
            and not self.container.host.lacks("storage")
        ):
            self.world.sleep(NODE_S / 2)

    def _train(self) -> None:
        world, run_dir, plan = self.world, self.world.run_dir, self.plan
        remove_leftovers(run_dir)
        found = newest_intact(finished_checkpoints(run_dir), damage_of=lambda folder: damage(folder, hashes=False))
        world.check_newest(found)
        start = int(found.name) if found is not None else 0
        world.tell(f"attempt {self.container.attempt} trains from step {start}")
        for path in row_files(run_dir):
            forget_after(path, start)
        earlier = read_rows(run_dir / METRICS)
        Rows.world = world
        uri = "simulated:" if world.ranks_send_metrics else ""
        log = Rows(run_dir, tracking_uri=uri, mlflow_run_id=plan.mlflow_run_id)
        if not any("trainable_parameters" in row for row in earlier):
            log.write(0, trainable_parameters=7)
        for step in range(start + 1, plan.steps + 1):
            world.sleep(world.step_s)
            self._wait_for_ranks()
            stopped = step < plan.steps and any(
                each.asked in {"signal", "lease stale"} for each in self.training.containers
            )
            self._raise_checkpoint_error()
            log.write(step, loss=loss_at(step), elapsed_s=world.now)
            if stopped or step == plan.steps or step % plan.config.checkpoint.every_steps == 0:
                self._begin_checkpoint(step)
                log.write(step, checkpoint_stall_ms=1.0)
            if stopped:
                break
        else:
            stopped, step = False, plan.steps
        self._finish_checkpoint()
        log.close()
        self._wait_for_ranks()
        result = {"step": step, "checkpoint": f"checkpoints/{step:08d}", "stopped_by": "signal" if stopped else "steps"}
        TrainResult.model_validate(RESULT | result).write(run_dir / "result.json")
        self.training.outcome = "stopped" if stopped else "done"

    # checkpoints

    def _begin_checkpoint(self, step: int) -> None:
        self._finish_checkpoint()
        self.writing = self.world.spawn(self.container.process, lambda: self._write_checkpoint(step))

    def _finish_checkpoint(self) -> None:
        if self.writing is not None:
            self.writing.join()
        self._raise_checkpoint_error()

    def _raise_checkpoint_error(self) -> None:
        if self.checkpoint_error is not None:
            raise self.checkpoint_error

    def _write_checkpoint(self, step: int) -> None:
        for tried in range(NUM_TRIES):
            try:
                self._try_checkpoint(step)
                break
            except OSError as error:
                text = f"checkpoint of step {step}: rank 0 could not write a file ({error}), try {tried + 1}"
                self.checkpoint_error = RuntimeError(text) if tried + 1 == NUM_TRIES else None
                self.world.sleep(2.0**tried)
        else:
            return
        with suppress(OSError):  # the real one warns
            prune(self.world.run_dir, self.plan.config)

    def _try_checkpoint(self, step: int) -> None:
        world, folder = self.world, checkpoint_folder(self.world.run_dir, step)
        part, weights = folder.with_name(f".{folder.name}.part"), b"weights of step %d" % step
        part.mkdir(parents=True, exist_ok=True)
        world.check_room()
        (part / "model").write_bytes(weights[:7])
        world.sleep(world.save_s / 2)
        self._wait_for_ranks()
        world.check_room()
        (part / "model").write_bytes(weights)
        world.sleep(world.save_s / 2)
        self._wait_for_ranks()
        file = WrittenFile(size_bytes=len(weights), sha256=sha256_file(part / "model"))
        CheckpointManifest.model_validate(MANIFEST | {"step": step, "files": {"model": file}}).write(
            part / "manifest.json"
        )
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        world.tell(f"checkpoint {step} is published")
        world.published(step)


def loss_at(step: int) -> float:
    return 10.0 / (step + 1)


MANIFEST: dict[str, Any] = {
    "step": 0,
    "tokens": 0,
    "strategy": "ddp",
    "optimizer": "adamw",
    "mesh": {"pp": 1, "dp": 1, "tp": 1},
    "world_size": 1,
    "micro_batches": (1,),
    "config_sha256": "",
    "val_loss": None,
    "files": {},
}
RESULT: dict[str, Any] = {
    "loss": 1.0,
    "tokens": 1,
    "samples_per_s": 1.0,
    "tokens_per_s": 1.0,
    "step_ms": 1.0,
    "device_utilisation": None,
    "peak_memory_gib": 1.0,
    "memory": {},
    "skipped_steps": 0,
    "checkpoint_sha256": "",
    "train_s": 1.0,
}


# The launcher below the seam


class Docker:
    """infra.containers and `connect` over simulated daemons."""

    def __init__(self, world: World) -> None:
        self.world = world

    def connect(self, host: SimulatedHost, *, timeout_s: float = 0.0) -> SimpleNamespace:
        return SimpleNamespace(host=host, close=lambda: None)

    def start(self, client: SimpleNamespace, job: Job, *, secret: bytes = b"") -> str:
        host, stands_by = client.host, "--stand-by" in job.command
        host.answer()
        self.world.sleep(self.world.random.uniform(0.05, 0.3))
        if stands_by and self.world.random.random() < STANDBY_REFUSED:
            raise HostError(f"{host.name}: cannot start another container", hosts=(host.name,))
        container = Container(self.world, host, Path(job.command[-1]), name=job.name, stands_by=stands_by)
        if host.lacks("daemon"):  # it got the order, and its answer does not reach us
            raise HostError(f"{host.name}: no answer to a start", hosts=(host.name,), unreachable=True)
        return container.id

    def give_input(self, client: SimpleNamespace, container_id: str, content: bytes) -> None:
        container = self._container(client, container_id)
        if not container.running:
            raise HostError(f"{client.host.name}: it has ended", hosts=(client.host.name,))
        container.hand_over(Path(json.loads(content)["task"]))
        client.host.answer()

    def find(self, client: SimpleNamespace, *, run: str) -> list[SimpleNamespace]:
        client.host.answer()
        status = {True: "running", False: "exited"}
        return [SimpleNamespace(id=each.id, status=status[each.running]) for each in client.host.containers]

    def state(self, client: SimpleNamespace, container_id: str) -> State | None:
        host, container = client.host, self.world.containers[int(container_id)]
        if host.lacks("power", "daemon"):
            host.answer()
        if container not in host.containers:
            return None
        return State(
            status="running" if container.running else "exited",
            exit_code=container.exit_code,
            oom_killed=container.oom_killed,
            health="unhealthy" if container.hangs else "healthy",
            error="",
            started_at="",
            finished_at="",
        )

    def stop(self, client: SimpleNamespace, container_id: str, *, grace_s: float) -> None:
        container, until = self._container(client, container_id), self.world.now + grace_s
        container.terminate()
        while container.running and self.world.now < until:
            self.world.sleep(NODE_S)
        container.end(137)

    def terminate(self, client: SimpleNamespace, container_id: str) -> None:
        self._container(client, container_id).terminate()

    def kill(self, client: SimpleNamespace, container_id: str) -> None:
        self._container(client, container_id).end(137)

    def remove(self, client: SimpleNamespace, container_id: str) -> None:
        self._container(client, container_id).remove()

    def last_lines(self, client: SimpleNamespace, container_id: str, *, number: int) -> tuple[str, ...]:
        return self._container(client, container_id).last_lines

    def _container(self, client: SimpleNamespace, container_id: str) -> Container:
        """The container, once its host's daemon has answered."""
        client.host.answer()
        return self.world.containers[int(container_id)]


class SimulatedNode(ContainerNode):
    """A container as its launcher sees it, where a file server's client remembers that a file was not there."""

    def __init__(self, world: World, host: Any, container: str, **options: Any) -> None:
        self.world, self.unseen_until = world, 0.0
        super().__init__(host, container, **options)
        simulated = world.containers[int(container)]
        if simulated.stands_by:
            world.violate(f"{simulated.process.name} counts as a node, and has no task")

    def _record(self) -> NodeEnd | None:
        found = super()._record() if self.world.now >= self.unseen_until else None
        if found is None and self.world.now >= self.unseen_until:
            self.unseen_until = self.world.now + self.world.shows_files_after_s
        return found


class SimulatedLauncher(DockerLauncher):
    """The launcher of Docker hosts, whose hosts are simulated and whose files have no owners."""

    def __init__(self, world: World, launch: LaunchConfig, **options: Any) -> None:
        super().__init__(launch, **options)
        self.world = world

    def hosts(self) -> Sequence[Any]:
        return self.world.hosts

    def check(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        unfit = [host for host in self.world.hosts if host in hosts and host.lacks("storage")]
        return {host.name: HostError(f"{host.name}: its storage is not mounted", hosts=(host.name,)) for host in unfit}

    def take_over(self) -> None:
        """No ranks of this machine's own."""

    def prepare(self) -> None:
        """Files have no owners here."""

    def _job(self, program: Program, host: Any, *, what: str, command: tuple[str, ...]) -> Job:
        name = what if what.startswith("standby") else f"node of attempt {what}"
        return Job(image="image", command=command, name=name)


# A run, its user, and what may happen to it


@dataclass
class Life:
    """One start of the run by its user. `ending`: done, stopped, failed, error, or killed with -9."""

    began_at: float
    process: Process
    main: Thread | None = None
    ending: str = "killed"
    error: BaseException | None = None
    asked_to_stop: bool = False
    is_open: bool = False  # its MLflow run, so that it has a status to tell
    told: str = ""  # its status, as ending.json has it when it is over
    told_mlflow: str = ""  # and as MLflow has it
    closing_at: float = math.inf  # when its programs had ended
    ended_at: float = 0.0
    first_attempt: int = 0
    found_standbys: bool = False  # whether those of an earlier start may still have had their lease
    hosts_away: set[str] = field(default_factory=set)  # when it ended, or just before


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    host: int
    seconds: float


class World(Scheduler):
    """Everything of one seed: hosts, MLflow, the disk, the user, the faults, and what must hold."""

    def __init__(self, seed: int, home: Path, *, kinds: Sequence[str], trace: bool) -> None:
        super().__init__(trace=trace)
        self.random = random.Random(seed)
        draw = self.random
        self.home, self.run_dir = home, home / RUN_ID
        self.folder = self.run_dir
        self.mlflow = Mlflow(self)
        self.hosts = [SimulatedHost(self, number) for number in range(draw.choice([1, 2, 2, 3]))]
        self.ranks_send_metrics = draw.random() < 0.5
        self.step_s, self.save_s = draw.uniform(0.3, 0.9), draw.uniform(0.1, 2.5)
        self.start_s = draw.choice([1.0, 1.0, 5.0])
        self.shows_files_after_s = draw.choice([0.0, 0.0, 0.5, 3.0])
        self.no_room_until = 0.0
        self.docker = Docker(self)
        self.containers: list[Container] = []
        self.taken_over = 0  # standbys
        self.plans: dict[bytes, RunPlan] = {}  # by their files
        self.trainings: dict[int, Training] = {}
        self.modules: dict[int, str] = {}  # the program of each attempt
        self.checkpoints: dict[int, float] = {}  # step -> when it was last published
        self.damaged: set[int] = set()
        self.possible_causes: defaultdict[int, set[str]] = defaultdict(set)  # by attempt
        self.began_at: dict[int, float] = {}  # attempt -> when its first container was started
        self.lives: list[Life] = []
        self.stopping: Thread | None = None  # `shardline stop`, elsewhere
        launch = LaunchConfig(
            launcher="docker",
            image="image",
            min_hosts=draw.randint(0, len(self.hosts)),
            wait_s=draw.choice([4.0, 15.0]),
            attempts=draw.choice([2, 3, 5]),
            standby_after_s=draw.choice([None, 0.0, 0.0, 2.0]),
            lost_after_s=draw.choice([3.0, 6.0]),
            daemon_grace_s=draw.choice([8.0, 12.0]),
            lease_s=draw.choice([6.0, 10.0]),
        )
        config, self.steps = a_plan().config, draw.randint(4, STEPS_AT_MOST)
        checkpoint = config.checkpoint.model_copy(update={"every_steps": draw.randint(2, 5)})
        self.config = config.model_copy(update={"launch": launch, "checkpoint": checkpoint})
        self.faults = sorted(faults_of(draw, len(self.hosts), kinds), key=lambda fault: fault.at)
        self.peace_at = max((fault.at + fault.seconds for fault in self.faults), default=0.0)

    # what the real code finds in place of what is below it

    def on_each(self, hosts: Iterable[SimulatedHost], action: Callable[[Any], T]) -> dict[str, T | HostError]:
        """infra.hosts.on_each with simulated threads."""
        results: dict[str, T | HostError] = {}
        errors: list[Exception] = []

        def act(host: SimulatedHost) -> None:
            try:
                results[host.name] = action(host)
            except HostError as error:
                results[host.name] = error
            except Exception as error:
                errors.append(error)

        hosts, interruption = list(hosts), None
        threads = [self.spawn(self.thread().process, functools.partial(act, host)) for host in hosts]
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as error:  # a pool of threads waits for them too before it raises
                    interruption = error
        if interruption is not None:
            raise interruption
        if errors:
            raise errors[0]
        return {host.name: results[host.name] for host in hosts}

    def check_room(self) -> None:
        """Raises OSError while the disk is full."""
        if self.now < self.no_room_until:
            self._blame_on_disk()
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, path: Path, content: str | bytes) -> None:
        """write_atomically, by a process that may be killed just before or just after."""
        process = self.thread().process
        if process.dead:
            raise Killed
        self.check_room()
        process.writes_left -= 1
        if process.writes_left == 0:
            before = self.random.random() < 0.5
            self.tell(f"{process.name} is killed {'before' if before else 'after'} it writes {path.name}")
            if not before:
                WRITE(path, content)
            self._kill_by_name(process)
        WRITE(path, content)

    def _kill_by_name(self, process: Process) -> None:
        container = next((each for each in self.containers if each.process is process), None)
        if container is not None:
            container.end(137)
        self.kill(process)

    def plan_for_hosts(self, plan: RunPlan, available: Inventory, *, run_dir: Path, why: str) -> RunPlan:
        """In place of the planner: as much as recovery uses of a plan for these hosts."""
        new = self.plan_for(tuple(host.name for host in available.hosts), mlflow_run_id=plan.mlflow_run_id)
        self.write(run_dir / "plan.json", new.content())
        self.tell(f"replanned for {', '.join(new.hosts)}: {why}")
        return new

    def plan_for(self, hosts: tuple[str, ...], *, mlflow_run_id: str) -> RunPlan:
        ranks = (RANKS // len(hosts),) * len(hosts)
        update = {"hosts": hosts, "ranks_per_host": ranks, "mlflow_run_id": mlflow_run_id}
        return a_plan().model_copy(update=update | {"config": self.config, "steps": self.steps})

    def plan_in_force(self) -> RunPlan:
        content = (self.run_dir / "plan.json").read_bytes()
        if content not in self.plans:  # to parse it takes 2 ms
            self.plans[content] = RunPlan.parse(content, where="plan.json")
        return self.plans[content]

    def training(self, attempt_number: int, task: NodeTask) -> Training:
        self.began_at.setdefault(attempt_number, self.now)
        self.modules[attempt_number] = task.module
        return self.trainings.setdefault(attempt_number, Training())

    # the user

    def user(self) -> None:
        """Start the run, and start it again until it is done or no longer wanted; then look at what is there."""
        for number in range(LIVES):
            life = self._live(number)
            self.judge(life)
            if self.random.random() < 0.5:
                self._reconcile()
            if life.ending == "done":
                break
            if life.began_at > self.peace_at:
                why = f"{life.ending}: {life.error}"
                self.violate(f"a start after the last fault did not end the run well ({why})")
                break
            if self.random.random() < GIVES_UP:
                break
            if self.stopping is not None:
                self.stopping.join()
            self.sleep(self.random.uniform(0.5, 6.0))
            if number + 1 >= IMPATIENT:
                self.sleep(self.peace_at - self.now + 1.0)
        else:
            self.violate(f"the run has not come to its end after {LIVES} starts")
        self._look_at_what_is_left()

    def _live(self, number: int) -> Life:
        process = Process(self, "the launcher", cleans_up=True)
        attempts = self.run_dir / "attempts"
        life = Life(
            self.now,
            process,
            first_attempt=len([*attempts.glob("[0-9]*")]) + 1,
            found_standbys=(attempts / standby.FOLDER / "lease").exists(),
        )
        self.lives.append(life)
        life.main = self.spawn(process, functools.partial(self._start, life))
        self.tell(f"start {number + 1} of the run")
        if number == 0:
            for fault in self.faults:
                self.at(self.now + fault.at, functools.partial(self.happen, fault))
        self._wait_for(life)
        life.ended_at = self.now
        life.hosts_away = {
            host.name for host in self.hosts if any(until > self.now - 15.0 for until in host.away.values())
        }
        self.tell(f"the start has ended: {life.ending} {life.error or ''}")
        return life

    def _wait_for(self, life: Life) -> None:
        assert life.main is not None
        while not life.main.dead and self.now < life.began_at + LIFE_S:
            self.sleep(1.0)
        if not life.main.dead:
            self.violate(f"a start of the run has not come to its end within {LIFE_S:.0f} s")
        self.kill(life.process)  # with its last thread the process ends

    def _start(self, life: Life) -> None:
        """As the flow `pretrain` does: train, then run a program of one rank, which stands for the export."""
        try:
            reconcile_mlflow()
            with tracked(self.config, run_id=RUN_ID, tags={}) as run:
                life.is_open = True
                if (self.run_dir / "plan.json").exists():
                    plan = self.plan_in_force()
                else:
                    plan = self.plan_for(tuple(host.name for host in self.hosts), mlflow_run_id=run.mlflow_run_id)
                    plan.write(self.run_dir / "plan.json")
                    names = {host.name for host in self.hosts}
                    measured = tuple(host for host in INVENTORY.hosts if host.name in names)
                    Inventory(hosts=measured).write(self.run_dir / "inventory.json")
                try:
                    programs.train(plan, run_dir=self.run_dir, on_row=lambda row: None)
                    programs.run_program("training.export", plan=self.plan_in_force(), run_dir=self.run_dir, ranks=1)
                finally:
                    life.closing_at = self.now
            life.ending = "done"
        except RunStopped as stop:
            life.ending, life.error = "stopped", stop
        except RunFailed as failure:
            life.ending, life.error = "failed", failure
        except KeyboardInterrupt as interruption:
            life.ending, life.error = "interrupted", interruption
        except Exception as error:
            life.ending, life.error = "error", error
        if life.process.dead:
            life.ending, life.error = "killed", None

    def stop_from_elsewhere(self) -> None:
        """`shardline stop`, on a machine where the launcher is not."""
        self._remove_containers(grace_s=GRACE_S)

    def _remove_containers(self, *, grace_s: float = 0.0) -> None:
        hosts: list[Any] = [*self.hosts]
        docker_hosts.remove_containers(hosts, RUN_ID, self.run_dir, grace_s=grace_s)

    def _reconcile(self) -> None:
        """As the start of another run does."""
        from mlflow.exceptions import MlflowException

        with suppress(RuntimeError, OSError, MlflowException):  # MLflow is away, or the disk is full
            reconcile_mlflow()

    # faults

    def happen(self, fault: Fault) -> None:
        host = self.hosts[fault.host]
        self.tell(f"fault: {fault.kind} ({host.name}, {fault.seconds:.1f} s)")
        FAULTS[fault.kind](self, host, fault.seconds)

    def _working(self, host: SimulatedHost) -> list[Container]:
        return [container for container in host.containers if container.running]

    def _fail_rank(self, host: SimulatedHost, cause: str, error: str, *, exit_code: int = 1) -> None:
        for container in self._working(host):
            if container.is_ready and not container.stands_by:
                self.possible_causes[container.attempt].add(cause)
                container.fail(error, exit_code=exit_code)

    def lose_power(self, host: SimulatedHost, seconds: float) -> None:
        host.take_away("power", "storage", "network", seconds=seconds)
        for container in self._working(host):
            container.end(255)

    def run_out_of_memory(self, host: SimulatedHost, seconds: float) -> None:
        for container in self._working(host):
            container.oom_killed = container.is_ready and not container.stands_by
        self._fail_rank(host, "out of memory", SIGKILLED, exit_code=-9)

    def end_containers(self, host: SimulatedHost, *, removed: bool, standing_by: bool = False) -> None:
        for container in self._working(host):
            if container.stands_by == standing_by:
                container.remove() if removed else container.end(137)

    def freeze(self, host: SimulatedHost, seconds: float) -> None:
        for container in self._working(host):
            container.frozen_since, container.process.frozen_until = self.now, self.now + seconds

    def terminate(self, host: SimulatedHost) -> None:
        for container in self._working(host):
            container.terminate()

    def die_while_writing(self, host: SimulatedHost) -> None:
        for container in self._working(host):
            container.process.writes_left = self.random.randint(1, 6)

    def fill_disk(self, seconds: float) -> None:
        self.no_room_until = max(self.no_room_until, self.now + seconds)

    def _blame_on_disk(self) -> None:
        for container in self.containers:
            if container.running:
                self.possible_causes[container.attempt].add("error")

    def damage_newest(self) -> None:
        """A file of the newest checkpoint is cut off, if another one is whole."""
        folders = [folder for folder in finished_checkpoints(self.run_dir) if int(folder.name) not in self.damaged]
        if len(folders) > 1:
            (folders[-1] / "model").write_bytes(b"")
            self.damaged.add(int(folders[-1].name))

    def on_launcher(self, action: Callable[[Life], None]) -> None:
        life = self.lives[-1]
        if life.main is not None and not life.main.dead and (self.run_dir / "plan.json").exists():
            action(life)

    def interrupt(self, life: Life) -> None:
        assert life.main is not None
        life.asked_to_stop = True
        life.main.interruption = KeyboardInterrupt()
        self.wake(life.main, self.now)

    def freeze_launcher(self, life: Life, seconds: float) -> None:
        life.process.frozen_until = self.now + min(seconds, 60.0)

    def order_stop(self, life: Life) -> None:
        life.asked_to_stop = True
        self.stopping = self.spawn(Process(self, "shardline stop"), self.stop_from_elsewhere)

    def kill_launcher_while_writing(self, life: Life) -> None:
        life.process.writes_left = self.random.randint(1, 8)

    # what must hold

    def published(self, step: int) -> None:
        self.checkpoints[step] = self.now
        self.damaged.discard(step)

    def check_newest(self, found: Path | None) -> None:
        whole = [int(each.name) for each in finished_checkpoints(self.run_dir) if int(each.name) not in self.damaged]
        newest, used = max(whole, default=None), int(found.name) if found is not None else None
        if used != newest:
            self.violate(f"training goes on from checkpoint {used}, the newest whole one is {newest}")
        if self.checkpoints and newest is None:
            self.violate("no whole checkpoint is left, though one was published")

    def check_alone(self, mine: Container) -> None:
        """When training begins, the ranks of other attempts are dead, unless they cannot see that they are to be."""
        for other in self.containers:
            is_another = other.attempt != mine.attempt and not other.stands_by
            if is_another and other.running and other.free_for_s > FENCE_S:
                self.violate(f"attempts {other.attempt} and {mine.attempt} own the run at the same time")

    def check_is_over(self, container: Container) -> None:
        """When the lease of a standby is withdrawn, its launcher is through with the run, and could not remove it."""
        life, away = self.lives[-1], container.host.away.values()
        works = not life.process.dead and not life.asked_to_stop
        if works and container.began_at > life.began_at and all(until < self.now - 15.0 for until in away):
            self.violate(f"the lease of {container.process.name} is withdrawn while its launcher works")

    def judge(self, life: Life) -> None:
        """Whether a start of the run ended as what happened to it allows, and whether its status is told."""
        if life.ending == "stopped" and not life.asked_to_stop:
            self.violate(f"the run was stopped, and nobody asked for that: {life.error}")
        if life.ending == "failed":
            self._judge_failure(life)
        if life.ending == "error" and not self._is_expected(life.error):
            self.violate(f"an error ended the run: {_text(life.error)}")
        if life.ending == "interrupted" and not life.asked_to_stop:
            self.violate("the run was interrupted by nobody")
        leases = [path.parent.name for path in self.run_dir.glob("*/*/lease")]
        if life.ending != "killed" and any(self._was_its_own(name, life) for name in leases):
            self.violate(f"leases of attempts {leases} are left")
        path = self.run_dir / ENDING
        life.told = RunStatus.read(path).status if life.is_open and path.exists() else ""
        life.told_mlflow = next((run.status for run in self.mlflow.runs.values() if run.status != "RUNNING"), "")
        nowhere_to_write = life.told == "" and self.no_room_until > life.began_at
        if life.is_open and not nowhere_to_write and life.told not in self._possible_status(life):
            self.violate(f"ending.json says {life.told!r} of a start that ended as {life.ending}")

    def _was_its_own(self, lease: str, life: Life) -> bool:
        return not life.found_standbys if lease == standby.FOLDER else int(lease) >= life.first_attempt

    def _is_expected(self, error: BaseException | None) -> bool:
        """Whether it is MLflow's, away at the start, or a full disk's."""
        from mlflow.exceptions import MlflowException

        mlflow_is_away = isinstance(error, MlflowException) or str(error).startswith("MLflow at ")
        return mlflow_is_away or (isinstance(error, OSError) and error.errno == errno.ENOSPC)

    def _judge_failure(self, life: Life) -> None:
        failure = life.error
        assert isinstance(failure, RunFailed)
        last = max((number for number, at in self.began_at.items() if at >= life.began_at), default=0)
        launch = self.config.launch
        if failure.cause not in RETRIED:
            if failure.cause not in self.possible_causes[last]:
                self.violate(f"the run failed by {failure.cause}, which nothing made: {_text(failure)}")
        elif " without a new checkpoint (launch.attempts)" in str(failure):
            since = sorted(
                at
                for number, at in self.began_at.items()
                if at >= life.began_at and self.modules[number] == self.modules[last]
            )
            before = since[-launch.attempts] if len(since) >= launch.attempts else life.began_at
            news = [step for step, at in self.checkpoints.items() if before < at < since[-1]]
            if news and not self.damaged and max(news) == max(self.checkpoints):
                self.violate(f"attempts were used up although checkpoint {max(news)} was new: {_text(failure)}")
        elif "cannot take part" in str(failure) and not any(self._was_away(life)):
            self.violate(f"no host was away: {_text(failure)}")

    def _was_away(self, life: Life) -> Iterator[bool]:
        for host in self.hosts:
            yield any(until > life.began_at for until in host.away.values())

    def _look_at_what_is_left(self) -> None:
        life = self.lives[-1]
        launch = self.config.launch
        self.sleep(max(0.0, self.peace_at - self.now) + launch.lease_s + GRACE_S + FENCE_S)
        for container in self.containers:
            if container.running:
                self.violate(f"{container.process.name} is still alive")
            elif container in container.host.containers and self._was_to_go(container, life):
                self.violate(f"{container.process.name} is left on its host")
        reconcile_mlflow()
        self._remove_containers()  # `shardline reap`
        if any(host.containers for host in self.hosts) or [*self.run_dir.glob("*/*/lease")]:
            self.violate("something is left after all was removed")
        self._check_status(life)
        self._check_rows(life)

    def _possible_status(self, life: Life) -> set[str]:
        possible = {STATUS.get(life.ending, "KILLED")}
        if life.ending in {"killed", "interrupted"}:  # perhaps when it had told of its end
            possible |= {life.told, life.told_mlflow}
        if life.ended_at - life.closing_at > PATIENT_S:  # neither the disk nor MLflow took its end
            possible.add("KILLED")
        return possible

    def _was_to_go(self, container: Container, life: Life) -> bool:
        """Whether the last start of the run came to its end, and could reach this host when it did."""
        return life.ending == "done" and container.host.name not in life.hosts_away

    def _check_status(self, life: Life) -> None:
        possible = {"KILLED"}
        for each in self.lives:  # one that was killed, or had no MLflow, may have ended before it could say so
            failed = {"FAILED"} if each.ending == "error" else set()  # while it opened its run: the disk was full
            possible = self._possible_status(each) if each.is_open else possible | failed | {"KILLED"}
        path = self.run_dir / "run.json"
        ours = TrackedRun.read(path).mlflow_run_id if path.exists() else ""
        if ours and (status := self.mlflow.runs[ours].status) not in possible:
            self.violate(f"MLflow says {status} of {ours}, whose last start ended as {life.ending}")
        unknown = [run_id for run_id, run in self.mlflow.runs.items() if run_id != ours and run.status == "RUNNING"]
        if len(unknown) > self.mlflow.searches_lost:
            self.violate(f"MLflow has runs that nobody knows: {unknown}")
        if life.ending == "done":
            result = TrainResult.read(self.run_dir / "result.json")
            if (result.step, result.stopped_by) != (self.steps, "steps"):
                self.violate(f"the run is done, and result.json says {result}")

    def _check_rows(self, life: Life) -> None:
        """On the disk each step once, without a gap; in MLflow what is on the disk, once."""
        found = read_rows(self.run_dir / METRICS)
        if not found and life.ending != "done":
            return
        losses = [(row["step"], row["loss"]) for row in found if "loss" in row]
        last = self.steps if life.ending == "done" else len(losses)
        if losses != [(step, loss_at(step)) for step in range(1, last + 1)]:
            self.violate(f"rows on the disk are not those of steps 1 to {last}: {losses}")
        served = self.mlflow.runs[TrackedRun.read(self.run_dir / "run.json").mlflow_run_id]
        sent = [(key, step) for key, step, _, _ in served.metrics]
        if doubled := sorted({each for each in sent if sent.count(each) > 1}):
            self.violate(f"rows are in MLflow twice: {doubled}")
        keys = {(key, row["step"]) for row in found for key in row if key not in {"step", "time_ms"}}
        if lost := sorted(keys - set(sent)):
            self.violate(f"rows are not in MLflow: {lost}")


def _text(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)).strip() if error is not None else ""


STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "error": "FAILED", "interrupted": "KILLED"}
FAULTS: dict[str, Callable[[World, SimulatedHost, float], object]] = {
    "power": World.lose_power,
    "silent daemon": lambda world, host, seconds: host.take_away("daemon", seconds=seconds),
    "daemon refuses": lambda world, host, seconds: host.take_away("consent", seconds=seconds),
    "partition": lambda world, host, seconds: host.take_away("daemon", "storage", "network", seconds=seconds),
    "storage away": lambda world, host, seconds: host.take_away("storage", seconds=seconds),
    "network": lambda world, host, seconds: host.take_away("network", seconds=seconds),
    "container killed": lambda world, host, seconds: world.end_containers(host, removed=False),
    "container removed": lambda world, host, seconds: world.end_containers(host, removed=True),
    "standby killed": lambda world, host, seconds: world.end_containers(host, removed=False, standing_by=True),
    "standby removed": lambda world, host, seconds: world.end_containers(host, removed=True, standing_by=True),
    "container told to stop": lambda world, host, seconds: world.terminate(host),
    "container dies while writing": lambda world, host, seconds: world.die_while_writing(host),
    "rank killed": lambda world, host, seconds: world._fail_rank(host, "killed", SIGKILLED, exit_code=-9),
    "rank out of memory": World.run_out_of_memory,
    "rank fails": lambda world, host, seconds: world._fail_rank(host, "error", "KeyError: 'x'"),
    "GPU fault": lambda world, host, seconds: world._fail_rank(host, "gpu fault", GPU_FAULT),
    "bad loss": lambda world, host, seconds: world._fail_rank(host, "bad loss", "NonFiniteLoss: loss is nan"),
    "connection lost": lambda world, host, seconds: world._fail_rank(host, "network", "RuntimeError: Broken pipe"),
    "node hangs": World.freeze,
    "disk full": lambda world, host, seconds: world.fill_disk(seconds),
    "checkpoint damaged": lambda world, host, seconds: world.damage_newest(),
    "MLflow away": lambda world, host, seconds: setattr(world.mlflow, "away_until", world.now + seconds),
    "MLflow slow": lambda world, host, seconds: setattr(world.mlflow, "slow_until", world.now + seconds),
    "MLflow loses answers": lambda world, host, seconds: setattr(
        world.mlflow, "loses_answers_until", world.now + seconds
    ),
    "launcher killed": lambda world, host, seconds: world.on_launcher(lambda life: world.kill(life.process)),
    "launcher dies while writing": lambda world, host, seconds: world.on_launcher(world.kill_launcher_while_writing),
    "launcher frozen": lambda world, host, seconds: world.on_launcher(
        lambda life: world.freeze_launcher(life, seconds)
    ),
    "Ctrl-C": lambda world, host, seconds: world.on_launcher(world.interrupt),
    "stop from elsewhere": lambda world, host, seconds: world.on_launcher(world.order_stop),
}
SIGKILLED = "Signal 9 (SIGKILL) received by PID 7"
GPU_FAULT = "torch.AcceleratorError: CUDA error: unspecified launch failure"
INVENTORY = inventory(1, 1, 1)
WRITE = record.write_atomically


def faults_of(draw: random.Random, num_hosts: int, kinds: Sequence[str]) -> Iterator[Fault]:
    """A few faults, often soon after one another."""
    at = 0.0
    for _ in range(draw.choice([0, 1, 2, 2, 3, 3, 4, 5, 6, 8])):
        if draw.random() < 0.05:
            at = 0.0
        elif at == 0.0 or draw.random() < 0.5:
            at = draw.uniform(0.5, FAULTS_UNTIL_S)
        else:
            at += draw.uniform(0.0, 4.0)
        seconds = FOR_GOOD_S if draw.random() < 0.05 else draw.choice([1.0, 3.0, 7.0, 15.0, 25.0]) * draw.random()
        yield Fault(at, draw.choice(kinds), draw.randrange(num_hosts), seconds)


@functools.cache
def a_plan() -> RunPlan:
    """A plan of the real planner, whose hosts and config are replaced."""
    config = tiny_config(train__global_batch=12, train__micro_batch=0, evaluation__every_steps=0)
    return plan_run(config, inventory=INVENTORY, run_id=RUN_ID)


# One seed


@dataclass(frozen=True)
class Outcome:
    """The end of a seed. `endings`: of each start of the run; `attempts`: of all starts; `story`: if it was traced."""

    seed: int
    violations: tuple[str, ...]
    faults: tuple[str, ...]
    endings: tuple[str, ...]
    attempts: int
    taken_over: int  # standbys, by attempts
    seconds: float  # simulated
    story: tuple[str, ...]


def simulate(seed: int, *, kinds: Sequence[str] = (), trace: bool = False) -> Outcome:
    """Run one seed, in a folder in memory. `kinds`: of faults that may happen, FAULTS' names; empty means all."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir=_in_memory()) as folder:
        world = World(seed, Path(folder) / "home", kinds=kinds or list(FAULTS), trace=trace)
        with _in_place_of_what_is_real(world):
            world.run(world.spawn(Process(world, "the user"), world.user))
    return Outcome(
        seed=seed,
        violations=tuple(world.violations),
        faults=tuple(fault.kind for fault in world.faults),
        endings=tuple(life.ending for life in world.lives),
        attempts=len(world.trainings),
        taken_over=world.taken_over,
        seconds=world.now,
        story=tuple(world.story),
    )


def simulate_many(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Run seeds on all cores, in order."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(simulate, seeds, chunksize=20)


def replay(seed: int) -> str:
    """The command that shows what happens in a seed."""
    return f"python -m benchmarks.fault_simulation --seed {seed}"


def _in_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class _Told(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        self.world.tell(f"    {record.levelname} {record.getMessage()}")


@contextmanager
def _in_place_of_what_is_real(world: World) -> Iterator[None]:
    import mlflow.tracking

    def claim(folder: Path, *, flow_run: str, flow_run_starts: int) -> None:
        world.write(folder / "owner.json", Owner(process="0:0", children=()).content())

    clocks = (attempt, host_set, launcher, metrics_log, recovery, rank_logs, rows, wait)

    def no_log(*_: object) -> SimpleNamespace:
        return SimpleNamespace(join=lambda timeout: None, close=lambda: None)

    def tracking_for_ranks(launch: LaunchConfig, *, mlflow_run_id: str) -> tuple[dict[str, str], dict[str, str]]:
        return ({"MLFLOW_RUN_ID": mlflow_run_id} if world.ranks_send_metrics else {}), {}

    silent = SimpleNamespace(setLevel=lambda level: None)  # the real ones' levels are not to be set
    stand_ins: list[tuple[object, str, object]] = [
        *((module, "time", world) for module in clocks),
        *((module, "threading", world.threading()) for module in (lease, metrics_log, docker_hosts, standby)),
        (docker_hosts, "containers", world.docker),
        (docker_hosts, "connect", world.docker.connect),
        *((module, "on_each", world.on_each) for module in (attempt, docker_hosts, standby)),
        *((module, "write_atomically", world.write) for module in (lease, mlflow_sender, record)),
        (docker_hosts, "last_lines", world.docker.last_lines),
        (docker_hosts, "LogFollower", no_log),
        (docker_hosts, "ContainerNode", functools.partial(SimulatedNode, world)),
        (remote, "tracking_for_ranks", tracking_for_ranks),
        (host_set, "plan_for_hosts", world.plan_for_hosts),
        (launcher, "STOP_GRACE_S", GRACE_S),
        *((module, "POLL_S", POLL_S) for module in (attempt, docker_hosts)),
        (programs, "DockerLauncher", functools.partial(SimulatedLauncher, world)),
        (client, "logging", SimpleNamespace(**vars(logging) | {"getLogger": lambda name: silent})),
        (mlflow_run, "claim", claim),
        (mlflow_run, "git_commit", lambda: ("unknown", False)),
        (mlflow, "MlflowClient", world.mlflow.client),
        (mlflow.tracking, "MlflowClient", world.mlflow.client),
    ]
    with ExitStack() as stack:
        for module, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        environment = {"SHARDLINE_HOME": str(world.home), "MLFLOW_TRACKING_URI": "simulated:"}
        stack.enter_context(mock.patch.dict("os.environ", environment))
        stack.enter_context(_logged(world))
        yield


@contextmanager
def _logged(world: World) -> Iterator[None]:
    """What the real code logs goes to the story, or nowhere."""
    root, told = logging.getLogger(), _Told(world)
    handlers, level, disabled = root.handlers, root.level, logging.root.manager.disable
    root.handlers = [told]
    if world.trace:
        root.setLevel(logging.INFO)
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)
        logging.disable(disabled)
