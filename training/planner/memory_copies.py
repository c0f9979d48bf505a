"""What copies of the training state in the memory of hosts take (checkpoint.memory_every_steps): memory and time."""

from __future__ import annotations

from collections.abc import Sequence

from training.config.run import RunConfig
from training.planner.cluster import PCIE_GB_PER_S, Cluster
from training.planner.memory import GIB
from training.records.inventory import Host

TWO = 2  # the newest whole copy, and the one that is being made
HOST_SHARE = 0.9  # of a host's memory; the rest is for other programs
# GB per second of a core's time, as a Zen 5 does it: 0.26 GB in 0.33 s (SHA-256 most of that), and in 0.30 s.
WRITTEN_GB_PER_S, EXCHANGED_GB_PER_S = 0.8, 0.9
SHARED_MEMORY = "/dev/shm"


def host_copies_gib(checkpoint_gib: float, ranks_per_host: Sequence[int]) -> list[float]:
    """GiB of copies in each host's memory at most.

    While training: two copies of its own ranks' files and of those of the host before it. When an attempt begins: a
    whole checkpoint, since every rank reads all files.
    """
    per_rank = checkpoint_gib / sum(ranks_per_host)
    before = [*ranks_per_host[-1:], *ranks_per_host[:-1]] if len(ranks_per_host) > 1 else [0]
    held = [own + received for own, received in zip(ranks_per_host, before, strict=True)]
    return [max(TWO * per_rank * ranks, checkpoint_gib) for ranks in held]


def rank_copies_gib(checkpoint_gib: float, ranks_per_host: Sequence[int]) -> float:
    """Return a rank's share of its host's copies, where most."""
    each = zip(host_copies_gib(checkpoint_gib, ranks_per_host), ranks_per_host, strict=True)
    return max(gib / ranks for gib, ranks in each)


def copy_s(checkpoint_gib: float, cluster: Cluster, *, threads: int, step_s: float) -> float:
    """Seconds that one copy costs training.

    A GPU waits for the bus, and its host does the rest beside the next step; CPU ranks do it on the threads that train.
    Where the rest takes longer than a step, training waits.
    """
    num_bytes = checkpoint_gib * GIB / sum(cluster.ranks_per_host)
    copied_s, sent_s = num_bytes / WRITTEN_GB_PER_S / 1e9, 0.0
    if cluster.num_hosts > 1:
        copied_s += num_bytes / EXCHANGED_GB_PER_S / 1e9
        sent_s = cluster.most_on_a_host * num_bytes / cluster.network.gb_per_s / 1e9
    if cluster.kind == "cpu":
        return copied_s / threads + max(0.0, sent_s - step_s)
    return num_bytes / PCIE_GB_PER_S / 1e9 + max(0.0, copied_s + sent_s - step_s)


def price_memory_copies(
    config: RunConfig,
    hosts: Sequence[Host],
    cluster: Cluster,
    *,
    checkpoint_gib: float,
    threads: int,
    step_s: float,
) -> str:
    """One sentence with the price of the copies. Raises ValueError if a host's memory is too small for them."""
    every, ranks = config.checkpoint.memory_every_steps, cluster.ranks_per_host
    needed = host_copies_gib(checkpoint_gib, ranks)
    for host, gib, num_ranks in zip(hosts, needed, ranks, strict=True):
        _check_room(config, host, copies_gib=gib, buffers_gib=checkpoint_gib * num_ranks / sum(ranks))
    seconds = copy_s(checkpoint_gib, cluster, threads=threads, step_s=step_s)
    return (
        f"copies in memory every {every} steps: up to {max(needed):.2f} GiB on each host, "
        f"{seconds:.2g} s each, {seconds / every / step_s:.1%} of the steps' time"
        + ("" if cluster.num_hosts > 1 else "; one host keeps no copy for another, so they are lost with it")
    )


def _check_room(config: RunConfig, host: Host, *, copies_gib: float, buffers_gib: float) -> None:
    """Raises ValueError unless the copies, and the buffers they are written from, fit into the host's memory."""
    saving = config.checkpoint
    room, what = HOST_SHARE * host.memory_gib - buffers_gib, f"{HOST_SHARE:.0%} of its memory, less buffers,"
    in_containers = config.launch.launcher != "local"  # their own /dev/shm is another; preflight looks at the host's
    if host.shared_memory_gib is not None and saving.memory_dir.startswith(SHARED_MEMORY) and not in_containers:
        room, what = min((room, what), (host.shared_memory_gib, SHARED_MEMORY))
    if copies_gib > room:
        raise ValueError(
            f"checkpoint.memory_every_steps = {saving.memory_every_steps} needs {copies_gib:.2f} GiB of {host.name}'s "
            f"memory for copies of the training state, {what} has {max(0.0, room):.2f} GiB: set it to 0, train on "
            "more hosts, or name a larger tmpfs in checkpoint.memory_dir"
        )
