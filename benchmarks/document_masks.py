"""Compares training on packed documents with a dense attention mask and, as today, with attention by document.

    python -m benchmarks.document_masks [--quick]

before    a bool mask of context x context for each sequence, for torch's scaled_dot_product_attention
after     training/models/document_attention.py; on a CPU torch's fused attention document by document

Both ways take turns with the forward and backward pass of a small Llama, in fp32 on one thread, on one sequence. Its
documents have log-normal lengths with a median of 256 tokens, as in web text. Time is CPU time, which other programs
disturb least; memory is the kernel's peak minus what was in use before. Both ways get the same loss.

The last line is one JSON object: `time_ratio` and `memory_ratio` (before / after) of the step, and
`attention_time_ratio` of one layer's attention alone, each by context.
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

from benchmarks.support.cost import Cost, measure, medians
from training.models import document_attention
from training.models.document_attention import attend, document_bounds
from training.models.language_model import LanguageModel, attention_mask

CONTEXTS = (2048, 4096)
WIDTH, HEADS, LAYERS, VOCABULARY = 256, 4, 4, 8192
MEDIAN_TOKENS, SPREAD = 256, 1.0  # of a document's length: the median, and the logarithm's standard deviation


def documents_of(context: int) -> Tensor:
    """Return int64 [1, context]: the number of each token's document."""
    lengths = torch.empty(context).log_normal_(0, SPREAD).mul_(MEDIAN_TOKENS).long().clamp(min=1)
    return torch.arange(context).repeat_interleave(lengths)[None, :context]


def model_of(context: int) -> LanguageModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    more = {"intermediate_size": 3 * WIDTH, "max_position_embeddings": context}
    return LanguageModel(
        AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **more)), precision="fp32"
    )


def step(model: LanguageModel, documents: Tensor, tokens: Tensor, shortest: int) -> Tensor:
    """Return the loss, with attention by document if the context has at least `shortest` tokens."""
    document_attention.CPU_CONTEXT = shortest
    loss: Tensor = model(tokens, tokens, documents=documents)
    return loss / tokens.numel()


def dense(tensors: list[Tensor], documents: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*tensors, attn_mask=attention_mask(documents, causal=True)).square().mean()


def by_document(tensors: list[Tensor], documents: Tensor) -> Tensor:
    bounds = document_bounds(documents, [slice(0, documents.shape[1])], causal=True)
    return attend(*tensors, bounds, causal=True, scale=None).square().mean()


def race(context: int, *, rounds: int) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Return the costs of a step, and of one layer's attention, before and after."""
    torch.manual_seed(0)
    documents, tokens, model = documents_of(context), torch.randint(VOCABULARY, (1, context)), model_of(context)
    heads = [torch.randn(1, HEADS, context, WIDTH // HEADS, requires_grad=True) for _ in range(3)]
    steps: dict[str, Callable[[], Tensor]] = {
        "before": functools.partial(step, model, documents, tokens, context + 1),
        "after": functools.partial(step, model, documents, tokens, 0),
    }
    attention: dict[str, Callable[[], Tensor]] = {
        "before": functools.partial(dense, heads, documents),
        "after": functools.partial(by_document, heads, documents),
    }
    parameters = list(model.parameters())
    return (
        medians({way: functools.partial(measure, loss_of, parameters) for way, loss_of in steps.items()}, rounds),
        medians({way: functools.partial(measure, loss_of, heads) for way, loss_of in attention.items()}, rounds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once each; under 2 minutes")
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    race(512, rounds=1)  # warms up
    figures: dict[str, Any] = {"time_ratio": {}, "memory_ratio": {}, "attention_time_ratio": {}}
    print(f"{'':10}{'context':>8}{'CPU s':>9}{'peak MiB':>10}{'loss':>12}{'attention CPU s':>17}")
    for context in args.contexts:
        steps, attention = race(context, rounds=1 if args.quick else 5)
        for way, cost in steps.items():
            print(
                f"{way:10}{context:8,}{cost.seconds:9.2f}{cost.memory_mib:10.0f}{cost.loss:12.6f}"
                f"{attention[way].seconds:17.3f}",
                flush=True,
            )
        ratios = {
            "time_ratio": steps["before"].seconds / steps["after"].seconds,
            "memory_ratio": steps["before"].memory_mib / steps["after"].memory_mib,
            "attention_time_ratio": attention["before"].seconds / attention["after"].seconds,
        }
        for name, ratio in ratios.items():
            figures[name][str(context)] = round(ratio, 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
