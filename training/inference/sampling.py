"""The choice of the next token from logits: that of tasks/inference/onnx_generator.py, which imports no torch.

Equal logits, settings and seeds give equal text, whichever engine computed the logits (a test compares the two).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn; temperature 0: always the likeliest; top_k 0: from all."""

    temperature: float
    top_k: int
    top_p: float


def choose(logits: Tensor, draws: list[Draw], randoms: list[np.random.Generator]) -> list[int]:
    """One token for each row of fp32 [rows, vocab]; only the rows that are sampled leave the device."""
    likeliest: list[int] = logits.argmax(-1).tolist()
    return [
        likeliest[row] if draw.temperature == 0 else sample(logits[row].cpu().numpy(), draw, random)
        for row, (draw, random) in enumerate(zip(draws, randoms, strict=True))
    ]


def sample(logits: np.ndarray, draw: Draw, random: np.random.Generator) -> int:
    """From fp32 [vocab], among what top_k and top_p leave; one random number a token."""
    candidates = np.arange(len(logits))
    if 0 < draw.top_k < len(logits):
        candidates = np.sort(np.argpartition(logits, -draw.top_k)[-draw.top_k :])
    scaled = logits[candidates].astype(np.float64) / draw.temperature
    weights = np.exp(scaled - scaled.max())
    if draw.top_p < 1:  # the fewest largest ones whose sum reaches top_p (Holtzman et al. 2019, section 3.1)
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= draw.top_p * weights.sum()]] = 0
    cumulative = np.cumsum(weights)
    chosen = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(candidates[min(chosen, len(candidates) - 1)])
