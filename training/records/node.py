"""The task of one host in one attempt, and its end: written by the launcher and by training/node."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.records.record import Record

NodeEnding = Literal["done", "failed", "stopped", "killed"]
StopCause = Literal["", "signal", "launcher ended", "lease stale", "lease withdrawn"]


class NodeTask(Record):
    """The task of a host in one attempt: the program, and its place among the others. Paths are the container's own.

    A lease belongs to one attempt, so that a newer lease does not keep old ranks alive.
    """

    module: str = ""
    """Python module that each rank runs, such as training.train; empty if `script` is given."""
    script: str = ""
    """Path of the script that each rank runs; empty if `module` is given."""
    args: tuple[str, ...] = ()
    """Arguments of the module or script."""
    prefix: tuple[str, ...] = ()
    """Start of each rank's command, such as nsys with its options; empty for none."""
    num_nodes: int = 1
    """Number of hosts in the attempt."""
    node_rank: int = 0
    """Number of this host among the hosts of the attempt, from 0."""
    num_ranks: int = 1
    """Number of ranks on this host."""
    first_rank: int = 0
    """Global number of this host's first rank."""
    world_size: int = 1
    """Number of ranks on all hosts."""
    master_address: str = "127.0.0.1"
    """Address of the first host, where the ranks meet (MASTER_ADDR)."""
    master_port: int
    """Port of the first host, where the ranks meet (MASTER_PORT); 0 in a task that only imports its program."""
    local_address: str = "127.0.0.1"
    """Address by which other hosts reach this one."""
    interface: str = ""
    """Network interface for NCCL and gloo. auto: the one that has `local_address`; empty: they choose it themselves."""
    environment: dict[str, str] = Field({})
    """Variables that ranks get beside the container's own."""
    secrets_on_stdin: bool = False
    """Whether the node must read a line of JSON with secret variables from its standard input first."""
    heartbeat: str = ""
    """File that the node writes after each look at the lease, best on tmpfs; empty for none."""
    launcher_pid: int = 0
    """Process of a launcher that is the node's parent, whose end stops the ranks before the lease is stale; 0: none."""
    lease: str = ""
    """File that the launcher renews, by its time or content, well within `lease_s`. If the launcher removes it, the
    ranks are killed at once. Empty for none.
    """
    lease_s: float = 60.0
    """Seconds without a change of the lease after which the node stops its ranks."""
    grace_s: float = 120.0
    """Seconds that ranks have to end by themselves once they were asked to stop, before they are killed."""
    ready: str = ""
    """File that is made once the ranks' program is imported; empty: one in a temporary folder."""
    end: str
    """File to which the node writes its NodeEnd."""

    @property
    def is_ours(self) -> bool:
        """Whether it is a program of Shardline's, whose ranks are forked (fork_server.py); torchrun starts others."""
        return self.module.startswith("training.")


class HandedTask(Record):
    """A task for a node that stands by: one line over its standard input."""

    task: str
    """Path of the NodeTask to carry out."""
    secrets: dict[str, str] = Field({}, repr=False)
    """Secret variables for the ranks, value by name; they are in no file."""
    log: str = ""
    """File to which the node and its ranks print from now on; empty: where they printed before."""


class RankFailure(Record):
    """The failure of a rank."""

    rank: int
    """Global number of the rank."""
    exit_code: int
    """Exit code of its process; a negative one is the number of the signal that ended it."""
    cause: str
    """Line of the exception or of the abort, if the output shows one."""
    local_rank: int | None = None
    """Number of the rank on its host, which is that of its GPU there; None: torchrun did not tell it."""


class RankEnd(Record):
    """The end of a rank's process."""

    rank: int
    """Global number of the rank."""
    local_rank: int
    """Number of the rank on its host."""
    exit_code: int
    """Exit code of its process; a negative one is the number of the signal that ended it."""
    ended_by_us: bool = False
    """Whether this rank was killed because another one had failed."""


class RankEnds(Record):
    """The fork server's report on the ranks of a node, once all have ended."""

    ends: tuple[RankEnd, ...]
    """One end for each rank of the node, in the order in which they ended."""


class NodeEnd(Record):
    """The end of a node's program."""

    ending: NodeEnding
    """How the program ended. done: the ranks came to their end. stopped: they were asked to stop, and ended within the
    grace period. killed: they were asked, and did not end. failed: none of these.
    """
    exit_code: int
    """Exit code of what started the ranks: the fork server or torchrun, whose is 1 also after a requested stop."""
    asked: StopCause
    """What asked the ranks to stop; empty if nothing did."""
    seconds: float
    """Seconds from the node's order to its end."""
    failures: tuple[RankFailure, ...] = ()
    """Ranks that failed by themselves, not because another one had failed; empty unless `ending` is failed."""
    last_lines: tuple[str, ...] = ()
    """Last lines that the ranks printed, or why they could not be started."""


class Bandwidth(Record):
    """The speed of an all-reduce of one size, as nccl-tests defines it."""

    num_bytes: int
    """Bytes of the tensor that is summed."""
    seconds: float
    """Mean seconds of one all-reduce, on the slowest rank."""
    algbw_gb_s: float
    """Bytes of the tensor over the seconds of an all-reduce, in 1e9 bytes per second."""
    busbw_gb_s: float
    """Bus bandwidth, algbw * 2(n-1)/n for n ranks, in 1e9 bytes per second: comparable with the network's speed."""


class PairBandwidth(Record):
    """Two hosts that send to each other at the same time, one rank each."""

    hosts: tuple[str, str]
    """Names of the two hosts."""
    gb_s: float
    """Rate of each direction while both send, in 1e9 bytes per second, for the largest message."""
    latency_s: float
    """Seconds of the smallest exchange."""


class CollectiveReport(Record):
    """The report of check_network.py."""

    backend: str
    """Library that communicated: nccl on GPUs, otherwise gloo."""
    hosts: tuple[str, ...]
    """Names of the hosts in the order of their ranks."""
    num_ranks: int
    """Number of ranks on all hosts."""
    wrong_ranks: tuple[int, ...]
    """Ranks for which the sum of an all-reduce was not exact."""
    all_reduce: tuple[Bandwidth, ...]
    """Speed of an all-reduce over all ranks, by size, from the smallest to the largest."""
    pairs: tuple[PairBandwidth, ...]
    """Speed between every two hosts, from the slowest pair to the fastest."""
    networks: tuple[str, ...] = ()
    """Network that NCCL used on each host (IB, Socket or a plugin's name), in the order of `hosts`; empty with gloo."""
    seconds: float
    """Seconds that the whole check took."""


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
