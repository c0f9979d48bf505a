"""Compares three ways to compute the loss of a linear output layer, forward and backward.

    python -m benchmarks.loss_head [--quick]

before    benchmarks/baselines/chunked_loss.py: 2,048 tokens at a time, 14 passes over fp32 logits
after     training/models/linear_cross_entropy.py
torch     torch.nn.functional.cross_entropy over the logits of all tokens, as a user would write it

All get the same fp32 numbers on one thread and take turns. Time is CPU time, which other programs disturb least; memory
is the kernel's peak minus what was in use before: logits and gradients. WIDTH is small because this is a CPU: the time
of a product divided by that of a pass over the logits is about the same at width 128 on a CPU as at 4,096 on an H100 in
bf16. In wider models products take a larger part of the time, so the ratio is closer to 1 (without --quick, 768 too).

`unpadded` is `after` without padding the vocabulary to a multiple of 128; left out if it is such a multiple already.

The last line is one JSON object: `time_ratio` and `memory_ratio` (before / after), `time_ratio_vs_torch` and
`memory_ratio_vs_torch`, and `padding_time_ratio` (unpadded / after), each by vocabulary.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.baselines import chunked_loss
from benchmarks.support.cost import Cost, measure, medians
from training.facts.loss_chunks import vocab_padding
from training.models.linear_cross_entropy import linear_cross_entropy

VOCABULARIES = (32_000, 50_257, 128_000)
WIDTH, TOKENS = 128, 4096

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")


WAYS: dict[str, Loss] = {
    "before": lambda hidden, weight, targets: chunked_loss.linear_cross_entropy(hidden, weight, None, targets),
    "after": lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, None, targets),
    "torch": by_torch,
    "unpadded": lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, None, targets, multiple=1),
}


def race(vocabulary: int, width: int, *, rounds: int) -> dict[str, Cost]:
    """Return the median cost of each way over rounds; in each round every way has one turn."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, width, requires_grad=True)
    weight = torch.randn(vocabulary, width).mul_(0.05).requires_grad_()
    targets = torch.randint(vocabulary, (TOKENS,))
    ways = {way: loss_of for way, loss_of in WAYS.items() if way != "unpadded" or vocab_padding(vocabulary)}
    turns = {
        way: functools.partial(measure, functools.partial(loss_of, hidden, weight, targets), (hidden, weight))
        for way, loss_of in ways.items()
    }
    return medians(turns, rounds)


def ratios(costs: dict[str, Cost]) -> dict[str, float]:
    before, after, plain = (costs[way] for way in ("before", "after", "torch"))
    found = {
        "time_ratio": before.seconds / after.seconds,
        "memory_ratio": before.memory_mib / after.memory_mib,
        "time_ratio_vs_torch": plain.seconds / after.seconds,
        "memory_ratio_vs_torch": plain.memory_mib / after.memory_mib,
    }
    if "unpadded" in costs:
        found["padding_time_ratio"] = costs["unpadded"].seconds / after.seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one width; 3 to 4 minutes")
    parser.add_argument("--vocabularies", type=int, nargs="*", default=VOCABULARIES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    race(256, WIDTH, rounds=1)  # warms up
    figures: dict[str, Any] = {}
    print(f"{TOKENS:,} tokens{'':4}{'words':>10}{'width':>7}{'CPU s':>8}{'peak MiB':>10}{'loss':>12}")
    for width in (WIDTH,) if args.quick else (WIDTH, 768):
        for vocabulary in args.vocabularies:
            costs = race(vocabulary, width, rounds=3)
            for way, cost in costs.items():
                loss = cost.loss / TOKENS
                print(
                    f"{way:16}{vocabulary:10,}{width:7}{cost.seconds:8.2f}{cost.memory_mib:10.0f}{loss:12.6f}",
                    flush=True,
                )
            found = ratios(costs)
            for name, ratio in found.items():
                key = name if width == WIDTH else f"{name}_width_{width}"
                figures.setdefault(key, {})[str(vocabulary)] = round(ratio, 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
