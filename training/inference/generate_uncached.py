"""Text from a model that may be spread over ranks: all ranks make the same forward passes, rank 0 chooses the tokens.

There is no cache of keys and values: each pass reads prompts and new text again, all prompts in one batch. A cache
would save little: each pass gathers a sharded model anyway, and samples are short. Serving uses a cache
(training/generate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from training.inference.sampling import SamplingParams, choose_tokens
from training.strategies import Strategy

Ids = list[int]


@torch.no_grad()
def continuations(
    strategy: Strategy,
    prompts: Sequence[Ids],
    *,
    new_tokens: int,
    params: SamplingParams,
    seeds: Sequence[int],
    end_ids: Sequence[int],
    context: int,
    device: torch.device,
    is_done: Callable[[Ids], bool] = lambda new: False,
    together: bool = True,
) -> list[Ids]:
    """Return new tokens for each prompt, before an end token; they are equal in all strategies up to rounding.

    Each prompt has its own random generator. Of a text longer than the context, only the last `context` tokens are
    read. A prompt ends early when `is_done` is true of its new tokens. Collective, with the same arguments on all
    ranks; with together=False, each rank holds the whole model and works by itself.
    """
    generators = [np.random.default_rng(seed) for seed in seeds]
    rows, new = [list(prompt) for prompt in prompts], [Ids() for _ in prompts]
    open_rows = list(range(len(rows)))
    with torch.compiler.set_stance("force_eager"):  # otherwise every length would be compiled
        for _ in range(new_tokens):
            if not open_rows:
                break
            logits = next_logits(strategy, [rows[n][-context:] for n in open_rows], padding=end_ids[0], device=device)
            chosen = choose_tokens(logits, [params] * len(open_rows), [generators[n] for n in open_rows])
            agreed = torch.tensor(chosen, device=device)
            if together:
                dist.broadcast(agreed, src=0)
            for n, token in zip(list(open_rows), agreed.tolist(), strict=True):
                if token in end_ids:
                    open_rows.remove(n)
                    continue
                rows[n].append(token)
                new[n].append(token)
                if is_done(new[n]):
                    open_rows.remove(n)
    return new


def next_logits(strategy: Strategy, rows: Sequence[Ids], *, padding: int, device: torch.device) -> Tensor:
    """Return logits fp32 [rows, vocab] of the word after each row. Padding is on the right, where no token sees it."""
    inputs = torch.full((len(rows), max(map(len, rows))), padding)
    for number, row in enumerate(rows):
        inputs[number, : len(row)] = torch.tensor(row)
    last = torch.tensor([len(row) - 1 for row in rows])
    return strategy.next_logits(inputs.to(device), last.to(device))
