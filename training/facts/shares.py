"""Splits the global batch over unlike devices: each data-parallel replica's share follows its speed, within its memory.

All replicas make the same number of micro-batches per step, of different sizes: fsdp and ZeRO reduce after each
micro-batch, and the others would wait for a replica that made fewer. The update is the same as with equal shares,
because strategies divide the summed loss by the number of targets of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MIN_GAIN = 1.05  # of moved shares: less is within what steps of equal devices differ by


def split_by_speed(num_sequences: int, *, speeds: Sequence[float], max_micro_batches: Sequence[int]) -> tuple[int, ...]:
    """Return the micro-batches that add up to `num_sequences` and finish first; each is at least 1.

    Each sequence goes to the replica that would finish it first. Bisection over the time finds this split, so that
    millions of sequences take no longer than a few. Raises ValueError if there are more sequences than fit in memory,
    or fewer than replicas.
    """
    if not len(speeds) <= num_sequences <= sum(max_micro_batches):
        raise ValueError(
            f"{num_sequences} sequences cannot be split over {len(speeds)} replicas that hold 1 to "
            f"{list(max_micro_batches)}: change train.global_batch or train.micro_batch"
        )

    def done_by(time: float) -> list[int]:
        return [
            max(1, min(limit, math.floor(time * speed))) for speed, limit in zip(speeds, max_micro_batches, strict=True)
        ]

    low, high = 0.0, num_sequences / min(speeds)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(done_by(middle)) <= num_sequences else (low, middle)
    sizes = done_by(low)
    open_to_more = [i for i, limit in enumerate(max_micro_batches) if sizes[i] < limit]
    open_to_more.sort(key=lambda i: (sizes[i] + 1) / speeds[i])
    for i in open_to_more[: num_sequences - sum(sizes)]:  # ties
        sizes[i] += 1
    assert sum(sizes) == num_sequences
    return tuple(sizes)


def largest_that_fits(fits: Callable[[int], bool], at_most: int) -> int:
    """Return the largest micro-batch up to `at_most` that fits; 0: not even 1. Memory grows with the micro-batch."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def rebalanced(
    micro_batches: Sequence[int], *, seconds: Sequence[float], max_micro_batches: Sequence[int]
) -> tuple[tuple[int, ...], float]:
    """Return micro-batches half way to the best ones by the measured seconds, and how many times as long a step takes
    now as with the best ones.

    It goes half way, because a part of the seconds does not depend on the micro-batch. With any such part, the shares
    converge to equal times of all replicas.
    """
    speeds = [size / time for size, time in zip(micro_batches, seconds, strict=True)]
    wanted = split_by_speed(sum(micro_batches), speeds=speeds, max_micro_batches=max_micro_batches)
    gain = max(seconds) / max(size / speed for size, speed in zip(wanted, speeds, strict=True))
    half = [(size + goal) / 2 for size, goal in zip(micro_batches, wanted, strict=True)]
    nearer = split_by_speed(sum(micro_batches), speeds=half, max_micro_batches=max_micro_batches)
    return (wanted if nearer == tuple(micro_batches) else nearer), gain
