"""Texts of samples and downstream tasks end where the model ends its texts."""

from typing import Any

import pytest
import torch

from training.inference.generate_uncached import continuations
from training.inference.sampling import SamplingParams

SCRIPTS = {1: [3, 4, 7, 5], 2: [3, 0, 4, 5], 6: [3, 4, 5, 9]}  # by the prompt's token


class Scripted:
    """A strategy whose model says the same after each prompt."""

    def next_logits(self, inputs: torch.Tensor, last: torch.Tensor) -> Any:
        logits = torch.zeros(len(inputs), 10)
        for row, (ids, place) in enumerate(zip(inputs.tolist(), last.tolist(), strict=True)):
            logits[row, SCRIPTS[ids[0]][place]] = 1
        return logits


@pytest.mark.parametrize(
    ("end_ids", "expected"),
    [
        ((0,), [[3, 4, 7, 5], [3], [3, 4, 5, 9]]),
        ((0, 7), [[3, 4], [3], [3, 4, 5, 9]]),
        ((0, 7, 9), [[3, 4], [3], [3, 4, 5]]),
    ],
)
def test_every_end_token_ends_a_text(end_ids: tuple[int, ...], expected: list[list[int]]) -> None:
    greedy = SamplingParams(temperature=0, top_k=0, top_p=1.0)
    made = continuations(
        Scripted(),  # type: ignore[arg-type]
        [[prompt] for prompt in SCRIPTS],
        new_tokens=4,
        params=greedy,
        seeds=[0] * len(SCRIPTS),
        end_ids=end_ids,
        context=8,
        device=torch.device("cpu"),
        together=False,
    )
    assert made == expected
