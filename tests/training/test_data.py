"""The order of the data: a permutation per epoch, the same for any number of ranks and any micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import MASK, VOCAB
from training.data import Loader, held_out, mask_tokens, shuffled
from training.model import IGNORED
from training.records import RunPlan

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 1000, 65_537])
def test_shuffled_is_a_permutation(length: int) -> None:
    order = shuffled(np.arange(length), length=length, key=(7, 0))
    assert np.array_equal(np.sort(order), np.arange(length))


def test_shuffled_differs_by_seed_and_epoch_and_is_no_identity() -> None:
    orders = [shuffled(np.arange(1000), length=1000, key=key) for key in ((1, 0), (1, 1), (2, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert (orders[0] != orders[1]).mean() > 0.98
    assert (orders[0] != orders[2]).mean() > 0.98


def global_batch(plan_path: Path, step: int) -> torch.Tensor:
    plan = RunPlan.read(plan_path)
    ranks = [Loader(plan, rank=rank, device=CPU).batches(step) for rank in range(plan.world_size)]
    return torch.cat([inputs for batches in ranks for inputs, _ in batches])


def test_the_global_batch_depends_neither_on_ranks_nor_on_micro_batch(make_run: Callable[..., Path]) -> None:
    alone = make_run("one-rank", train__micro_batch=8)
    split = make_run("four-ranks", ranks=4, train__micro_batch=1)
    for step in (0, 5, 40):
        assert torch.equal(global_batch(alone, step), global_batch(split, step))


def test_no_sequence_comes_twice_in_an_epoch(make_run: Callable[..., Path]) -> None:
    plan_path = make_run("epoch")
    plan = RunPlan.read(plan_path)
    windows = Loader(plan, rank=0, device=CPU).windows
    steps = len(windows) // plan.config.train.global_batch
    seen = torch.cat([global_batch(plan_path, step) for step in range(steps)])
    assert len(torch.unique(seen, dim=0)) == len(seen) == steps * plan.config.train.global_batch


def test_targets_are_the_next_tokens(make_run: Callable[..., Path]) -> None:
    loader = Loader(RunPlan.read(make_run("targets")), rank=0, device=CPU)
    inputs, targets = loader.batches(3)[0]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_held_out_predicts_every_token_once_whatever_the_ranks(ranks: int, make_run: Callable[..., Path]) -> None:
    plan = RunPlan.read(make_run(f"held-out-{ranks}"))
    dealt = [list(held_out(plan, rank=rank, world_size=ranks, device=CPU)) for rank in range(ranks)]
    assert len({len(batches) for batches in dealt}) == 1, "every rank has as many forward passes"
    predicted = sum(int((targets != IGNORED).sum()) for batches in dealt for _, targets in batches)
    assert predicted == 451 - 1


def test_masking_is_fixed_by_its_key_and_hides_what_it_asks_for(make_run: Callable[..., Path]) -> None:
    plan = RunPlan.read(make_run("masked", model__architecture="bert", model__kv_heads=0))
    tokens = np.arange(2, 2 + 40, dtype=np.int64)
    inputs, targets = mask_tokens(plan, tokens, key=(1, 2))
    again, _ = mask_tokens(plan, tokens, key=(1, 2))
    chosen = targets != IGNORED
    assert np.array_equal(inputs, again)
    assert chosen.sum() == round(plan.config.train.context * plan.config.train.mask_fraction)
    assert np.array_equal(targets[chosen], tokens[chosen])
    assert np.array_equal(inputs[~chosen], tokens[~chosen])


def test_four_in_five_masked_positions_show_the_mask(make_run: Callable[..., Path]) -> None:
    plan = RunPlan.read(make_run("shares", model__architecture="bert", model__kv_heads=0))
    tokens = np.full(16, 5, dtype=np.int64)
    shown = [mask_tokens(plan, tokens, key=(key,)) for key in range(4000)]
    hidden = np.concatenate([inputs[targets != IGNORED] for inputs, targets in shown])
    assert abs((hidden == MASK).mean() - 0.8) < 0.02
    assert abs((hidden == 5).mean() - (0.1 + 0.1 / VOCAB)) < 0.02
