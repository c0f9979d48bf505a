"""A short test of the network between ranks: `torchrun … -m training.hardware.check_network OUT.json`, in seconds.

It checks that sums are right, how fast all-reduces are, and which two hosts are the slowest pair, by gloo between CPUs
and NCCL between GPUs. Definitions are those of nccl-tests (doc/PERFORMANCE.md, github.com/NVIDIA/nccl-tests).
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from training.node.infiniband import active_adapters, network_used
from training.records.node import Bandwidth, CollectiveReport, PairBandwidth, describe_collectives

logger = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT = datetime.timedelta(seconds=60)
SIZES = (2**10, 2**16, 2**20, 2**24)  # bytes
GPU_SIZES = (*SIZES, 2**28)
SECONDS_A_SIZE = 0.2
MAX_REPEATS = 20
SLOW_S = 0.3  # no larger size is tried after one that took this long: 16 MiB take 1.4 s at 100 Mbit/s
EXACT_BELOW = 1000  # addends; up to 16,000 ranks their sum is an integer that fp32 holds exactly


def main(out: Path) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    began, device = time.monotonic(), _device()
    if device.type == "cuda":
        nccl_log = _make_nccl_report()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    wrong = _ranks_with_wrong_sums(device)
    networks = _gathered((network_used(nccl_log.read_text()), active_adapters())) if device.type == "cuda" else []
    all_reduce = tuple(_all_reduce_rates(device))
    hosts = _gathered((int(os.environ["GROUP_RANK"]), os.environ.get("SHARDLINE_HOST") or socket.gethostname()))
    pairs = _pair_rates([name for _, name in hosts], first_ranks=_first_ranks(hosts), device=device)
    report = CollectiveReport(
        backend="nccl" if device.type == "cuda" else "gloo",
        hosts=tuple(dict(hosts).values()),
        num_ranks=dist.get_world_size(),
        wrong_ranks=tuple(wrong),
        all_reduce=all_reduce,
        pairs=tuple(sorted(pairs, key=lambda pair: pair.gb_s)),
        networks=tuple(networks[rank][0] for rank in _first_ranks(hosts)) if networks else (),
        seconds=time.monotonic() - began,
    )
    if dist.get_rank() == 0:
        report.write(out)
        logger.info("%s", describe_collectives(report))
    dist.destroy_process_group()  # not after an error above, because peers still wait for this rank
    if wrong:
        raise RuntimeError(f"all-reduce gave wrong sums on ranks {wrong}: look at their memory, links and drivers")
    if error := sockets_despite_adapters([name for _, name in hosts], networks):
        raise RuntimeError(error)


def _make_nccl_report() -> Path:
    """Make NCCL report which network it uses; return the file it writes to. Call this before the first communicator."""
    path = Path(tempfile.gettempdir()) / f"nccl-{os.getpid()}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)}
    return path


def sockets_despite_adapters(hosts: Sequence[str], networks: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a message with its cure if NCCL uses TCP on a host with InfiniBand, otherwise "".

    `hosts` and `networks` are by rank; a network is NCCL's choice ("IB", "Socket") and the host's adapters.
    """
    if os.environ.get("NCCL_IB_DISABLE") == "1":
        return ""
    slow = {host: found[1] for host, found in zip(hosts, networks, strict=False) if found[0] == "Socket" and found[1]}
    if not slow:
        return ""
    listed = ", ".join(f"{host} ({', '.join(adapters)})" for host, adapters in slow.items())
    return (
        f"NCCL used TCP on hosts that have InfiniBand adapters: {listed}. That is 5 to 30 times slower: see that "
        "launch.devices has /dev/infiniband and that launch.nccl's NCCL_IB_HCA, if it is set, names an adapter that is "
        "there; NCCL_IB_DISABLE=1 in launch.nccl says that TCP is meant"
    )


def _device() -> torch.device:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _ranks_with_wrong_sums(device: torch.device) -> list[int]:
    """Sum 1 MiB of integers whose sum every rank knows; return the ranks with a wrong result."""
    size = dist.get_world_size()
    index = torch.arange(2**18, device=device)
    summed = ((index + dist.get_rank()) % EXACT_BELOW).float()
    dist.all_reduce(summed)
    expected = sum(((index + rank) % EXACT_BELOW).float() for rank in range(size))
    return [rank for rank, right in enumerate(_gathered(torch.equal(summed, torch.as_tensor(expected)))) if not right]


def _all_reduce_rates(device: torch.device) -> Iterator[Bandwidth]:
    size = dist.get_world_size()
    for num_bytes in GPU_SIZES if device.type == "cuda" else SIZES:
        tensor = torch.zeros(num_bytes // 4, device=device)

        def run(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)

        run()  # the first one also opens the connections
        repeats = _repeats(_slowest_rank(_seconds(run, repeats=1, device=device)))
        seconds = _slowest_rank(_seconds(run, repeats=repeats, device=device))
        rate = num_bytes / seconds / 1e9
        yield Bandwidth(num_bytes=num_bytes, seconds=seconds, algbw_gb_s=rate, busbw_gb_s=rate * 2 * (size - 1) / size)
        if seconds > SLOW_S:
            return


def _pair_rates(names: list[str], *, first_ranks: list[int], device: torch.device) -> list[PairBandwidth]:
    """Measure every two hosts once. In each round a host is in one pair at most: n hosts take n - 1 rounds."""
    own: list[PairBandwidth] = []
    rank = dist.get_rank()
    for pairs in _rounds(first_ranks):
        for pair in pairs:
            if rank in pair:
                seconds = _exchange_seconds(pair[1] if rank == pair[0] else pair[0], device=device)
                if rank == pair[0]:
                    smallest, largest = seconds[0], seconds[-1]
                    rate = largest[0] / largest[1] / 1e9
                    hosts = (names[pair[0]], names[pair[1]])
                    own.append(PairBandwidth(hosts=hosts, gb_s=rate, latency_s=smallest[1]))
        _slowest_rank(0.0)  # a round begins when all pairs of the previous round have finished
    return list(itertools.chain.from_iterable(_gathered(own)))


def _rounds(members: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Return a round-robin tournament: one place stays, the others rotate; with an odd number one rests."""
    places: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places), strict=False)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]


def _exchange_seconds(peer: int, *, device: torch.device) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of sending and receiving at once, as nccl-tests' sendrecv; the peer does the same."""
    measured = []
    for num_bytes in GPU_SIZES if device.type == "cuda" else SIZES:
        sent, received = torch.zeros(num_bytes // 4, device=device), torch.zeros(num_bytes // 4, device=device)

        def run(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            exchange = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()

        run()
        repeats = _repeats(_slower_of_pair(peer, _seconds(run, repeats=1, device=device), device=device))
        seconds = _slower_of_pair(peer, _seconds(run, repeats=repeats, device=device), device=device)
        measured.append((num_bytes, seconds))
        if seconds > SLOW_S:
            break
    return measured


def _seconds(run: Callable[[], None], *, repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def _repeats(seconds: float) -> int:
    return min(MAX_REPEATS, max(1, int(SECONDS_A_SIZE / seconds)))


def _slowest_rank(seconds: float) -> float:
    """Return the seconds of the slowest rank. Collective."""
    agreed = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return float(agreed)


def _slower_of_pair(peer: int, seconds: float, *, device: torch.device) -> float:
    """Return the seconds of the slower one of the two."""
    own, other = torch.full((1,), seconds, dtype=torch.float64, device=device), torch.zeros(1, dtype=torch.float64)
    other = other.to(device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]):
        work.wait()
    return max(seconds, float(other))


def _gathered(own: T) -> list[T]:
    everyone: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone  # type: ignore[return-value]


def _first_ranks(hosts: list[tuple[int, str]]) -> list[int]:
    nodes = [node for node, _ in hosts]
    return [nodes.index(node) for node in dict.fromkeys(nodes)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
