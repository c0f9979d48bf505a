"""Shares of unlike devices: the step is as short as whole sequences and memory allow, and follows what is measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from training.facts.shares import largest_that_fits, rebalanced, split_by_speed


def step_time(micro_batches: Sequence[int], speeds: Sequence[float]) -> float:
    return max(size / speed for size, speed in zip(micro_batches, speeds, strict=True))


def every_way(num_sequences: int, most: list[int]) -> list[tuple[int, ...]]:
    return [way for way in itertools.product(*(range(1, limit + 1) for limit in most)) if sum(way) == num_sequences]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_way_to_deal_is_faster(seed: int) -> None:
    chance = random.Random(seed)
    replicas = chance.randint(1, 4)
    speeds = [chance.choice([0.1, 0.5, 1, 1, 2, 3.7]) for _ in range(replicas)]
    most = [chance.randint(1, 9) for _ in range(replicas)]
    num_sequences = chance.randint(replicas, sum(most))
    dealt = split_by_speed(num_sequences, speeds=speeds, max_micro_batches=most)
    assert dealt in every_way(num_sequences, most)
    best = min(step_time(way, speeds) for way in every_way(num_sequences, most))
    assert step_time(dealt, speeds) == pytest.approx(best)


def test_a_million_sequences_are_dealt_in_proportion() -> None:
    dealt = split_by_speed(1_000_000, speeds=[3.0] * 100 + [1.0] * 100, max_micro_batches=[10**6] * 200)
    assert dealt == (7500,) * 100 + (2500,) * 100


@pytest.mark.parametrize(("num_sequences", "why"), [(1, "1 sequences cannot"), (13, "13 sequences cannot")])
def test_what_cannot_be_dealt_is_refused(num_sequences: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split_by_speed(num_sequences, speeds=[1.0, 2.0], max_micro_batches=[4, 8])


@pytest.mark.parametrize("largest", [0, 1, 7, 64])
def test_the_largest_that_fits_is_found(largest: int) -> None:
    assert largest_that_fits(lambda size: size <= largest, 64) == largest


def test_shares_follow_what_is_measured_until_all_take_the_same_time() -> None:
    """Three replicas, one of which became four times as slow, and a part of each step that does not shrink."""
    sizes, seconds = (20, 20, 20), [0.0]
    for _ in range(8):
        seconds = [0.1 + 0.01 * sizes[0], 0.1 + 0.01 * sizes[1], 0.1 + 0.04 * sizes[2]]
        sizes, gain = rebalanced(sizes, seconds=seconds, max_micro_batches=(32, 25, 60))
        assert sum(sizes) == 60
    assert gain < 1.05
    assert max(seconds) < 1.1 * min(seconds)


def test_shares_go_half_way_and_within_memory() -> None:
    sizes, gain = rebalanced((8, 8), seconds=[1.0, 3.0], max_micro_batches=(10, 16))
    assert sizes == (9, 7)  # wanted: 10 and 6, where 12 and 4 would be in proportion
    assert gain == pytest.approx(3.0 / (6 * 3 / 8))


def test_one_sequence_is_moved_whole() -> None:
    assert rebalanced((2, 2), seconds=[1.0, 2.5], max_micro_batches=(4, 4))[0] == (3, 1)
