"""The task of one host in one attempt, and its end: written by the launcher and by training/node."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.records.record import Record

NodeEnding = Literal["done", "failed", "stopped", "killed"]
StopCause = Literal["", "signal", "launcher ended", "lease stale", "lease withdrawn"]


class NodeTask(Record):
    """The task of a host in one attempt: the program, and its place among the others. Paths are the container's own.

    `lease` belongs to one attempt, so that a newer lease does not keep old ranks alive. The launcher renews the lease
    file (its time, or its content) well within `lease_s`; if it removes the file, the ranks are killed at once. An
    empty `lease` or `heartbeat` means none; the heartbeat file is best on tmpfs. `launcher_pid`: of a launcher that
    is the node's parent process, whose end stops the ranks before the lease is stale; 0 means none.
    `ready`: a file that is made once the ranks' program is imported. `interface`: auto means the one that has
    `local_address`, empty the choice of NCCL and gloo.
    """

    module: str = ""
    script: str = ""
    args: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()  # the start of each rank's command, such as nsys with its options
    num_nodes: int = 1
    node_rank: int = 0
    num_ranks: int = 1  # on this node
    first_rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int
    local_address: str = "127.0.0.1"
    interface: str = ""
    environment: dict[str, str] = Field({})
    secrets_on_stdin: bool = False
    heartbeat: str = ""
    launcher_pid: int = 0
    lease: str = ""
    lease_s: float = 60.0
    grace_s: float = 120.0
    ready: str = ""
    end: str

    @property
    def is_ours(self) -> bool:
        """Whether it is a program of Shardline's, whose ranks are forked (fork_server.py); torchrun starts others."""
        return self.module.startswith("training.")


class HandedTask(Record):
    """A task for a node that stands by: one line over its standard input. `log`: where it prints from now on."""

    task: str
    secrets: dict[str, str] = Field({}, repr=False)
    log: str = ""


class RankFailure(Record):
    """The failure of a rank. A negative `exit_code` is a signal's number. `cause`: the line of the exception, if known.

    `local_rank`: the rank's number on its host, which is that of its GPU there; None: torchrun did not tell it.
    """

    rank: int
    exit_code: int
    cause: str
    local_rank: int | None = None


class RankEnd(Record):
    """The end of a rank's process. `ended_by_us`: another rank had failed, and this one was killed."""

    rank: int
    local_rank: int
    exit_code: int
    ended_by_us: bool = False


class RankEnds(Record):
    """The ends of a node's ranks, in the order in which they ended."""

    ends: tuple[RankEnd, ...]


class NodeEnd(Record):
    """The end of a node's program: `ending`. `exit_code` is torchrun's, which is 1 also after a requested stop.

    done: the ranks came to their end. stopped: they were asked to stop, and ended within the grace period. killed: they
    were asked, and did not end. failed: none of these; `failures` says which ranks, `last_lines` what was printed last.
    """

    ending: NodeEnding
    exit_code: int
    asked: StopCause
    seconds: float
    failures: tuple[RankFailure, ...] = ()
    last_lines: tuple[str, ...] = ()


class Bandwidth(Record):
    """An all-reduce, as nccl-tests defines it: algbw is bytes over time, busbw is algbw * 2(n-1)/n, in 1e9 bytes/s."""

    num_bytes: int
    seconds: float
    algbw_gb_s: float
    busbw_gb_s: float


class PairBandwidth(Record):
    """Two hosts that send to each other at the same time, one rank each; `gb_s` is the rate of each direction."""

    hosts: tuple[str, str]
    gb_s: float
    latency_s: float  # of the smallest exchange


class CollectiveReport(Record):
    """The report of check_network.py: `hosts` in the order of their ranks, `pairs` from the slowest to the fastest.

    `networks`: what NCCL used on each host (IB, Socket, a plugin's name), in the same order; empty with gloo.
    """

    backend: str
    hosts: tuple[str, ...]
    num_ranks: int
    wrong_ranks: tuple[int, ...]  # whose sums are not exact
    all_reduce: tuple[Bandwidth, ...]
    pairs: tuple[PairBandwidth, ...]
    networks: tuple[str, ...] = ()
    seconds: float


def describe_collectives(report: CollectiveReport) -> str:
    """The best bandwidth and the slowest pair of hosts, as one line."""
    best = max(report.all_reduce, key=lambda rate: rate.busbw_gb_s)
    text = (
        f"all-reduce of {best.num_bytes / 2**20:g} MiB over {report.num_ranks} ranks on {len(report.hosts)} hosts: "
        f"{best.algbw_gb_s:.3g} GB/s, bus bandwidth {best.busbw_gb_s:.3g} GB/s"
    )
    if report.pairs:
        slowest = report.pairs[0]
        text += f"; slowest pair {' - '.join(slowest.hosts)}: {slowest.gb_s:.3g} GB/s, {slowest.latency_s * 1e6:.0f} µs"
    return text + (f"; NCCL's network: {', '.join(sorted(set(report.networks)))}" if report.networks else "")
