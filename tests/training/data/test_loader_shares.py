"""The data in shares: equal and unequal ones, shares that change, held-out text, and the thread that prepares them."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.numbered_corpus import (
    BERT,
    CONTEXT,
    CPU,
    FIRST,
    NUM_TOKENS,
    PACKINGS,
    global_batch,
    one_pass,
    plan_of,
    rows,
    write_numbered,
)
from training.data.batch import IGNORED, MicroBatches
from training.data.held_out import held_out
from training.data.loader import Loader, documents_in
from training.shards.stream import TokenStream


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("numbered"))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("model", [{}, BERT], ids=["llama", "bert"])
def test_unequal_shares_cut_the_same_global_batch(packing: str, model: dict[str, Any], shards: Path) -> None:
    common = {"train__packing": packing, "train__global_batch": 12, "train__micro_batch": 1} | model
    plan = plan_of(shards, ranks=3, **common)
    unequal = plan.model_copy(update={"micro_batches": (3, 2, 1), "accumulation": 2})
    for step in (0, 3):
        expected, num_targets = global_batch(plan, step)
        found, found_targets = global_batch(unequal, step)
        assert torch.equal(found, expected)
        assert found_targets == num_targets
    sizes = [[len(b.inputs) for b in Loader(unequal, dp_rank=rank, device=CPU).share(0).batches] for rank in range(3)]
    assert sizes == [[3, 3], [2, 2], [1, 1]]


@pytest.mark.parametrize("ahead", [0, 2])
def test_micro_batches_that_change_between_steps_leave_the_data_order_unchanged(ahead: int, shards: Path) -> None:
    plan = plan_of(shards, ranks=3, train__global_batch=12, train__micro_batch=2, train__steps=6)
    micro_batches = MicroBatches.of(plan)
    loaders = [Loader(plan, dp_rank=rank, device=CPU, micro_batches=micro_batches, ahead=ahead) for rank in range(3)]
    for step, sizes in enumerate([(2, 2, 2), (2, 2, 2), (4, 1, 1), (4, 1, 1), (2, 3, 1), (1, 1, 4)]):
        if step in (2, 4, 5):
            micro_batches.sizes = sizes
        shares = [loader.share(step).batches for loader in loaders]
        assert [len(batches[0].inputs) for batches in shares] == list(sizes)
        found = torch.cat([rows(batch) for batches in shares for batch in batches])
        assert torch.equal(found, global_batch(plan, step)[0]), f"step {step}"
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("packing", PACKINGS)
def test_held_out_text_is_distributed_in_the_plans_shares(packing: str, shards: Path) -> None:
    plan = plan_of(shards, ranks=3, train__packing=packing, train__global_batch=6)
    plan = plan.model_copy(update={"micro_batches": (3, 2, 1), "accumulation": 1})
    dealt = [list(held_out(plan, rank=rank, world_size=3, device=CPU)) for rank in range(3)]
    assert [{len(batch.inputs) for batch in batches} for batches in dealt] == [{3}, {2}, {1}]
    assert len({len(batches) for batches in dealt}) == 1
    targets = torch.cat([batch.targets.flatten() for batches in dealt for batch in batches]).numpy()
    first = 0 if packing == "padded" else 1
    assert (np.sort(targets[targets != IGNORED]) == np.arange(first, NUM_TOKENS["validation"]) + FIRST).all()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_held_out_predicts_every_token_once_whatever_the_ranks(ranks: int, packing: str, shards: Path) -> None:
    plan = plan_of(shards, train__packing=packing, train__micro_batch=4)
    dealt = [list(held_out(plan, rank=rank, world_size=ranks, device=CPU)) for rank in range(ranks)]
    assert len({len(batches) for batches in dealt}) == 1, "every rank has as many forward passes"
    assert {rows(batch).shape[::2] for batches in dealt for batch in batches} == {(4, CONTEXT)}
    targets = torch.cat([batch.targets.flatten() for batches in dealt for batch in batches]).numpy()
    first = 0 if packing == "padded" else 1
    assert (np.sort(targets[targets != IGNORED]) == np.arange(first, NUM_TOKENS["validation"]) + FIRST).all()


def test_a_limited_validation_takes_so_many_sequences_evenly_spaced(shards: Path) -> None:
    plan = plan_of(shards, train__micro_batch=4)
    batches = [batch for rank in range(2) for batch in held_out(plan, rank=rank, world_size=2, device=CPU, limit=5)]
    starts = [int(row[0]) - FIRST for batch in batches for row in batch.targets if row[0] != IGNORED]
    assert sorted(starts) == [1, 3 * CONTEXT + 1, 6 * CONTEXT + 1, 9 * CONTEXT + 1, 13 * CONTEXT + 1]


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_documents_of_a_share_are_those_its_targets_come_from(packing: str, shards: Path) -> None:
    plan = one_pass(shards, ranks=3, train__packing=packing)
    stream = TokenStream(shards, "train")
    for rank in range(3):
        targets = torch.cat([b.targets for b in Loader(plan, dp_rank=rank, device=CPU).share(1).batches])
        places = targets[targets != IGNORED] - FIRST
        expected = {stream.document_at(int(place)) for place in places}
        if packing != "padded":  # the token before a window is looked at too
            expected |= {stream.document_at(int(row[0]) - FIRST - 1) for row in targets if row[0] != IGNORED}
        assert documents_in(plan, step=1, dp_rank=rank) == sorted(expected)


def test_documents_are_those_of_the_micro_batches_as_they_are_now(shards: Path) -> None:
    plan = plan_of(shards, ranks=2, train__packing="padded", train__global_batch=12, train__micro_batch=3)
    micro_batches = MicroBatches.of(plan)
    loader = Loader(plan, dp_rank=0, device=CPU, micro_batches=micro_batches)
    planned = documents_in(plan, step=0, dp_rank=0)
    micro_batches.sizes = (1, 5)
    now = documents_in(plan, step=0, dp_rank=0, micro_batches=micro_batches)
    assert set(now) < set(planned)
    assert len(loader.share(0).batches[0].inputs) == 1


def test_a_thread_prepares_the_same_shares(shards: Path) -> None:
    plan = one_pass(shards, train__packing="documents")
    inline, ahead = (Loader(plan, dp_rank=0, device=CPU, ahead=n) for n in (0, 2))
    for step in [0, 1, 2, 1, *range(plan.steps)]:  # as a run that goes back to a checkpoint
        for batch, other in zip(inline.share(step).batches, ahead.share(step).batches, strict=True):
            assert torch.equal(rows(batch), rows(other))
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_an_error_in_the_thread_is_raised_where_the_share_is_requested(shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shards, tmp_path / "shards")
    loader = Loader(plan_of(folder), dp_rank=0, device=CPU, ahead=2)
    shutil.rmtree(folder / "train")
    with pytest.raises(FileNotFoundError, match=r"train/0000\d\.bin"):
        loader.share(0)
    loader.close()
