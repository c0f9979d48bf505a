"""Turns token shards into batches: the seed and the step alone determine the sequences of a batch.

So the order does not depend on the number of ranks or on the micro-batch, a resumed run finds its place without reading
earlier batches, and no sequence comes twice in an epoch.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.data.batch import IGNORED, Batch, MicroBatches, Share
from training.data.masking import mask_tokens, num_predicted
from training.data.read_ahead import ReadAhead
from training.data.shuffle import random_keys, shuffled
from training.records.plan import RankPlan, RunPlan
from training.shards.mixture import Mixture
from training.shards.packing import (
    OWN_DOCUMENT,
    PADDING,
    Rows,
    document_rows,
    positions_within,
    read_rows,
    sequences_by_source,
)
from training.shards.stream import TokenStream

logger = logging.getLogger(__name__)

STEPS_AHEAD = 2
ORDERED_AT_ONCE = 4096  # sequences found at once: a batch of 12 takes 29 to 121 us, this many take 0.05 to 0.3 us each


class Loader:
    """The shares of one data-parallel rank: of each step's global batch, the slice that `micro_batches` give it.

    `ahead`: steps that a thread prepares beforehand. The default is STEPS_AHEAD on a GPU, in pinned memory, and 0 on a
    CPU: a share of 12 x 64 tokens takes 0.04 ms (0.11 with documents) of a 58 ms step on one thread, and preparing it
    in another thread made the step 0.99 to 1.005 times as long (600 steps of each, in turns).
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        dp_rank: int,
        device: torch.device,
        micro_batches: MicroBatches | None = None,
        ahead: int | None = None,
    ) -> None:
        self.plan, self.dp_rank, self.device, train = plan, dp_rank, device, plan.config.train
        self.micro_batches = micro_batches or MicroBatches.of(plan)
        self.stream = TokenStream(Path(plan.shards_dir), "train")
        self.sequences = sequences_by_source(self.stream, packing=train.packing, context=train.context)
        self.batches = plan.batches
        self.mixture = Mixture(plan.mixture, self.batches) if plan.mixture else None
        self._steps_at_once = max(1, ORDERED_AT_ONCE // train.global_batch)
        self._ordered = functools.lru_cache(4)(self._order)  # two threads that prepare, two that look for coming blocks
        self._read_ahead: ReadAhead | None = None  # begins with the first requested step
        self._ahead = (STEPS_AHEAD if device.type == "cuda" else 0) if ahead is None else ahead
        self._thread = ThreadPoolExecutor(1, "loader", initializer=self._select_device) if self._ahead else None
        self._prepared: dict[int, Future[tuple[Batch, int]]] = {}  # step -> batch
        self._prepared_sizes = self.micro_batches.sizes

    def share(self, step: int) -> Share:
        """The micro-batches of this rank for `step` (counted from 0), on its device.

        Steps may be requested in any order; on GPUs the next ones are prefetched. Raises what preparing a step raised.
        """
        if self.stream.is_remote:
            self._look_ahead(step)
        whole, num_targets = self._prepare(step) if self._thread is None else self._take(step)
        whole = whole.each(lambda tensor: tensor.to(self.device, non_blocking=True))
        rows = self.micro_batches.sizes[self.dp_rank]
        starts = range(0, len(whole.inputs), rows)
        return Share([whole.each(operator.itemgetter(slice(start, start + rows))) for start in starts], num_targets)

    def spans(self, step: int) -> np.ndarray:
        """Return int64 [n, 3]: what this rank's sequences are read from, in order (training/shards/packing.py)."""
        return self.rows(step).spans

    def rows(self, step: int) -> Rows:
        """Return this rank's sequences of `step`."""
        return self._global_batch(step)[0][self._own(step)]

    def num_tokens(self, step: int) -> int:
        """Return the tokens in all ranks' shares of `step`, without padding; masked models predict some of them."""
        rows, num_targets = self._global_batch(step)
        return num_targets if self.plan.config.objective == "causal" else int(rows.lengths.sum())

    def text_figures(self, steps: int) -> dict[str, float]:
        """Return, of the text after `steps` steps, `tokens_seen/NAME` of a mixture's sources, and
        `cut_documents_share` if the packing counts documents: both by the epochs of each source that are done.
        """
        plan = self.plan
        num_sequences = min(self.batches.sequences_before(steps), plan.sequences)
        counts = [num_sequences] if self.mixture is None else self.mixture.counts(num_sequences).tolist()
        seen = [(each, count, max(1, each.sequences)) for each, count in zip(plan.sources, counts, strict=False)]
        figures = {f"tokens_seen/{each.name}": count * each.tokens / one for each, count, one in seen if plan.mixture}
        if documents := sum(count * each.documents / one for each, count, one in seen):
            cut = sum(count * each.cut_documents / one for each, count, one in seen)
            figures["cut_documents_share"] = cut / documents
        return figures

    def close(self) -> None:
        """Wait for the step that the thread is preparing, and end the thread."""
        if self._read_ahead is not None:
            self._read_ahead.close()
            for cache in self.stream.caches():
                logger.info(
                    "token shards of %s: %.0f MB came from the store, steps waited %.2f s for them",
                    cache.url,
                    cache.fetched_bytes / 1e6,
                    cache.waited_s,
                )
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _look_ahead(self, step: int) -> None:
        if self._read_ahead is None:
            with_ends = self.plan.config.train.packing == "documents"
            self._read_ahead = ReadAhead(
                self.stream, self.spans, first=step, steps=self.plan.steps, with_ends=with_ends
            )
        self._read_ahead.advance(step)

    def _select_device(self) -> None:
        """Select this rank's GPU in the thread; otherwise pinning memory opens a context on GPU 0."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _take(self, step: int) -> tuple[Batch, int]:
        """Return the batch that the thread has prepared for `step`; give the thread the next steps."""
        assert self._thread is not None
        if self._prepared_sizes is not self.micro_batches.sizes:  # prepared for other sizes, so it cannot be used
            for future in self._prepared.values():
                future.cancel()
            self._prepared, self._prepared_sizes = {}, self.micro_batches.sizes
        steps = range(step, max(step + 1, min(step + 1 + self._ahead, self.plan.steps)))
        self._prepared = {n: self._prepared.get(n) or self._thread.submit(self._prepare, n) for n in steps}
        return self._prepared.pop(step).result()

    def _prepare(self, step: int) -> tuple[Batch, int]:
        """Return all sequences of this rank for `step` as one Batch in host memory, and the step's targets."""
        rows, num_targets = self._global_batch(step)
        own, first = self._own(step), self.batches.sequences_before(step)
        places = range(first + own.start, first + own.stop)
        batch = make_batch(self.plan, self.stream, rows[own], keys=places)
        if self.device.type == "cuda":
            batch = batch.each(Tensor.pin_memory)
        return batch, num_targets

    def _own(self, step: int) -> slice:
        return self.micro_batches.sequences(self.dp_rank, of=self.batches.size(step))

    def _global_batch(self, step: int) -> tuple[Rows, int]:
        """Return the sequences of all ranks, and the number of their targets."""
        block, number = divmod(step, self._steps_at_once)
        rows, num_targets = self._ordered(block)
        first = self.batches.sequences_before(step) - self.batches.sequences_before(step - number)
        return rows[first : first + self.batches.size(step)], int(num_targets[number])

    def _order(self, block: int) -> tuple[Rows, np.ndarray]:
        """Return the sequences of `_steps_at_once` steps in a row, and the number of targets of each step."""
        train = self.plan.config.train
        steps = range(block * self._steps_at_once, (block + 1) * self._steps_at_once)
        starts = np.array([self.batches.sequences_before(step) for step in steps])
        places = np.arange(starts[0], self.batches.sequences_before(steps.stop))
        parts = []  # steps beyond the plan's sequences stay empty
        if self.mixture is None:
            here = places < self.plan.sequences
            parts.append((np.flatnonzero(here), self._rows_of(0, places[here], key=(train.seed,))))
        else:
            places = _within_batches(places, global_batch=train.global_batch, seed=train.seed)
            sources, numbers = self.mixture.draw(places)
            for source in range(self.mixture.num_sources):
                here = (sources == source) & (places < self.plan.sequences)
                parts.append((np.flatnonzero(here), self._rows_of(source, numbers[here], key=(train.seed, source))))
        rows = Rows.placed(parts, num=len(places))
        return rows, np.add.reduceat(num_predicted(self.plan, rows.lengths), starts - starts[0])

    def _rows_of(self, source: int, numbers: np.ndarray, *, key: tuple[int, ...]) -> Rows:
        """Return a source's sequences; `numbers` [n] count through its epochs, each of which has another order."""
        sequences = self.sequences[source]
        epochs, positions = np.divmod(numbers, len(sequences))
        shuffled_numbers = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            shuffled_numbers[here] = shuffled(positions[here], length=len(sequences), key=(*key, int(epoch)))
        return sequences.rows(shuffled_numbers)


def _within_batches(places: np.ndarray, *, global_batch: int, seed: int) -> np.ndarray:
    """Return the places of each batch in another order; otherwise a rank might always get the same source."""
    order = random_keys(places, key=seed).reshape(-1, global_batch).argsort(axis=1)
    return np.take_along_axis(places.reshape(-1, global_batch), order, axis=1).reshape(-1)


def documents_in(plan: RunPlan, *, step: int, dp_rank: int, micro_batches: MicroBatches | None = None) -> list[int]:
    """Return the numbers, within the training split, of the documents whose tokens are in a rank's share of `step`."""
    loader = Loader(plan, dp_rank=dp_rank, device=torch.device("cpu"), micro_batches=micro_batches)
    spans = loader.spans(step)[:, [0, 2]].tolist()
    return sorted({int(number) for span in spans for number in np.unique(loader.stream.document_ids(*span))})


def make_batch(plan: RankPlan, stream: TokenStream, rows: Rows, *, keys: Iterable[int], partial: bool = False) -> Batch:
    """Read sequences into host memory. A sequence's key determines its masks. `partial`: some may be shorter than the
    context, at the end of the split.
    """
    train, lengths = plan.config.train, rows.lengths
    inputs, tokens = read_rows(stream, rows, context=train.context, end_id=plan.end_id)
    padding = np.arange(train.context) >= lengths[:, None]
    causal = plan.config.objective == "causal"
    if causal:
        targets = np.where(padding, IGNORED, tokens)
    else:
        inputs, targets = tokens, np.full_like(tokens, IGNORED)
        for row, (length, key) in enumerate(zip(lengths.tolist(), keys, strict=True)):
            inputs[row, :length], targets[row, :length] = mask_tokens(plan, tokens[row, :length], key=(train.seed, key))
    batch = Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
    if train.packing in OWN_DOCUMENT:
        whole = train.packing == "best-fit"  # a span holds one document, or a piece of one
        numbers = rows.numbers(train.context) if whole else document_rows(stream, rows, context=train.context)
        positions = torch.from_numpy(positions_within(numbers))
        return replace(batch, positions=positions, documents=torch.from_numpy(numbers))
    if not causal and (train.packing == "padded" or partial):  # bidirectional attention must not see the padding
        return replace(batch, documents=torch.from_numpy(np.where(padding, PADDING, 0)))
    return batch
