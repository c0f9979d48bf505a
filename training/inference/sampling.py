"""The choice of the next token from logits, in numpy.

Equal logits, parameters and seeds give equal text, whichever engine computed the logits. A test compares this file with
tasks/inference/onnx_generator.py, which repeats this code, because it is shipped with each model and imports nothing of
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """The parameters by which a token is drawn. Temperature 0: always the likeliest; top_k 0: from all."""

    temperature: float
    top_k: int
    top_p: float


def choose_tokens(logits: Tensor, params: list[SamplingParams], generators: list[np.random.Generator]) -> list[int]:
    """Return one token for each row of fp32 logits [rows, vocab]; only rows that are sampled leave the device."""
    likeliest: list[int] = logits.argmax(-1).tolist()
    return [
        likeliest[row] if own.temperature == 0 else sample_token(logits[row].cpu().numpy(), own, generator)
        for row, (own, generator) in enumerate(zip(params, generators, strict=True))
    ]


def sample_token(logits: np.ndarray, params: SamplingParams, generator: np.random.Generator) -> int:
    """Draw a token from fp32 logits [vocab], among those that top_k and top_p leave, with one random number."""
    candidates = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        candidates = np.sort(np.argpartition(logits, -params.top_k)[-params.top_k :])
    scaled = logits[candidates].astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    if params.top_p < 1:  # keep the fewest likeliest whose sum reaches top_p (Holtzman et al. 2019, section 3.1)
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params.top_p * weights.sum()]] = 0
    cumulative = np.cumsum(weights)
    chosen = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(candidates[min(chosen, len(candidates) - 1)])
