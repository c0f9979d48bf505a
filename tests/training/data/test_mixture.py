"""Batches of several sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.mixture_shards import TOKENS, plan_of, sources_in, write_mixture
from tests.support.numbered_corpus import CONTEXT, CPU, PACKINGS, global_batch
from training.data.batch import IGNORED, MicroBatches
from training.data.held_out import held_out_by_source
from training.data.loader import Loader
from training.records.plan import RunPlan
from training.shards.packing import BY_DOCUMENT


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


def targets_of(plan: RunPlan) -> Iterator[torch.Tensor]:
    """The targets of each step's global batch, [sequences, context]."""
    loader = Loader(plan, dp_rank=0, device=CPU)
    for step in range(plan.steps):
        yield torch.cat([batch.targets for batch in loader.share(step).batches])


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_source_has_its_share_of_the_tokens_and_no_sequence_has_two(packing: str, shards: Path) -> None:
    plan = plan_of(shards, train__packing=packing, train__steps=200)
    tokens, sequences = np.zeros(3), []
    for targets in targets_of(plan):
        own = sources_in(targets)
        sequences += own
        np.add.at(tokens, own, (targets != IGNORED).sum(1).numpy())
    assert np.abs(tokens / tokens.sum() - np.array([5, 2, 1]) / 8).max() < 0.01
    assert np.bincount(sequences).tolist() == [round(s.epochs * s.sequences) for s in plan.sources]


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_batches_are_the_same_on_any_number_of_ranks_and_from_any_step(packing: str, shards: Path) -> None:
    phases = ({"from_step": 20, "weights": {"c": 1, "b": 1}}, {"from_step": 40, "weights": {"a": 1}})
    one, three = (plan_of(shards, ranks=ranks, data__phases=phases, train__packing=packing) for ranks in (1, 3))
    for step in (0, 19, 20, 21, 39, 40, 59):
        assert torch.equal(global_batch(one, step)[0], global_batch(three, step)[0])


def test_a_phase_changes_the_shares_from_its_step_on(shards: Path) -> None:
    plan = plan_of(shards, data__phases=({"from_share": 0.5, "weights": {"b": 3, "c": 1}},))
    per_step = [np.bincount(sources_in(targets), minlength=3) for targets in targets_of(plan)]
    assert sum(per_step[30:]).tolist() == [0, 270, 90]
    assert np.abs(sum(per_step[:30]) - 360 * np.array([5, 2, 1]) / 8).max() <= 1


def test_no_rank_has_always_the_same_source(shards: Path) -> None:
    """Groups of local SGD train apart: each must meet all sources."""
    plan = plan_of(shards, (1, 1, 2), ranks=4, train__global_batch=4, train__micro_batch=1)
    for rank in range(4):
        loader = Loader(plan, dp_rank=rank, device=CPU)
        met = [sources_in(loader.share(step).batches[0].targets)[0] for step in range(60)]
        assert set(met) == {0, 1, 2}


def test_each_epoch_of_a_source_has_every_sequence_once_in_another_order(shards: Path) -> None:
    plan = plan_of(shards, (1, 3, 1))
    starts = [int(row[0]) for targets in targets_of(plan) for row in targets if sources_in(row[None]) == [1]]
    source = plan.sources[1]
    assert source.epochs > 3
    assert {starts.count(start) for start in starts} <= {int(source.epochs), int(source.epochs) + 1}
    assert len(set(starts)) == source.sequences
    assert starts[: source.sequences - 12] != starts[source.sequences : 2 * source.sequences - 12]


def test_epochs_are_seen_so_often(shards: Path) -> None:
    sources = [{"path": "a", "epochs": 2.5}, {"path": "b"}, {"path": "c", "epochs": 0.5}]
    plan = plan_of(shards, data__sources=sources, train__steps=1000, train__max_epochs=1)
    counts = np.bincount(list(every_source(plan)), minlength=3)
    expected = [times * source.sequences for times, source in zip((2.5, 1, 0.5), plan.sources, strict=True)]
    assert np.abs(counts - expected).max() <= 2
    assert counts.sum() == plan.sequences


def every_source(plan: RunPlan) -> Iterator[int]:
    for targets in targets_of(plan):
        yield from sources_in(targets[(targets != IGNORED).any(1)])


def test_tokens_seen_are_those_of_the_batches(shards: Path) -> None:
    plan = plan_of(shards)
    loader = Loader(plan, dp_rank=0, device=CPU)
    seen = itertools.chain.from_iterable(map(sources_in, itertools.islice(targets_of(plan), 17)))
    counts = np.bincount(list(seen), minlength=3)
    assert list(loader.text_figures(17).values()) == (counts * CONTEXT).tolist()
    assert list(loader.text_figures(17)) == ["tokens_seen/a", "tokens_seen/b", "tokens_seen/c"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_held_out_text_is_validated_source_by_source(packing: str, shards: Path) -> None:
    plan = plan_of(shards, train__packing=packing)
    seen = [0, 0, 0]
    for source, batch in held_out_by_source(plan, rank=0, world_size=1, device=CPU):
        own = batch.targets[(batch.targets != IGNORED).any(1)]
        assert set(sources_in(own)) <= {source}
        seen[source] += int((batch.targets != IGNORED).sum())
    assert seen == [size // 4 - (packing not in BY_DOCUMENT) for size in TOKENS]


def test_a_limited_validation_has_text_of_each_source(shards: Path) -> None:
    plan = plan_of(shards)
    batches = held_out_by_source(plan, rank=0, world_size=1, device=CPU, limit=4)
    assert {source for source, _ in batches} == {0, 1, 2}


def test_sizes_that_change_leave_the_mixture_unchanged(shards: Path) -> None:
    plan = plan_of(shards, ranks=3)
    sizes = MicroBatches.of(plan)
    before = [Loader(plan, dp_rank=rank, device=CPU, micro_batches=sizes).spans(7) for rank in range(3)]
    sizes.sizes = (2, 8, 2) if sum(sizes.sizes) == 12 else sizes.sizes
    after = [Loader(plan, dp_rank=rank, device=CPU, micro_batches=sizes).spans(7) for rank in range(3)]
    assert np.array_equal(np.concatenate(before), np.concatenate(after))
