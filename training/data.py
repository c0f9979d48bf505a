"""Token shards to batches: which sequence comes when follows from the seed and the step alone.

So the order does not depend on the number of ranks or on the micro-batch, a resumed run finds its place
without replaying anything, and no sequence comes twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.model import IGNORED
from training.records import RunPlan
from training.shards import TokenStream

Batch = tuple[Tensor, Tensor]  # inputs, targets: int64 [sequences, context]


def shuffled(positions: np.ndarray, *, length: int, key: tuple[int, ...]) -> np.ndarray:
    """A permutation of range(length), evaluated at `positions` only: O(1) to resume, no table to keep.

    A four-round Feistel network over the next even number of bits, walked until it lands inside the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"); under four walks on average.
    """
    half_bits = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(4, np.uint64)

    def encrypt(values: np.ndarray) -> np.ndarray:
        left, right = values >> np.uint64(half_bits), values & mask
        for round_key in round_keys:
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << np.uint64(half_bits)) | right

    result = encrypt(positions.astype(np.uint64))
    while (outside := result >= length).any():
        result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


@dataclass(frozen=True)
class Windows:
    """A token stream cut into sequences of `context` tokens; targets reach one token further."""

    stream: TokenStream
    context: int

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.context

    def __getitem__(self, index: int) -> np.ndarray:
        """int64 [context + 1]."""
        start = index * self.context
        return self.stream.read(start, start + self.context + 1).astype(np.int64)


class Loader:
    """The batches of one rank: of each step's global batch, the same slice of sequences every time."""

    def __init__(self, plan: RunPlan, *, rank: int, device: torch.device) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.windows = Windows(TokenStream(Path(plan.shards_dir), "train"), plan.config.train.context)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of this rank for `step` (counted from 0)."""
        train, plan = self.plan.config.train, self.plan
        per_rank = train.global_batch // plan.world_size
        first = step * train.global_batch + self.rank * per_rank
        places = np.arange(first, first + per_rank)
        epochs, positions = np.divmod(places, len(self.windows))
        rows = np.empty(per_rank, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = shuffled(positions[here], length=len(self.windows), key=(train.seed, int(epoch)))
        sequences = [
            make_example(plan, self.windows[int(row)], key=(train.seed, int(place)))
            for row, place in zip(rows, places, strict=True)
        ]
        return [
            collate(sequences[start : start + plan.micro_batch], self.device)
            for start in range(0, per_rank, plan.micro_batch)
        ]


def make_example(plan: RunPlan, tokens: np.ndarray, *, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [context + 1] -> inputs, targets [context]: the next token, or the masked ones by the plan's objective."""
    if plan.config.objective == "causal":
        return tokens[:-1], tokens[1:]
    return mask_tokens(plan, tokens[:-1], key=key)


def targets_per_sequence(plan: RunPlan) -> int:
    """Predicted positions in a training sequence; constant, so that the mean over ranks needs no counting."""
    train = plan.config.train
    if plan.config.objective == "causal":
        return train.context
    return max(1, round(train.context * train.mask_fraction))


def mask_tokens(plan: RunPlan, tokens: np.ndarray, *, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """BERT's masking (Devlin et al. 2019, section 3.1): of the chosen 15%, 80% mask, 10% random, 10% unchanged.

    A fixed number of positions per sequence, as in the authors' data generator.
    """
    assert plan.mask_id is not None
    rng = np.random.default_rng(key)
    count = min(targets_per_sequence(plan), len(tokens))
    chosen = rng.permutation(len(tokens))[:count]
    inputs, targets = tokens.copy(), np.full_like(tokens, IGNORED)
    targets[chosen] = tokens[chosen]
    action = rng.random(count)
    inputs[chosen[action < 0.8]] = plan.mask_id
    random = chosen[action >= 0.9]
    inputs[random] = rng.integers(0, plan.vocab_size, len(random))
    return inputs, targets


def collate(examples: list[tuple[np.ndarray, np.ndarray]], device: torch.device) -> Batch:
    inputs, targets = (torch.from_numpy(np.stack(column)) for column in zip(*examples, strict=True))
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def held_out(plan: RunPlan, *, rank: int, world_size: int, device: torch.device, limit: int = 0) -> Iterator[Batch]:
    """The validation split once, in order, dealt to the ranks batch by batch; every rank gets as many batches.

    The end that fills no whole sequence is a last, shorter batch. A rank without a batch in the last round gets
    one that predicts nothing, since sharded models need every rank in every forward pass.
    `limit` > 0 takes only that many sequences, evenly spaced over the split.
    """
    stream, context = TokenStream(Path(plan.shards_dir), "validation"), plan.config.train.context
    num_targets = len(stream) - 1
    starts = np.arange(0, num_targets, context)
    if limit and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, limit).astype(int)]
    whole = starts[starts + context <= num_targets]
    groups = [whole[i : i + plan.micro_batch] for i in range(0, len(whole), plan.micro_batch)]
    if len(whole) < len(starts):
        groups.append(starts[len(whole) :])
    for first in range(0, len(groups), world_size):
        if first + rank < len(groups):
            yield collate([_held_out_example(plan, stream, int(start)) for start in groups[first + rank]], device)
        else:
            yield torch.zeros(1, 1, dtype=torch.long, device=device), torch.full((1, 1), IGNORED, device=device)


def _held_out_example(plan: RunPlan, stream: TokenStream, start: int) -> tuple[np.ndarray, np.ndarray]:
    stop = min(start + plan.config.train.context + 1, len(stream))
    return make_example(plan, stream.read(start, stop).astype(np.int64), key=(plan.config.train.seed, start))
