"""Shares of unlike devices: the step is as short as whole sequences and memory allow, and follows what is measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from training.planner.shares import Replica, Shares, choose_shares, largest_that_fits, rebalanced, split_by_speed


def step_time(micro_batches: Sequence[int], speeds: Sequence[float]) -> float:
    return max(size / speed for size, speed in zip(micro_batches, speeds, strict=True))


def chosen(replicas: list[Replica], *, global_batch: int, equal: Shares, **options: Any) -> tuple[Shares, float]:
    """Where a step takes what its sequences take."""
    speeds = [replica.speed for replica in replicas]

    def step_s(shares: Shares) -> float:
        return shares.accumulation * step_time(shares.micro_batches, speeds)

    return choose_shares(replicas, global_batch=global_batch, equal=equal, step_s=step_s, **options)


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


def equal(size: int, replicas: int, accumulation: int) -> Shares:
    return Shares((size,) * replicas, accumulation)


def test_twice_as_fast_gets_twice_as_much() -> None:
    replicas = [Replica("A100", 312.0, 200), Replica("RTX 3090", 156.0, 40)]
    shares, gain = chosen(replicas, global_batch=96, equal=equal(24, 2, 2))
    assert (shares.micro_batches, shares.accumulation) == ((64, 32), 1)
    assert gain == pytest.approx(1.5)


def test_memory_bounds_a_share_and_more_accumulation_makes_up_for_it() -> None:
    """In one micro-batch the small one could take 16 of its 32, and the large one would set the pace with 40."""
    replicas = [Replica("80 GB", 2.0, 64), Replica("20 GB", 2.0, 16), *[Replica("slow", 1.0, 64)] * 2]
    shares, gain = chosen(replicas, global_batch=96, equal=equal(12, 4, 2))
    assert (shares.micro_batches, shares.accumulation) == ((16, 16, 8, 8), 2)
    assert gain == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("speeds", "dealt"),
    [
        ((0.100, 0.107), (8, 8)),  # the noise of like CPUs
        ((0.100, 0.130), (7, 9)),
    ],
)
def test_devices_that_measure_alike_keep_equal_shares(speeds: tuple[float, float], dealt: tuple[int, ...]) -> None:
    replicas = [Replica("cpu", speed, 16) for speed in speeds]
    assert chosen(replicas, global_batch=16, equal=equal(8, 2, 1))[0].micro_batches == dealt


def test_one_slow_device_among_many_is_worth_its_own_share() -> None:
    replicas = [*[Replica("H100", 700.0, 64)] * 7, Replica("H100", 560.0, 64)]
    shares, gain = chosen(replicas, global_batch=256, equal=equal(32, 8, 1))
    assert shares.micro_batches == (33, 33, 33, 33, 33, 33, 32, 26)
    assert gain == pytest.approx(32 / 560 / (33 / 700))


def test_only_as_many_micro_batches_as_are_possible() -> None:
    replicas = [Replica("fast", 2.0, 8), Replica("slow", 1.0, 8)]
    shares, _ = chosen(replicas, global_batch=24, equal=equal(2, 2, 6), possible=lambda n: n % 4 == 0)
    assert (shares.micro_batches, shares.accumulation) == ((4, 2), 4)


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
