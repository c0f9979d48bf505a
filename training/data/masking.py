"""BERT's objective: chooses the masked tokens, and counts the predicted ones."""

from __future__ import annotations

import numpy as np

from training.data.batch import IGNORED
from training.records.plan import RankPlan


def mask_tokens(plan: RankPlan, tokens: np.ndarray, *, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mask as BERT does (Devlin et al. 2019, section 3.1): of the chosen 15%, 80% mask, 10% random, 10% unchanged.

    int64 [length] -> inputs, targets [length]. A fixed number of positions per sequence, as in the authors' data
    generator.
    """
    assert plan.mask_id is not None
    rng = np.random.default_rng(key)
    count = int(num_predicted(plan, np.array(len(tokens))))
    chosen = rng.permutation(len(tokens))[:count]
    inputs, targets = tokens.copy(), np.full_like(tokens, IGNORED)
    targets[chosen] = tokens[chosen]
    action = rng.random(count)
    inputs[chosen[action < 0.8]] = plan.mask_id
    random = chosen[action >= 0.9]
    inputs[random] = rng.integers(0, plan.vocab_size, len(random))
    return inputs, targets


def num_predicted(plan: RankPlan, lengths: np.ndarray) -> np.ndarray:
    """Return the number of targets in sequences: every token, or for masked models a share of them, at least one."""
    if plan.config.objective == "causal":
        return lengths
    return np.where(lengths > 0, np.maximum(1, np.rint(lengths * plan.config.train.mask_fraction)), 0).astype(np.int64)
