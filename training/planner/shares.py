"""A global batch dealt to unlike devices: to each data-parallel replica in proportion to its speed, within its memory.

All replicas make the same number of micro-batches a step, of different sizes: fsdp and ZeRO reduce after each of them,
and a replica that made fewer would leave the others waiting. The update is that of equal shares: strategies divide the
summed loss by the number of targets of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MIN_GAIN = 1.05  # two replicas that differ by 10%; like CPUs measure within that, and shall go on with equal shares
AS_FAST = 1.02  # what the arithmetic cannot tell apart: then as few micro-batches a step as possible
ACCUMULATIONS_TRIED = 16


@dataclass(frozen=True)
class Replica:
    """A data-parallel replica. `speed`: sequences/s that its slowest device computes; `most`: sequences in the largest
    micro-batch that the smallest memory among its devices takes.
    """

    device: str
    speed: float
    most: int


@dataclass(frozen=True)
class Shares:
    """Each replica's micro-batch, `accumulation` times a step."""

    micro_batches: tuple[int, ...]
    accumulation: int

    @property
    def are_equal(self) -> bool:
        return len(set(self.micro_batches)) == 1


def deal(num_sequences: int, *, speeds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Whole micro-batches that add up to `num_sequences`, of which the slowest is done soonest; each at least 1.

    Whoever would finish its next sequence first gets it: found by bisection over the time, so that millions of
    sequences cost no more than a few. Raises ValueError if there are too many sequences for the memory, or too few.
    """
    if not len(speeds) <= num_sequences <= sum(most):
        raise ValueError(
            f"{num_sequences} sequences cannot be dealt to {len(speeds)} replicas that take 1 to {list(most)}: "
            "change train.global_batch or train.micro_batch"
        )

    def done_by(time: float) -> list[int]:
        return [max(1, min(limit, math.floor(time * speed))) for speed, limit in zip(speeds, most, strict=True)]

    low, high = 0.0, num_sequences / min(speeds)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(done_by(middle)) <= num_sequences else (low, middle)
    dealt = done_by(low)
    open_to_more = [i for i, limit in enumerate(most) if dealt[i] < limit]
    open_to_more.sort(key=lambda i: (dealt[i] + 1) / speeds[i])
    for i in open_to_more[: num_sequences - sum(dealt)]:  # those that tie
        dealt[i] += 1
    assert sum(dealt) == num_sequences
    return tuple(dealt)


def choose_shares(
    replicas: Sequence[Replica],
    *,
    global_batch: int,
    equal: Shares,
    step_s: Callable[[Shares], float],
    possible: Callable[[int], bool] = lambda _: True,
) -> tuple[Shares, float]:
    """`equal`, or shares in proportion to speed where a step takes that much less time; and how many times as long it
    takes with equal ones.

    `possible`: whether a step may have so many micro-batches; a pipeline wants at least its stages.
    """
    speeds, most = [replica.speed for replica in replicas], [replica.most for replica in replicas]
    tried = []
    for accumulation in _accumulations(replicas, global_batch, possible):
        shares = Shares(deal(global_batch // accumulation, speeds=speeds, most=most), accumulation)
        tried.append((step_s(shares), shares))
    if not tried:
        return equal, 1.0
    soonest = min(seconds for seconds, _ in tried)
    seconds, shares = next(one for one in tried if one[0] <= AS_FAST * soonest)
    gain = step_s(equal) / seconds
    return (shares, gain) if gain >= MIN_GAIN and not shares.are_equal else (equal, 1.0)


def _accumulations(replicas: Sequence[Replica], global_batch: int, possible: Callable[[int], bool]) -> Iterable[int]:
    """Fewest micro-batches first; beyond the first few that fit, steps only get longer."""
    smallest, largest = len(replicas), sum(replica.most for replica in replicas)
    fitting = (
        n
        for n in range(1, global_batch // smallest + 1)
        if global_batch % n == 0 and global_batch // n <= largest and possible(n)
    )
    return [n for n, _ in zip(fitting, range(ACCUMULATIONS_TRIED), strict=False)]


def largest_that_fits(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest micro-batch up to `at_most` that fits; 0: not even 1. Memory grows with the micro-batch."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def followed(
    micro_batches: Sequence[int], *, seconds: Sequence[float], most: Sequence[int]
) -> tuple[tuple[int, ...], float]:
    """Half way from these micro-batches to those that the replicas' measured seconds ask for; and how many times as
    long a step takes now as it would there.

    Half way, since one measurement is not the whole truth: part of the seconds does not depend on the micro-batch.
    Whatever that part is, the shares settle where all replicas take the same time.
    """
    speeds = [size / time for size, time in zip(micro_batches, seconds, strict=True)]
    wanted = deal(sum(micro_batches), speeds=speeds, most=most)
    gain = max(seconds) / max(size / speed for size, speed in zip(wanted, speeds, strict=True))
    half = [(size + goal) / 2 for size, goal in zip(micro_batches, wanted, strict=True)]
    nearer = deal(sum(micro_batches), speeds=half, most=most)
    return (wanted if nearer == tuple(micro_batches) else nearer), gain
