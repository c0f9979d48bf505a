"""BERT's objective: how many tokens are hidden, how, and never twice in the same way."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.tiny_shards import MASK, VOCAB, MakeRun
from training.data.batch import IGNORED
from training.data.loader import Loader
from training.data.masking import mask_tokens
from training.records.plan import RunPlan

BERT = {"model__architecture": "bert", "model__kv_heads": 0}


def test_masking_is_fixed_by_its_key_and_hides_what_it_asks_for(make_run: MakeRun) -> None:
    plan = RunPlan.read(make_run("masked", **BERT))
    tokens = np.arange(2, 2 + 45, dtype=np.int64)
    inputs, targets = mask_tokens(plan, tokens, key=(1, 2))
    again, _ = mask_tokens(plan, tokens, key=(1, 2))
    chosen = targets != IGNORED
    assert np.array_equal(inputs, again)
    assert chosen.sum() == round(45 * 0.15) == 7
    assert np.array_equal(targets[chosen], tokens[chosen])
    assert np.array_equal(inputs[~chosen], tokens[~chosen])


def test_each_sequence_is_masked_in_its_own_way_and_in_another_the_second_time(make_run: MakeRun) -> None:
    plan = RunPlan.read(make_run("ways", train__max_epochs=2, train__steps=1000, train__mask_fraction=0.4, **BERT))
    loader = Loader(plan, dp_rank=0, device=torch.device("cpu"))
    targets = torch.cat([batch.targets for step in range(plan.steps) for batch in loader.share(step).batches])
    ways = torch.unique((targets != IGNORED)[: plan.sequences], dim=0)  # 6 of 16 places: 8008 ways
    assert len(ways) > 0.9 * plan.sequences
    assert len(torch.unique(targets[: plan.sequences], dim=0)) == plan.sequences


def test_four_in_five_masked_positions_show_the_mask(make_run: MakeRun) -> None:
    plan = RunPlan.read(make_run("masked", **BERT))
    tokens = np.full(16, 5, dtype=np.int64)
    shown = [mask_tokens(plan, tokens, key=(key,)) for key in range(4000)]
    hidden = np.concatenate([inputs[targets != IGNORED] for inputs, targets in shown])
    assert abs((hidden == MASK).mean() - 0.8) < 0.02
    assert abs((hidden == 5).mean() - (0.1 + 0.1 / VOCAB)) < 0.02
