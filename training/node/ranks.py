"""Starts the ranks of a node, by Shardline's fork server or torchrun, finds them and ends them."""

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

ENDS = "ends.json"  # name of the ranks that the fork server has started
POLL_S = 0.1
STACK_S = 1.0  # time for ranks that did not stop to write their stacks, as in tasks/launch/programs.py
DEATH_S = 5.0  # wait for killed processes; one that waits for a dead file server cannot end
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def command(task: NodeTask, *, log_dir: Path) -> list[str]:
    """Return the command that starts the ranks: Shardline's fork server, or torchrun for users' programs."""
    if task.is_ours:
        ready = Path(task.ready or log_dir / "ready")
        return [sys.executable, "-u", "-P", "-m", "training.node.fork_server", str(ready), task.module, *task.args]
    return torchrun_command(task, log_dir=log_dir)


def rank_order(task: NodeTask, secrets: dict[str, str], *, log_dir: Path) -> RankOrder:
    """Return the fork server's order; the variables of its ranks have torchrun's names."""
    shared = {
        **rank_environment(task, secrets),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_WORLD_SIZE": str(task.num_ranks),
        "GROUP_RANK": str(task.node_rank),
        "MASTER_ADDR": task.master_address,
        "MASTER_PORT": str(task.master_port),
        "TORCHELASTIC_RUN_ID": "shardline",  # tells torch that a launcher started the process
        "TORCHELASTIC_USE_AGENT_STORE": str(task.world_size > 1),
    }
    return RankOrder(
        module=task.module,
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
    """Return torchrun's command with static ranks and addresses: torchrun resolves, elects and restarts nothing.

    `--` is needed because torchrun would read a program's `--d` as an ambiguous abbreviation of its own options.
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
    """Return the environment of the ranks: the container's, the task's and the secrets.

    Ranks stop if this process ends.
    """
    name = _interface_of(task.local_address) if task.interface == "auto" else task.interface
    interface = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name) if name else {}
    ours = {"SHARDLINE_LAUNCHER_PID": str(os.getpid())}
    return {**os.environ, **interface, **ours, **task.environment, **secrets}


def _interface_of(address: str) -> str:
    """Return the interface that has this address.

    By default gloo takes that of the host's name, which may be loopback.
    """
    return next((name for name, known in local_addresses() if known == address), "")


def adopt_orphans() -> None:
    """Make ranks whose torchrun ends children of this process, not of init, so that they can be found and stopped."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _ranks(task: NodeTask, starter: int) -> list[psutil.Process]:
    """Return the ranks' processes: children of torchrun or of the fork server's child, or of this process if that died;
    not their own children.

    Under a prefix such as nsys, a rank is the Python process below it. A forked data loader has the same command line
    as its rank, so only the topmost process counts.
    """
    family = psutil.Process().children(recursive=True)
    if not task.prefix:
        starters = {member.pid for member in family if _parent(member) == starter} if task.is_ours else {starter}
        return [member for member in family if _parent(member) in starters | {os.getpid()} and member.pid != starter]
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
    """Send SIGTERM and wait for a last checkpoint; return whether all ranks ended by themselves.

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
    """Kill ranks that torchrun has asked to end because another one failed, so that it reports the failure at once.

    Otherwise torchrun waits 30 s for them. Meanwhile other hosts' ranks fail as a result, and look like the cause.
    """
    for pid in told:
        with suppress(psutil.NoSuchProcess):
            rank = psutil.Process(pid)
            if rank.ppid() == process.pid:
                for member in [*rank.children(recursive=True), rank]:
                    member.kill()


def end_starter(process: subprocess.Popen[bytes], *, patience_s: float) -> int:
    """End torchrun or the fork server and return its exit code; ranks of a killed one become children of this process.

    `patience_s`: time for it to end by itself. Without ranks it need not wait for other hosts, nor for another order.
    """
    if process.poll() is None and patience_s:
        if process.stdin is not None:
            process.stdin.close()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    process.kill()
    return process.wait()


def kill_family(*, but: int = 0) -> None:
    """Kill all descendants, because remaining processes would hold devices, ports and the pipe of the output.

    `but`: the PID of one that stays.
    """
    family = [member for member in psutil.Process().children(recursive=True) if member.pid != but]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=DEATH_S)
