"""The launcher for this machine: one node program, in its own session, watched as a child process.

A Ctrl-C in the terminal reaches only this process, which sends SIGTERM to the node. The ranks then save a checkpoint
and end together, not in the middle of a collective. Inside `kept_node` the node lives on when its program is done, and
starts the ranks of the run's next program without imports; its own imports may begin before the first program.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.hosts import HostError
from tasks.launch.attempt import end_path
from tasks.launch.failure import LAST_LINES, SIGKILL, AttemptOutcome, NodeState
from tasks.launch.launcher import DONE, Host, LaunchedPlan, Node, Program, grace_s
from tasks.launch.lease import FENCE_S, withdraw_leases
from tasks.launch.rank_environment import NCCL, SPINS, node_environment, rank_defaults
from tasks.launch.standby import fits, standby_lease
from tasks.runs.owner import RanksLauncher, ranks_launcher, tasks_of
from tasks.workspace.paths import open_private, tracking_uri
from tasks.workspace.processes import free_port, process_key
from tasks.workspace.wait import until
from training.config.launch import LaunchConfig
from training.records.node import HandedTask, NodeTask
from training.records.plan import torch_environment
from training.tracking.redaction import without_secrets

logger = logging.getLogger(__name__)

STACK_S = 1.0  # time for ranks that did not stop to write their Python stacks
NODE_S = 5.0  # time for a node to end after its ranks
IMPORTS_S = 120.0  # from a cold network disk they take a minute


@dataclass(frozen=True)
class ThisMachine:
    """This machine as the only host of a run."""

    name: str
    address: str = "127.0.0.1"
    interface: str = ""


@dataclass(frozen=True)
class Standby:
    """A node that has imported a program, and waits for a task; `task`: the one for which it was started."""

    process: subprocess.Popen[bytes]
    task: NodeTask

    def hand_over(self, path: Path, *, log: Path) -> bool:
        """Give it the task at `path`; return whether it took the task."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(HandedTask(task=str(path), log=str(log)).model_dump_json().encode() + b"\n")
            self.process.stdin.flush()
        return self.process.poll() is None

    def end(self) -> None:
        """End it; it has no ranks."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(NODE_S)
        if self.process.returncode is None:
            _end_child(self.process)


_kept: dict[Path, Standby | None] = {}  # run's folder -> the node that did the run's last program


@contextmanager
def kept_node(run_dir: Path, ahead: NodeTask | None = None) -> Iterator[None]:
    """Keep the node of each program of the run for the next one, and end it afterwards.

    `ahead`: a task like that of the first program (imports_ahead), whose imports begin at once.
    """
    _kept[run_dir] = _import_ahead(ahead, run_dir) if ahead is not None else None
    try:
        yield
    finally:
        if kept := _kept.pop(run_dir):
            kept.end()


def imports_ahead(
    module: str, launch: LaunchConfig, *, host: str, threads: int, device_kind: str, mlflow_run_id: str
) -> NodeTask:
    """Return a task for `kept_node` before there is a plan; a plan that gives ranks other threads cannot use it."""
    of_torch = torch_environment(device_kind)
    environment = rank_defaults(of_torch) | _own_environment(of_torch, mlflow_run_id)
    return NodeTask(
        module=module,
        master_port=0,
        environment=node_environment(environment, launch, threads=threads, host=host),
        launcher_pid=os.getpid(),
        end="",
    )


def _import_ahead(task: NodeTask, run_dir: Path) -> Standby:
    folder = standby_lease(run_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    path, ready = folder / "ahead.json", folder / "ahead.ready"
    ready.unlink(missing_ok=True)
    task = task.model_copy(update={"ready": str(ready)})
    task.write(path)
    return Standby(_spawn(task, path, log=folder / "ahead.log"), task)


def wait_for_imports(run_dir: Path) -> None:
    """Wait until the imports that `kept_node` began are made: beside them, a measurement would be too low."""
    if kept := _kept.get(run_dir):
        ready = Path(kept.task.ready)
        if not until(lambda: ready.exists() or kept.process.poll() is not None, timeout_s=IMPORTS_S, every_s=0.02):
            logger.warning("imports take longer than %.0f s: rates measured beside them are too low", IMPORTS_S)


def _spawn(task: NodeTask, path: Path, *, log: Path) -> subprocess.Popen[bytes]:
    """Start a node: of a program of ours it imports and waits for its task, a user's program it starts."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": tracking_uri()}  # not in the file: it may contain a password
    if task.is_ours:  # so that a user's script can import its neighbours
        environment["PYTHONSAFEPATH"] = "1"
    with open_private(log, "ab") as output:
        # -P: a folder named `training` in the working directory must not be imported instead.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "training.node", *(["--stand-by"] if task.is_ours else []), str(path)],
            stdin=subprocess.PIPE if task.is_ours else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _own_environment(of_torch: Iterable[str], mlflow_run_id: str) -> dict[str, str]:
    """Return what the user's environment has instead of defaults, and the run's ID in MLflow."""
    own = {name: os.environ[name] for name in sorted({*NCCL, *SPINS, *of_torch}) if name in os.environ}
    return own | ({"MLFLOW_RUN_ID": mlflow_run_id} if mlflow_run_id else {})


def end_of_log(path: Path, start: int) -> tuple[str, ...]:
    """Return the last lines of a node's log, without secrets; those before `start` are of another attempt."""
    with suppress(OSError), path.open("rb") as log:
        log.seek(start)
        return tuple(map(without_secrets, log.read().decode(errors="replace").splitlines()[-LAST_LINES:]))
    return ()


class ProcessNode(Node):
    """A node program that is a child process. It is never silent: the process table always answers.

    Its record counts as its end: after a program that is done, the process waits for the next task.
    """

    def __init__(self, host: str, standby: Standby, *, end_path: Path, log: Path, log_from: int) -> None:
        super().__init__(host, end_path=end_path)
        self.standby, self.log, self.log_from = standby, log, log_from
        self.kills_before = kernel_kills()
        self.memory_was_used_up = False

    @property
    def state(self) -> NodeState:
        self._answered()
        code = self.standby.process.poll()
        if code is None:
            return NodeState(running=not self.is_done, exit_code=DONE)
        if not self.last_lines:
            self._read_end()
        exit_code = code if code >= 0 else 128 - code
        return NodeState(running=False, exit_code=exit_code, oom_killed=self.memory_was_used_up)

    @property
    def is_done(self) -> bool:
        """Whether its ranks came to their end."""
        end = self._record()
        return end is not None and end.ending == "done"

    def _read_end(self) -> None:
        self.last_lines = end_of_log(self.log, self.log_from)
        end = self._record()
        killed = end is None or any(failure.exit_code == -SIGKILL for failure in end.failures)
        self.memory_was_used_up = killed and kernel_kills() > self.kills_before

    def terminate(self) -> None:
        self.standby.process.terminate()

    def remove(self) -> None:
        code = self.standby.process.poll()
        if code is None and self.is_done:
            return
        if code is None or code < 0:  # a node that was killed has left its ranks alive
            _end_child(self.standby.process)

    def close(self) -> None:
        """Do nothing: the process is asked for its state, and no thread watches it."""


class LocalLauncher:
    """Ranks as processes of this machine. `log`: the file for their output; `beside`: they run beside training, with
    CPU time that nobody else wants, on these GPUs (as in CUDA_VISIBLE_DEVICES).
    """

    heartbeat = ""
    ranks_send_metrics = True
    signals_are_the_users = True

    def __init__(self, plan: LaunchedPlan, *, run_dir: Path, log: str, beside: str | None = None) -> None:
        self.beside = beside
        self.plan, self.run_dir, self.log = plan, run_dir, run_dir / "logs" / f"{log}.log"
        self.host = ThisMachine(name_here(plan))
        self.pid_for_nodes = os.getpid()
        self.standby = _kept.get(run_dir)
        self.node: ProcessNode | None = None

    def hosts(self) -> Sequence[ThisMachine]:
        return (self.host,)

    def master_port(self) -> int:
        return free_port()

    def take_over(self) -> None:
        own = self.standby.process.pid if self.standby is not None else 0
        end_earlier_attempt(self.run_dir, grace_s=grace_s(self.plan), but=own)
        end_containers(self.run_dir)

    def fence(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """Return nothing: a node ends with its attempt, and `take_over` has ended nodes of earlier starts."""
        return {}

    def check(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        return {}

    def environment(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the defaults, overridden by the user's variables on this machine; nodes inherit all others."""
        environment = _own_environment(self.plan.environment(), getattr(self.plan, "mlflow_run_id", ""))
        if self.beside is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.beside
        return environment, {}

    def compile_cache(self) -> None:
        return None

    def prepare(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def start(
        self, program: Program, tasks: Mapping[str, Path], *, add: Callable[[Node], None]
    ) -> Mapping[str, HostError]:
        (path,) = tasks.values()
        task, log_from = NodeTask.read(path), self.log.stat().st_size if self.log.exists() else 0
        warm, self.standby = self._usable(task), None
        node = warm or self._start_node(task, path)
        if task.is_ours and not node.hand_over(path, log=self.log) and warm:
            logger.info("%s starts in a new process: the one that waited for it has ended", program.module)
            warm, node = None, self._start_node(task, path)
            node.hand_over(path, log=self.log)
        self.node = ProcessNode(self.host.name, node, end_path=end_path(path), log=self.log, log_from=log_from)
        self.node.stood_by = warm is not None
        add(self.node)
        RanksLauncher(launcher=process_key(node.process.pid)).write(self.run_dir / "gang.json")
        return {}

    def _usable(self, task: NodeTask) -> Standby | None:
        """Return the standby; None without one, or if its imports were made in another environment."""
        if self.standby is not None and not fits(self.standby.task, task):
            logger.info("%s starts in a new process: its environment is another", task.module or task.script)
            self.standby.end()
            return None
        return self.standby

    def _start_node(self, task: NodeTask, path: Path) -> Standby:
        node = _spawn(task, path, log=self.log)
        if self.beside is not None:  # with nice 19, its threads would still get 1.5% of every busy core
            os.sched_setscheduler(node.pid, os.SCHED_IDLE, os.sched_param(0))
        return Standby(node, task)

    def stand_by(self, task: NodeTask, program: Program, host: Host) -> None:
        path = standby_lease(self.run_dir).with_name(f"{host.name}.json")
        self.standby = self._start_node(task, path)

    def close(self) -> None:
        """Keep the node of a program that is done for the run's next one, inside `kept_node`; end all others."""
        if self.standby is not None:
            self.standby.end()
        done = self.node.standby if self.node is not None and self.node.is_done else None
        if self.run_dir in _kept:
            _kept[self.run_dir] = done
        elif done is not None:
            done.end()
        self.standby = self.node = None

    def log_path(self, host: str) -> Path:
        return self.log

    def place(self, outcome: AttemptOutcome) -> str:
        return outcome.host if outcome.gpu is None else f"{outcome.host}, GPU {outcome.gpu}"


def name_here(plan: LaunchedPlan) -> str:
    """This machine's name in the plan's record of hosts; an evaluation's plan has none."""
    hosts: tuple[str, ...] = getattr(plan, "hosts", ())
    return hosts[0] if hosts else "this machine"


# Remains of an earlier start


def _end_child(process: subprocess.Popen[bytes]) -> None:
    _kill(process.pid)
    process.wait()


def end_earlier_attempt(run_dir: Path, *, grace_s: float, but: int = 0) -> None:
    """Stop ranks of an earlier start that outlived their launcher, because only one attempt may work on a run.

    `but`: the PID of this start's own node, which stays.
    """
    if (launcher := ranks_launcher(run_dir)) and launcher.pid != but:
        logger.warning("ranks of an earlier start are still alive (pid %d): stopping them first", launcher.pid)
        _end(launcher, grace_s=grace_s)


def _end(node: psutil.Process, *, grace_s: float) -> None:
    """Ask a node and its ranks to stop, and wait for their checkpoint, at most for the grace period."""
    try:
        with suppress(psutil.NoSuchProcess):
            node.terminate()
            node.wait(grace_s + STACK_S + NODE_S)
    except (psutil.TimeoutExpired, KeyboardInterrupt):
        pass
    _kill(node.pid)


def _kill(node: int) -> None:
    """Kill a node by its PID, with its ranks: each has its own session, so no process group contains them.

    Ranks whose node has died are found by a variable in their environment.
    """
    ours = {"SHARDLINE_LAUNCHER_PID": str(node)}
    family = [process for process in psutil.process_iter() if process.pid == node or _has(process, ours)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs([member for member in family if member.pid != node], timeout=NODE_S)


def _has(process: psutil.Process, environment: Mapping[str, str]) -> bool:
    with suppress(psutil.Error):  # the process is gone, or belongs to another user
        return environment.items() <= process.environ().items()
    return False


def end_containers(run_dir: Path) -> None:
    """Withdraw the leases of containers whose launcher was killed, because their run is resumed on this machine."""
    elsewhere = [lease for lease in run_dir.glob("*/*/lease") if not _was_local(lease.parent)]
    withdraw_leases(run_dir)
    if elsewhere:
        logger.warning(
            "ranks of an earlier start on Docker hosts may be alive: their lease is withdrawn, which ends them; "
            "`shardline reap` removes their containers"
        )
        time.sleep(FENCE_S)


def _was_local(attempt: Path) -> bool:
    """Whether the attempt's node was a process on its launcher's machine."""
    tasks = tasks_of(attempt)
    return bool(tasks) and all(task.launcher_pid for task in tasks)


def kernel_kills() -> int:
    """Return how many processes the kernel has killed so far because memory or a control group's limit was used up."""
    path = Path("/proc/vmstat")
    counted = re.search(r"^oom_kill (\d+)", path.read_text(), flags=re.MULTILINE) if path.exists() else None
    return int(counted[1]) if counted else 0
