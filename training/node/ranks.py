"""The ranks of a node: how they are started, by our fork server or by torchrun, found and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from training.node.fork_server import RankOrder
from training.node.host_check import local_addresses
from training.records.node import NodeTask

ENDS = "ends.json"  # of the ranks that the fork server has started
POLL_S = 0.1
STACK_S = 1.0  # for the stacks of ranks that did not stop in that time, as tasks/launch/programs.py has it
DEATH_S = 5.0  # for killed processes; one that waits for a dead file server cannot die
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def command(task: NodeTask, *, log_dir: Path) -> list[str]:
    """The command line of what starts the ranks: our fork server, or torchrun for programs of users."""
    if task.is_ours:
        ready = Path(task.ready or log_dir / "ready")
        return [sys.executable, "-u", "-P", "-m", "training.node.fork_server", task.module, str(ready), *task.args]
    return torchrun_command(task, log_dir=log_dir)


def rank_order(task: NodeTask, secrets: dict[str, str], *, log_dir: Path) -> RankOrder:
    """What the fork server is to start; the variables of its ranks are named as torchrun names them."""
    shared = {
        **rank_environment(task, secrets),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_WORLD_SIZE": str(task.num_ranks),
        "GROUP_RANK": str(task.node_rank),
        "MASTER_ADDR": task.master_address,
        "MASTER_PORT": str(task.master_port),
        "TORCHELASTIC_RUN_ID": "shardline",  # tells torch that a launcher started it
        "TORCHELASTIC_USE_AGENT_STORE": str(task.world_size > 1),
    }
    return RankOrder(
        args=task.args,
        prefix=task.prefix,
        environments=tuple(
            {**shared, "RANK": str(task.first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
            for local_rank in range(task.num_ranks)
        ),
        hosts_store=task.node_rank == 0 and task.world_size > 1,
        ends=str(log_dir / ENDS),
    )


def torchrun_command(task: NodeTask, *, log_dir: Path) -> list[str]:
    """Static ranks and explicit addresses: nothing is resolved, elected or restarted behind the launcher's back.

    `--` because torchrun takes a program's `--d` for an ambiguous abbreviation of its own options.
    """
    options = {
        "--nnodes": task.num_nodes,
        "--node-rank": task.node_rank,
        "--nproc-per-node": task.num_ranks,
        "--master-addr": task.master_address,
        "--master-port": task.master_port,
        "--local-addr": task.local_address,
        "--max-restarts": 0,
        "--log-dir": log_dir,
    }
    words = [str(word) for option in options.items() for word in option]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words, "--no-python", "--"]
    return [*launcher, *task.prefix, *rank_command(task)]


def rank_command(task: NodeTask) -> list[str]:
    program = ["-m", task.module] if task.module else [task.script]
    return [sys.executable, "-u", *program, *task.args]


def rank_environment(task: NodeTask, secrets: dict[str, str]) -> dict[str, str]:
    """The environment of the ranks: the container's, the task's and the secrets; ranks stop if we die."""
    name = _interface_of(task.local_address) if task.interface == "auto" else task.interface
    interface = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name) if name else {}
    ours = {"SHARDLINE_LAUNCHER_PID": str(os.getpid())}
    return {**os.environ, **interface, **ours, **task.environment, **secrets}


def _interface_of(address: str) -> str:
    """The interface that has this address. Gloo would take the one of the host's own name, which may be loopback."""
    return next((name for name, known in local_addresses() if known == address), "")


def adopt_orphans() -> None:
    """Makes ranks whose torchrun dies our children instead of init's, so that they can be found and stopped."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _ranks(task: NodeTask, torchrun: int) -> list[psutil.Process]:
    """The processes of the ranks: their starter's children, or ours if it died, but not what they started themselves.

    Under a prefix such as nsys a rank is the Python process below it. A forked data loader has its rank's command line
    too, so only the topmost process counts.
    """
    family = psutil.Process().children(recursive=True)
    if not task.prefix:
        return [member for member in family if _parent(member) in {torchrun, os.getpid()} and member.pid != torchrun]
    alike = {member.pid: member for member in family if _command(member) == rank_command(task)}
    return [member for member in alike.values() if _parent(member) not in alike]


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return process.ppid()
    return 0


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def stop_ranks(task: NodeTask, process: subprocess.Popen[bytes], *, at_once: Callable[[], bool]) -> bool:
    """Sends SIGTERM and waits for a last checkpoint; returns whether all ranks ended by themselves.

    The signal goes to the ranks, because torchrun would kill them 30 s after its own. Ranks that do not end in time
    print their stacks (SIGUSR1). `at_once` ends the wait early.
    """
    ranks = _ranks(task, process.pid)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.terminate()
    deadline = time.monotonic() + task.grace_s
    while time.monotonic() < deadline and not at_once():
        ranks = [rank for rank in ranks if _is_alive(rank)]
        if not ranks:
            return True
        time.sleep(POLL_S)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGUSR1)
    if not at_once():
        time.sleep(STACK_S)
    return False


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_siblings(process: subprocess.Popen[bytes], told: Iterable[int]) -> None:
    """Kills ranks that torchrun has told to end because another one failed, so that it reports that one at once.

    Otherwise it waits 30 s for them, in which other hosts' ranks fail as a consequence and look like the cause.
    """
    for pid in told:
        with suppress(psutil.NoSuchProcess):
            rank = psutil.Process(pid)
            if rank.ppid() == process.pid:
                for member in [*rank.children(recursive=True), rank]:
                    member.kill()


def end_torchrun(process: subprocess.Popen[bytes], *, patience_s: float) -> int:
    """Ends torchrun and returns its exit code; the ranks of a killed one become our children.

    `patience_s`: time for it to end by itself. Without ranks it need not wait for other hosts.
    """
    if process.poll() is None and patience_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    process.kill()
    return process.wait()


def kill_family() -> None:
    """Kills all descendants: what ranks left behind would hold devices, ports and the pipe of their output."""
    family = psutil.Process().children(recursive=True)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=DEATH_S)
