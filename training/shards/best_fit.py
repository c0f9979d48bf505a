"""Best-fit decreasing: packs items into as few bins of one capacity as that rule finds (Ding et al. 2024, algorithm 1).

The longest item comes first, and each goes into the bin with the least room that still takes it. Items of one length
are alike, and so are bins with equal room, so that whole runs of items are placed at once: the time grows with the
number of lengths, not of items (10 million documents in sequences of 8,192 tokens: 0.05 to 0.2 s).
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """The next `bins` x `each` items, from the longest on: `each` of them go into each of the bins from `first` on."""

    first: int
    bins: int
    each: int


def best_fit_decreasing(counts: np.ndarray, capacity: int) -> tuple[list[Run], int]:
    """Return how the items fill bins, in order of falling length, and the number of bins.

    `counts`: the number of items of each length, int64 [at most capacity + 1]; those of length 0 take no place.
    """
    runs: list[Run] = []
    num_bins = 0
    with_room: dict[int, list[tuple[int, int]]] = {}  # room -> ranges of bins: the first one, and their number
    rooms: list[int] = []  # its keys, rising

    def keep(room: int, first: int, number: int) -> None:
        if number and room:
            if room not in with_room:
                with_room[room] = []
                bisect.insort(rooms, room)
            with_room[room].append((first, number))

    for length in (1 + np.flatnonzero(counts[1:])[::-1]).tolist():
        left = int(counts[length])
        while left:
            at = bisect.bisect_left(rooms, length)
            if at == len(rooms):
                room, first, number = capacity, num_bins, -(-left // (capacity // length))
                num_bins += number
            else:
                room = rooms[at]
                first, number = with_room[room].pop()
                if not with_room[room]:
                    del with_room[room], rooms[at]
            each = min(room // length, left)  # a bin that takes one more has the least room again
            taken = min(number, left // each)
            runs.append(Run(first, taken, each))
            keep(room - each * length, first, taken)
            keep(room, first + taken, number - taken)
            left -= taken * each
    return runs, num_bins
