"""Forks a node's ranks from one process that has imported their program.

    python -m training.node.fork_server MODULE READY [ARGUMENT…]

The imports, 7 s of a core for training, are made once for all ranks of a host, and a standby (training/node) has made
them before it is needed: the file READY is there then. They are those of the module, and those that its `import_for`
makes, where it has one, for the ranks' arguments: what a model's class or a strategy imports in the middle of a run
would else be imported by each rank. An order, one line of JSON over standard input, says which ranks
to fork; their ends are written to the file that it names, as torchrun would report them. Where several hosts take part,
the first one's server keeps the store at which ranks meet, as torchrun's agent does
(docs.pytorch.org/docs/stable/elastic/run.html).

A process that has opened a GPU cannot be forked. If the imports opened one, or the ranks run under a prefix such as
nsys, each rank is a new process instead, which imports for itself.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from training.records.node import RankEnd, RankEnds
from training.records.record import Record

SIBLINGS_S = 1.0  # for the other ranks to end when one failed: the launcher looks 2 s for the host where it began
POLL_S = 0.02
MOST_WAITING = 4096  # ranks that knock at the store at once; the kernel may allow fewer (net.core.somaxconn)
KILLED_S = 5.0  # for killed ranks to be gone; one that waits for a dead file server cannot die
PR_SET_NAME = 15  # linux/prctl.h


class RankOrder(Record):
    """The ranks to start. `environments`: one for each; `ends`: where to write how they ended."""

    args: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    environments: tuple[dict[str, str], ...] = Field(repr=False)
    hosts_store: bool = False
    ends: str


def main(module: str, ready: Path, args: Sequence[str]) -> int:
    """Return the exit code of the server: 1 if a rank failed. Ranks return 0, or raise as their program does."""
    imported = importlib.import_module(module)
    if hasattr(imported, "import_for"):
        imported.import_for(*args)
    gc.collect()
    gc.freeze()  # else each rank's first collection copies all pages of what was imported
    with suppress(OSError):  # a full disk: it stands by all the same
        ready.touch()
    line = sys.stdin.readline()
    if not line:  # the node ended before it had a task
        return 0
    order = RankOrder.model_validate_json(line)
    command = [*order.prefix, sys.executable, "-u", "-m", module, *order.args]
    forks = not order.prefix and not _gpu_is_open()
    if not forks and not order.prefix:
        print("node: the imports opened a GPU, so that each rank imports for itself", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the node tells ranks directly, and we report their end
    listener = _listener(order.environments[0]) if order.hosts_store else None
    ranks: dict[int, Mapping[str, str]] = {}
    for environment in order.environments:
        pid = os.fork()
        if pid == 0:
            if listener is not None:
                listener.close()
            _become_rank(environment)
            if not forks:
                os.execvp(command[0], command)
            sys.argv = [module, *order.args]
            warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)  # as it is meant
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        ranks[pid] = environment
    store = _store(order.environments[0], listener) if listener is not None else None
    ends = _wait(ranks)
    RankEnds(ends=tuple(ends)).write(Path(order.ends))
    del store
    return 1 if any(end.exit_code for end in ends) else 0


def _become_rank(environment: Mapping[str, str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Without a space: Slurm's proctrack/linuxproc takes /proc/PID/stat apart at spaces, and would never kill this one.
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{environment['RANK']}".encode(), 0, 0, 0)


def _gpu_is_open() -> bool:
    """Whether this process holds a device file of a GPU's driver."""
    links = (os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number))
    return any(link.startswith(("/dev/nvidia", "/dev/kfd")) for link in links)


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def _listener(environment: Mapping[str, str]) -> socket.socket:
    """The store's socket, open before any rank is there: one that is refused tries again only after 0.3 s and more.

    Not the store itself: it has threads, which a fork must not meet. All addresses, as the store would listen on.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    port = int(environment["MASTER_PORT"])
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=MOST_WAITING)


def _store(environment: Mapping[str, str], listener: socket.socket) -> Any:
    """The store at which ranks meet; it outlives them all, so that none sees it close while it leaves."""
    from torch.distributed import TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _wait(ranks: Mapping[int, Mapping[str, str]]) -> list[RankEnd]:
    """Wait for all ranks, in the order of their ends. Once one has failed the others are killed SIBLINGS_S later.

    Otherwise they would wait for it, up to the timeout of their collective.
    """
    running, ends, kill_at, killed = set(ranks), list[RankEnd](), float("inf"), set[int]()
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            place = ranks[pid]
            ends.append(
                RankEnd(
                    rank=int(place["RANK"]),
                    local_rank=int(place["LOCAL_RANK"]),
                    exit_code=code,
                    ended_by_us=pid in killed,
                )
            )
            if code and kill_at == float("inf"):
                kill_at = time.monotonic() + SIBLINGS_S
        elif pid == 0:
            if time.monotonic() > kill_at and not killed:
                killed = set(running)
                for sibling in killed:
                    os.kill(sibling, signal.SIGKILL)
            if time.monotonic() > kill_at + KILLED_S:
                break
            time.sleep(POLL_S)
    return ends


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
