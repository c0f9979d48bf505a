"""Forks a node's ranks from one process that has imported their program.

    python -m training.node.fork_server READY MODULE [ARGUMENT…]

The imports, 3 to 7 s of a core for training, are made once for all ranks of a host, and a standby (training/node) makes
them before it is needed; it then makes the file READY. It imports the module, and calls the module's `import_for`, if
there is one, with the ranks' arguments, as far as they are known: otherwise each rank would import later what a model's
class or a strategy needs. An order, one line of JSON over standard input, says which ranks of which program to fork.
Their results are written to the file that it names, in the form of torchrun's reports. With several hosts, the first
one's server keeps the store of the ranks' rendezvous, as torchrun's agent does
(docs.pytorch.org/docs/stable/elastic/run.html).

After ranks that all came to their end it takes the next order, for another program of the same run; it ends with its
input, or with an order that failed. A child of it carries each order out, because the store has threads, and no process
with threads may be forked.

A process that has opened a GPU cannot be forked. If the imports opened one, or the ranks run under a prefix such as
nsys, each rank is a new process instead, which makes its own imports.
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

SIBLINGS_S = 1.0  # wait for the other ranks after a failure: the launcher waits 2 s to find the host where it began
POLL_S = 0.02
LOOPBACK = "127.0.0.1"
MOST_WAITING = 4096  # ranks that connect to the store at once; the kernel may allow fewer (net.core.somaxconn)
KILLED_S = 5.0  # wait until killed ranks are gone; a rank that waits for a dead file server cannot end
PR_SET_NAME = 15  # linux/prctl.h


class RankOrder(Record):
    """The ranks to start."""

    module: str
    """Python module that each rank runs."""
    args: tuple[str, ...] = ()
    """Arguments of the module."""
    prefix: tuple[str, ...] = ()
    """Start of each rank's command, such as nsys with its options; empty for none."""
    environments: tuple[dict[str, str], ...] = Field(repr=False)
    """Variables of each rank, one mapping for each of them."""
    hosts_store: bool = False
    """Whether this node has the store in which the ranks of all hosts meet."""
    ends: str
    """Path of the file to which the ends of the ranks are written."""


def main(ready: Path, module: str, args: Sequence[str]) -> int:
    """Carry out orders until the input ends or ranks failed; return the exit code: 1 if a rank failed.

    In ranks, return 0 or raise the program's error.
    """
    _import(module, args)
    with suppress(OSError):  # a full disk; it stands by nevertheless
        ready.touch()
    for line in iter(sys.stdin.readline, ""):
        order = RankOrder.model_validate_json(line)
        _import(order.module, order.args)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the node signals ranks directly, and waits for their ends
        child = os.fork()
        if child == 0:
            return _carry_out(order)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        with suppress(FileNotFoundError):  # the child failed before it had ranks
            _part(order).replace(order.ends)  # the node may end all processes but this one, once it sees the file
        if code:
            return code
    return 0


def _part(order: RankOrder) -> Path:
    return Path(f"{order.ends}.part")


def _import(module: str, args: Sequence[str]) -> None:
    gc.disable()  # to look for garbage takes a quarter of the imports' time, and finds 8 MB
    imported = importlib.import_module(module)
    if hasattr(imported, "import_for"):
        imported.import_for(*args)
    gc.freeze()  # otherwise each rank's first garbage collection copies all pages of the imports
    gc.enable()


def _carry_out(order: RankOrder) -> int:
    """Fork the ranks and wait for them; return 1 if one failed."""
    command = [*order.prefix, sys.executable, "-u", "-m", order.module, *order.args]
    forks = not order.prefix and not _gpu_is_open()
    if not forks and not order.prefix:
        print("node: the imports opened a GPU, so that each rank imports for itself", flush=True)
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
            sys.argv = [order.module, *order.args]
            warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)  # as intended
            runpy.run_module(order.module, run_name="__main__", alter_sys=True)
            return 0
        ranks[pid] = environment
    store = _store(order.environments[0], listener) if listener is not None else None
    ends = _wait(ranks)
    RankEnds(ends=tuple(ends)).write(_part(order))
    del store
    return 1 if any(end.exit_code for end in ends) else 0


def _become_rank(environment: Mapping[str, str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # No space in the name: Slurm's proctrack/linuxproc splits /proc/PID/stat at spaces, and would never kill this
    # process.
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{environment['RANK']}".encode(), 0, 0, 0)


def _gpu_is_open() -> bool:
    """Whether this process holds a device file of a GPU's driver."""
    links = (
        os.readlink(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{number}")
    )
    return any(link.startswith(("/dev/nvidia", "/dev/kfd")) for link in links)


def _listener(environment: Mapping[str, str]) -> socket.socket:
    """Open the store's socket before there are ranks, because a refused rank tries again only after 0.3 s and more. The
    store itself has threads, so it starts only after the forks. The socket listens on all addresses, as the store
    would, unless all ranks are on this machine: the store asks nobody for a password.
    """
    port = int(environment["MASTER_PORT"])
    if environment["MASTER_ADDR"] == LOOPBACK:
        return socket.create_server((LOOPBACK, port), backlog=MOST_WAITING)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=MOST_WAITING)


def _store(environment: Mapping[str, str], listener: socket.socket) -> Any:
    """Make the store of the ranks' rendezvous. It outlives all ranks, so that no rank sees it close while it ends."""
    from torch.distributed import TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _wait(ranks: Mapping[int, Mapping[str, str]]) -> list[RankEnd]:
    """Wait for all ranks, in the order of their ends. SIBLINGS_S after a failure the others are killed: otherwise they
    would wait for the failed one, up to the timeout of their collective.
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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
