"""A token is chosen by the same rule whichever engine computed the logits."""

from __future__ import annotations

import numpy as np

from tasks.inference.onnx_generator import Sampling, choose_token
from training.inference.sampling import SamplingParams, sample_token


def test_the_choice_of_a_token_is_that_of_the_other_engine() -> None:
    generator = np.random.default_rng(0)
    for number in range(200):
        logits = generator.normal(size=50).astype(np.float32) * 3
        top_k, top_p = int(generator.integers(0, 60)), float(generator.uniform(0.2, 1)) if number % 4 else 1.0
        torch_random, onnx_random = np.random.default_rng(number), np.random.default_rng(number)
        sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
        expected = [choose_token(logits, sampling, random=onnx_random) for _ in range(5)]
        params = SamplingParams(0.7, top_k, top_p)
        assert [sample_token(logits, params, torch_random) for _ in range(5)] == expected
