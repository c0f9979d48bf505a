"""The loader: the order of the data and its packing, each rank's share, held-out text, and the preparing thread."""

from __future__ import annotations

import itertools
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
    predicted,
    rows,
    write_numbered,
)
from tests.support.tiny_shards import END
from training.data.batch import IGNORED, Batch, MicroBatches
from training.data.held_out import held_out_by_source
from training.data.loader import Loader, documents_in
from training.data.shuffle import shuffled
from training.records.plan import RunPlan
from training.shards.packing import BY_DOCUMENT, PADDING, one_epoch
from training.shards.stream import TokenStream


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("numbered"))


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 1000, 65_537])
def test_shuffled_is_a_permutation(length: int) -> None:
    order = shuffled(np.arange(length), length=length, key=(7, 0))
    assert np.array_equal(np.sort(order), np.arange(length))


def test_shuffled_differs_by_seed_and_epoch_and_is_no_identity() -> None:
    orders = [shuffled(np.arange(1000), length=1000, key=key) for key in ((1, 0), (1, 1), (2, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert all((orders[0] != other).mean() > 0.98 for other in orders[1:])


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("model", [{}, BERT], ids=["llama", "bert"])
def test_the_global_batch_depends_neither_on_ranks_nor_on_their_shares(
    packing: str, model: dict[str, Any], shards: Path
) -> None:
    common = {
        "train__packing": packing,
        "train__global_batch": 12,
        "train__max_epochs": 2.3,
        "train__steps": 1000,
    } | model
    alone = plan_of(shards, train__micro_batch=12, **common)
    for sizes in ((6, 6), (1, 1), (3, 3, 3, 3), (3, 2, 1)):
        split = plan_of(shards, ranks=len(sizes), train__micro_batch=1, **common)
        split = split.model_copy(update={"micro_batches": sizes, "accumulation": 12 // sum(sizes)})
        for step in (0, 5, alone.steps // 2, alone.steps - 1):
            expected, num_targets = global_batch(alone, step)
            found, found_targets = global_batch(split, step)
            assert torch.equal(found, expected)
            assert found_targets == num_targets
    cut = [[len(b.inputs) for b in Loader(split, dp_rank=rank, device=CPU).share(0).batches] for rank in range(3)]
    assert cut == [[3, 3], [2, 2], [1, 1]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_predicts_every_token_once(packing: str, shards: Path) -> None:
    plan = one_pass(shards, ranks=3, train__packing=packing)
    whole_windows = (NUM_TOKENS["train"] - 1) // CONTEXT
    expected = np.arange(NUM_TOKENS["train"]) if packing in BY_DOCUMENT else np.arange(1, whole_windows * CONTEXT + 1)
    assert np.array_equal(np.sort(predicted(plan)), expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_epoch_has_its_own_order_and_batches_go_on_over_its_end(packing: str, shards: Path) -> None:
    """Whole batches, none a multiple of the epoch: each token is seen as often as epochs are over, or once more."""
    plan = plan_of(shards, train__packing=packing, train__steps=40, train__global_batch=7, train__micro_batch=7)
    places = predicted(plan)
    counts = np.bincount(places, minlength=NUM_TOKENS["train"])
    (epoch,) = one_epoch(shards, packing=packing, context=CONTEXT)
    sequences, epochs = epoch.sequences, 40 * 7 // epoch.sequences
    assert epochs >= 2
    assert set(counts[1 : NUM_TOKENS["train"] // CONTEXT * CONTEXT]) <= {epochs, epochs + 1}
    first, second = (places[start : start + 300] for start in (0, len(places) * sequences // 280))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("packing", PACKINGS)
def test_any_step_is_found_without_the_steps_before(packing: str, shards: Path) -> None:
    plan = plan_of(shards, train__packing=packing, train__steps=700)
    walked = Loader(plan, dp_rank=0, device=CPU)
    shares = [walked.share(step) for step in range(plan.steps)]
    for step in (1, 511, 512, 699):  # 512 steps of 8 sequences are ordered at once
        fresh = Loader(plan, dp_rank=0, device=CPU).share(step)
        for batch, other in zip(fresh.batches, shares[step].batches, strict=True):
            assert torch.equal(rows(batch), rows(other))


def test_another_seed_is_another_order(shards: Path) -> None:
    batches = [global_batch(plan_of(shards, train__seed=seed), 0)[0] for seed in (1, 2)]
    assert not torch.equal(*batches)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("model", [{}, BERT], ids=["llama", "bert"])
def test_the_uneven_last_batch_keeps_its_shape_and_counts_what_is_there(
    packing: str, model: dict[str, Any], shards: Path
) -> None:
    plan = one_pass(shards, ranks=3, train__micro_batch=1, train__packing=packing, train__max_epochs=1.1, **model)
    assert plan.sequences < plan.steps * 21
    for step in range(plan.steps):
        shares = [Loader(plan, dp_rank=rank, device=CPU).share(step) for rank in range(3)]
        assert [len(share.batches) for share in shares] == [7, 7, 7]
        batches = [batch for share in shares for batch in share.batches]
        assert {batch.inputs.shape for batch in batches} == {batch.targets.shape for batch in batches} == {(1, CONTEXT)}
        count = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        assert [share.num_targets for share in shares] == [count] * 3
    empty = [batch for batch in batches if not (batch.targets != IGNORED).any()]
    assert len(empty) == plan.steps * 21 - plan.sequences
    assert all((batch.inputs == END).all() for batch in empty)


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_input_is_the_token_before_its_target(packing: str, shards: Path) -> None:
    plan = one_pass(shards, train__packing=packing)
    starts = set(TokenStream(shards, "train").document_bounds()[:-1].tolist()) if packing in BY_DOCUMENT else set()
    loader = Loader(plan, dp_rank=0, device=CPU)
    for step in range(plan.steps):
        for batch in loader.share(step).batches:
            for given, target in zip(batch.inputs.flatten().tolist(), batch.targets.flatten().tolist(), strict=True):
                if target == IGNORED:
                    assert given == END
                else:
                    assert given == (END if target - FIRST in starts else target - 1)


def test_documents_attend_to_themselves_alone_and_begin_with_the_end_token_before_them(shards: Path) -> None:
    plan = one_pass(shards, train__packing="documents")
    stream, loader, several = TokenStream(shards, "train"), Loader(plan, dp_rank=0, device=CPU), 0
    for step in range(plan.steps - 1):
        for batch in loader.share(step).batches:
            assert batch.documents is not None
            assert batch.positions is not None
            for row in range(len(batch.targets)):
                documents = stream.document_ids(0, len(stream))[batch.targets[row] - FIRST].tolist()
                seen = [[mine == other for other in documents] for mine in documents]
                assert (batch.documents[row][:, None] == batch.documents[row][None]).tolist() == seen
                assert batch.positions[row].tolist() == [
                    place - documents.index(d) for place, d in enumerate(documents)
                ]
                several += len(set(documents)) > 1
    assert several > 20


@pytest.mark.parametrize("model", [{}, BERT], ids=["llama", "bert"])
def test_best_fit_keeps_documents_whole_and_apart(model: dict[str, Any], shards: Path) -> None:
    """A document that fits has all its tokens in one row, one after the other, at positions from 0 on."""
    plan = one_pass(shards, train__packing="best-fit", **model)
    bounds, loader, rows_of = TokenStream(shards, "train").document_bounds(), Loader(plan, dp_rank=0, device=CPU), {}
    for step in range(plan.steps):
        batches, spans = loader.share(step).batches, loader.spans(step).tolist()
        for batch in batches:
            assert batch.documents is not None
            assert batch.positions is not None
            for documents, positions in zip(batch.documents.tolist(), batch.positions.tolist(), strict=True):
                place = 0
                for number in range(max(documents) + 1):
                    _, first, stop = spans.pop(0)
                    rows_of[first] = stop
                    assert documents[place : place + stop - first] == [number] * (stop - first)
                    assert positions[place : place + stop - first] == list(range(stop - first))
                    place += stop - first
                assert documents[place:] == [PADDING] * (CONTEXT - place)
        assert not spans
    fitting = [(start, stop) for start, stop in itertools.pairwise(bounds) if stop - start <= CONTEXT]
    assert len(fitting) > 10
    assert all(rows_of[start] == stop for start, stop in fitting)


def test_figures_count_cut_documents(shards: Path) -> None:
    lengths = np.diff(TokenStream(shards, "train").document_bounds())
    share = (lengths > CONTEXT).mean()
    plan = one_pass(shards, train__packing="best-fit")
    assert Loader(plan, dp_rank=0, device=CPU).text_figures(1) == {"cut_documents_share": pytest.approx(share)}
    padding = 1 - NUM_TOKENS["train"] / (CONTEXT * plan.sources[0].sequences)
    assert any(f"cuts {share:.2%} of the documents" in why and f"{padding:.2%} of" in why for why in plan.reasons)
    assert plan.tokens == NUM_TOKENS["train"]
    assert not Loader(one_pass(shards), dp_rank=0, device=CPU).text_figures(1), "windows count no documents"


@pytest.mark.parametrize("packing", ["stream", "padded"])
def test_causal_sequences_need_no_mask(packing: str, shards: Path) -> None:
    """What is behind a token cannot be seen anyway, so attention keeps its fast path."""
    batch = Loader(plan_of(shards, train__packing=packing), dp_rank=0, device=CPU).share(0).batches[0]
    assert batch.documents is None
    assert batch.positions is None


def test_no_token_attends_to_the_padding_of_masked_models(shards: Path) -> None:
    plan = one_pass(shards, train__packing="padded", **BERT)
    bounds, loader, short = TokenStream(shards, "train").document_bounds(), Loader(plan, dp_rank=0, device=CPU), 0
    for step in range(plan.steps):
        for batch in loader.share(step).batches:
            assert batch.documents is not None
            for targets, documents in zip(batch.targets, batch.documents.tolist(), strict=True):
                if (targets == IGNORED).all():
                    continue
                chosen = int((targets != IGNORED).nonzero()[0])
                place = int(targets[chosen]) - FIRST
                end = bounds[np.searchsorted(bounds, place, side="right")]
                length = min(CONTEXT, int(end) - (place - chosen))
                assert documents == [documents[0]] * length + [documents[-1]] * (CONTEXT - length)
                assert length == CONTEXT or documents[0] != documents[-1]
                short += length < CONTEXT
    assert short > 20


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_batch_that_grows_has_the_same_sequences_in_the_same_order(packing: str, shards: Path) -> None:
    schedule = [{"tokens": 200, "global_batch": 12}, {"tokens": 500, "global_batch": 24}]
    size = {"train__packing": packing, "train__global_batch": 6, "train__micro_batch": 2}
    constant = one_pass(shards, **size)
    for ranks in (1, 3):
        plan = one_pass(shards, ranks=ranks, train__batch_schedule=schedule, **size)
        assert plan.sequences == constant.sequences
        assert 2 < plan.steps < constant.steps
        assert np.array_equal(predicted(plan), predicted(constant))


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


def held_out(plan: RunPlan, *, rank: int, world_size: int, limit: int = 0) -> list[Batch]:
    batches = held_out_by_source(plan, rank=rank, world_size=world_size, device=CPU, limit=limit)
    return [batch for _, batch in batches]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("sizes", [(4,), (4, 4), (4, 4, 4), (3, 2, 1)])
def test_held_out_predicts_every_token_once_whatever_the_ranks(
    sizes: tuple[int, ...], packing: str, shards: Path
) -> None:
    plan = plan_of(shards, ranks=len(sizes), train__packing=packing, train__global_batch=12, train__micro_batch=1)
    plan = plan.model_copy(update={"micro_batches": sizes, "accumulation": 1})
    dealt = [held_out(plan, rank=rank, world_size=len(sizes)) for rank in range(len(sizes))]
    assert len({len(batches) for batches in dealt}) == 1, "every rank has as many forward passes"
    assert [{rows(batch).shape[::2] for batch in batches} for batches in dealt] == [{(n, CONTEXT)} for n in sizes]
    targets = torch.cat([batch.targets.flatten() for batches in dealt for batch in batches]).numpy()
    first = 0 if packing in BY_DOCUMENT else 1
    assert (np.sort(targets[targets != IGNORED]) == np.arange(first, NUM_TOKENS["validation"]) + FIRST).all()


def test_a_limited_validation_takes_so_many_sequences_evenly_spaced(shards: Path) -> None:
    plan = plan_of(shards, train__micro_batch=4)
    batches = [batch for rank in range(2) for batch in held_out(plan, rank=rank, world_size=2, limit=5)]
    starts = [int(row[0]) - FIRST for batch in batches for row in batch.targets if row[0] != IGNORED]
    assert sorted(starts) == [1, 3 * CONTEXT + 1, 6 * CONTEXT + 1, 9 * CONTEXT + 1, 13 * CONTEXT + 1]


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_documents_of_a_share_are_those_its_targets_come_from(packing: str, shards: Path) -> None:
    plan = one_pass(shards, ranks=3, train__packing=packing)
    stream = TokenStream(shards, "train")
    for rank in range(3):
        targets = torch.cat([b.targets for b in Loader(plan, dp_rank=rank, device=CPU).share(1).batches])
        places = targets[targets != IGNORED] - FIRST
        documents = stream.document_ids(0, len(stream))
        expected = {*documents[places].tolist()}
        if packing not in BY_DOCUMENT:  # the token before a window is looked at too
            expected |= {int(documents[row[0] - FIRST - 1]) for row in targets if row[0] != IGNORED}
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
