"""Chooses the source of each sequence of a run, by the sequence's place in the run alone.

A run's sequences are numbered from 0 in the order in which they are seen. A source with share s has floor(n * s) of the
first n sequences, so that at each step it differs from its share by at most a few sequences, on any ranks, and a
resumed run finds its place by arithmetic. Of several sources the first takes its places, the second takes its share of
the places that the first left, and so on. It uses only numpy: the planner counts with it, the loader draws with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.config.train import Batches
from training.records.plan import MixturePhase

ONE_BITS = 31  # a share is a whole number of 2**-31, so that counts are exact up to 2**62 sequences
ONE = 2**ONE_BITS


@dataclass(frozen=True)
class _Phase:
    first: int  # sequence
    before: np.ndarray  # int64 [sources]: how many sequences of each came before
    shares: tuple[int, ...]  # share of the places that earlier sources left, in units of 2**-31


class Mixture:
    """The sources of a run's sequences, by phase."""

    def __init__(self, phases: Sequence[MixturePhase], batches: Batches) -> None:
        """`phases` as in the plan: the first begins at step 0, and each has a share for every source."""
        assert phases[0].first_step == 0
        self.num_sources = len(phases[0].shares)
        self._phases: list[_Phase] = []
        for phase in phases:
            first = batches.sequences_before(phase.first_step)
            before = self.counts(first) if self._phases else np.zeros(self.num_sources, np.int64)
            self._phases.append(_Phase(first, before, _of_the_rest(phase.shares)))

    def counts(self, num_sequences: int) -> np.ndarray:
        """Return int64 [sources]: how many of the first `num_sequences` are of each source."""
        phase = next(phase for phase in reversed(self._phases) if phase.first <= num_sequences)
        left, counts = num_sequences - phase.first, phase.before.copy()
        for source, share in enumerate(phase.shares):
            taken = _taken(left, share)
            counts[source] += taken
            left -= taken
        return counts

    def draw(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for int64 [n] sequences, the source of each, and its number among all sequences of that source."""
        sources, places = np.empty_like(numbers), np.empty_like(numbers)
        starts = [phase.first for phase in self._phases] + [np.iinfo(np.int64).max]
        for phase, (start, stop) in zip(self._phases, itertools.pairwise(starts), strict=True):
            here = np.flatnonzero((start <= numbers) & (numbers < stop))
            left = numbers[here] - start
            for source, share in enumerate(phase.shares):
                taken = _taken(left, share)
                own = _taken(left + 1, share) > taken
                sources[here[own]], places[here[own]] = source, phase.before[source] + taken[own]
                here, left = here[~own], (left - taken)[~own]
            assert not here.size
        return sources, places


def _of_the_rest(shares: Sequence[float]) -> tuple[int, ...]:
    """Return each source's share of the places that earlier ones leave; the last one with a share takes the rest."""
    found, rest = [], 1.0
    last = max(number for number, share in enumerate(shares) if share)
    for number, share in enumerate(shares):
        found.append(ONE if number >= last else min(ONE, round(share / rest * ONE)) if share else 0)
        rest = max(rest - share, 1e-12)
    return tuple(found)


def _taken(numbers: Any, share: int) -> Any:
    """Return floor(numbers * share / 2**31), without overflow; `numbers` is an int or int64 of any shape."""
    high, low = numbers >> ONE_BITS, numbers & (ONE - 1)
    return high * share + ((low * share) >> ONE_BITS)
