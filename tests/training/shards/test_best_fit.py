"""Best-fit packing: bins as the rule fills them one item after the other, and documents that are never cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from training.shards.best_fit import best_fit_decreasing
from training.shards.packing import Packs, Pieces, Rows, positions_within


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """The room that is left in each bin, by the rule as it is written down."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(60))
def test_whole_runs_of_items_fill_the_bins_that_items_one_by_one_fill(seed: int) -> None:
    draw = np.random.default_rng(seed)
    capacity = int(draw.integers(1, 40))
    lengths = np.sort(draw.integers(1, capacity + 1, draw.integers(0, 80)))[::-1]
    runs, num_bins = best_fit_decreasing(np.bincount(lengths, minlength=capacity + 1), capacity)
    rooms, item = np.full(num_bins, capacity), 0
    for run in runs:
        for number in range(run.first, run.first + run.bins):
            rooms[number] -= lengths[item : item + run.each].sum()
            item += run.each
    assert item == len(lengths)
    assert sorted(rooms.tolist()) == one_by_one(lengths.tolist(), capacity)


@pytest.mark.parametrize("seed", range(40))
def test_documents_that_fit_are_never_cut_and_every_token_is_there_once(seed: int) -> None:
    draw = np.random.default_rng(seed)
    context, longest = int(draw.integers(1, 50)), int(draw.integers(1, 120))
    bounds = 1000 + np.concatenate([[0], draw.integers(1, longest + 1, draw.integers(1, 200)).cumsum()])
    packs = Packs(bounds, context=context)
    rows = packs.rows(np.arange(len(packs)))
    assert rows.lengths.max() <= context
    assert rows.lengths.min() > 0
    tokens = np.concatenate([np.arange(first, stop) for _, first, stop in rows.spans])
    assert np.array_equal(np.sort(tokens), np.arange(bounds[0], bounds[-1]))
    whole = {(first, stop) for _, first, stop in rows.spans.tolist()}
    for start, stop in itertools.pairwise(bounds.tolist()):
        cuts = [*range(start, stop, context), stop]
        assert {*itertools.pairwise(cuts)} <= whole, "whole, or whole contexts and the rest"
    begins = set(bounds.tolist())
    assert all(begin == first - (first not in begins) for begin, first, _ in rows.spans.tolist())
    epoch = packs.epoch()
    assert epoch == (len(packs), bounds[-1] - bounds[0], len(bounds) - 1, (np.diff(bounds) > context).sum())
    assert len(packs) <= len(Pieces(bounds, context=context))


def test_any_sequences_are_found_in_any_order() -> None:
    bounds = np.concatenate([[0], np.random.default_rng(0).integers(1, 60, 300).cumsum()])
    packs = Packs(bounds, context=16)
    every, some = packs.rows(np.arange(len(packs))), np.random.default_rng(1).permutation(len(packs))[:50]
    found = packs.rows(some)
    for place, number in enumerate(some):
        assert np.array_equal(found[place : place + 1].spans, every[number : number + 1].spans)
    assert len(packs.rows(some[:0])) == 0


def test_rows_say_where_each_token_is_from_and_which_belong_together() -> None:
    two = Rows(np.array([[4, 5, 7], [20, 20, 21]]), np.array([0, 2]))
    rows = Rows.placed([(np.array([2]), two), (np.array([0]), Rows.of_one_span(np.array([[8, 9, 12]])))], num=4)
    assert rows.lengths.tolist() == [3, 0, 3, 0]
    assert rows.places(4).tolist() == [[9, 10, 11, 0], [0] * 4, [5, 6, 20, 0], [0] * 4]
    assert rows.numbers(4).tolist() == [[0, 0, 0, -1], [-1] * 4, [0, 0, 1, -1], [-1] * 4]
    assert positions_within(rows.numbers(4))[2].tolist() == [0, 1, 0, 0]
    assert rows[1:3].lengths.tolist() == [0, 3]


def test_a_million_documents_of_many_lengths_leave_next_to_no_padding() -> None:
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(6, 1.1, 1_000_000)).astype(np.int64) + 1, 10**6)
    packs = Packs(np.concatenate([[0], lengths.cumsum()]), context=8192)
    rows = packs.rows(np.arange(len(packs)))
    assert rows.lengths.sum() == lengths.sum()
    assert rows.lengths.sum() > 0.9999 * len(packs) * 8192
