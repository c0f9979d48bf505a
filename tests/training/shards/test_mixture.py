"""Which source each sequence of a run comes from."""

from __future__ import annotations

import numpy as np
import pytest

from training.config.train import Batches, BatchPhase
from training.records.plan import MixturePhase
from training.shards.mixture import ONE, Mixture

SHARES = [(0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.0001, 0.0, 0.9999), (1.0,), (0.0, 1.0, 0.0), (0.5,) + (0.05,) * 10]


def mixture(*phases: tuple[int, tuple[float, ...]], global_batch: int = 1) -> Mixture:
    batches = Batches((BatchPhase(0, global_batch),))
    return Mixture([MixturePhase(first_step=n, shares=shares) for n, shares in phases], batches)


@pytest.mark.parametrize("shares", SHARES)
def test_at_every_moment_each_source_has_its_share_but_for_a_few_sequences(shares: tuple[float, ...]) -> None:
    drawn, _ = mixture((0, shares)).draw(np.arange(20_000))
    counts = np.stack([(drawn == source).cumsum() for source in range(len(shares))], axis=1)
    expected = np.arange(1, 20_001)[:, None] * np.array(shares)
    assert np.abs(counts - expected).max() < len(shares)
    assert not counts[:, np.array(shares) == 0].any()


@pytest.mark.parametrize("shares", SHARES)
def test_a_source_gives_each_of_its_sequences_once_and_in_turn(shares: tuple[float, ...]) -> None:
    drawn, places = mixture((0, shares)).draw(np.arange(5000))
    for source in range(len(shares)):
        own = places[drawn == source]
        assert np.array_equal(own, np.arange(len(own)))


def test_any_sequence_is_found_without_those_before_also_after_a_change_of_shares() -> None:
    mixed = mixture((0, (0.7, 0.2, 0.1)), (30, (0.0, 0.5, 0.5)), (80, (1.0, 0.0, 0.0)), global_batch=10)
    drawn, places = mixed.draw(np.arange(1000))
    order = np.random.default_rng(0).permutation(1000)
    again = mixed.draw(order)
    assert np.array_equal(again[0], drawn[order])
    assert np.array_equal(again[1], places[order])
    for stop in (0, 1, 299, 300, 301, 555, 800, 999):
        assert mixed.counts(stop).tolist() == [int((drawn[:stop] == source).sum()) for source in range(3)]
    for source in range(3):
        assert np.array_equal(places[drawn == source], np.arange((drawn == source).sum()))
    assert np.bincount(drawn[300:800], minlength=3).tolist() == [0, 250, 250]
    assert set(drawn[800:]) == {0}


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    longer = mixture((0, (0.6, 0.4)), (100, (0.1, 0.9)))
    first = mixture((0, (0.6, 0.4))).draw(np.arange(100))
    assert np.array_equal(longer.draw(np.arange(200))[0][:100], first[0])


def test_counts_are_exact_far_into_a_run() -> None:
    mixed, far = mixture((0, (0.3, 0.7))), 2**55 + 12345
    assert mixed.counts(far)[0] == far * round(0.3 * ONE) // ONE
    drawn, places = mixed.draw(np.arange(far, far + 10))
    assert mixed.counts(far + 10).tolist() == (mixed.counts(far) + np.bincount(drawn, minlength=2)).tolist()
    assert places[0] == mixed.counts(far)[drawn[0]]
