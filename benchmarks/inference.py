"""Compares tokens/s of the torch engine on this CPU, for each way to share a model, with Hugging Face's `generate`.

    python -m benchmarks.inference [--quick]

All contestants run one model with random weights, greedily, in fp32, on all cores (2 ranks: half of the cores each).
They are loaded first and then take turns, so that a busy moment of the machine affects all alike. They get one prompt,
then several of unlike length: `generate` gets these as one left-padded batch, the engine as simultaneous requests. The
engine's text must equal `generate`'s.
The last line is one JSON object: `tokens_per_s` and `ratio_vs_hf_generate` by contestant, for 1 prompt and for several.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tasks.hardware.machine import usable_cores
from tasks.inference.torch_ranks import TorchRanks
from training.records.decoding import DecodePlan, DecodeRequest

CONTEXT = 512
SIZES: dict[str, dict[str, Any]] = {
    "10M": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024},
    "100M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
}
VOCAB = 8192
LAYOUTS: dict[str, tuple[Literal["none", "data", "tensor", "pipeline"], int]] = {
    "1 rank": ("none", 1),
    "data 2": ("data", 2),
    "tensor 2": ("tensor", 2),
    "pipeline 2": ("pipeline", 2),
}
HF = "HF generate"
SPIN = {"GOMP_SPINCOUNT": "1000"}
Texts = list[list[int]]


def prompts(number: int) -> Texts:
    """Return random prompts of 16 to 128 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [16 + 112 * i // max(1, number - 1) for i in range(number)]
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def by_hf(folder: Path, *, new_tokens: int) -> Callable[[Texts], Texts]:
    torch.set_num_threads(usable_cores())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False).eval()
    model.generation_config.eos_token_id = None

    def complete(prompt_ids: Texts) -> Texts:
        longest = max(map(len, prompt_ids))
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompt_ids])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids])
        made = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
        texts: Texts = made[:, longest:].tolist()
        return texts

    return complete


def by_engine(ranks: TorchRanks, *, new_tokens: int) -> Callable[[Texts], Texts]:
    greedy: dict[str, Any] = {"temperature": 0, "top_k": 0, "top_p": 1, "seed": 0, "stop_id": None}

    def complete(prompt_ids: Texts) -> Texts:
        queues = [
            ranks.submit(DecodeRequest(number=number, ids=tuple(ids), new_tokens=new_tokens, **greedy))
            for number, ids in enumerate(prompt_ids)
        ]
        return [[token for token in iter(queue.get, None) if isinstance(token, int)] for queue in queues]

    return complete


def start(layout: str, folder: Path) -> TorchRanks:
    parallel, degree = LAYOUTS[layout]
    plan = DecodePlan(
        folder=str(folder),
        parallel=parallel,
        degree=degree,
        device_kind="cpu",
        precision="fp32",
        context=CONTEXT,
        threads_per_rank=max(1, usable_cores() // degree),
    )

    def died() -> None:
        raise RuntimeError(f"the ranks of {layout} died")

    return TorchRanks(plan, on_death=died)


def race(contestants: dict[str, Callable[[Texts], Texts]], prompt_ids: Texts, *, turns: int) -> dict[str, list[float]]:
    """Return each contestant's tokens/s by turn. Raises RuntimeError if a text differs from that of `generate`."""
    expected = contestants[HF](prompt_ids)
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, complete in contestants.items():
            began = time.perf_counter()
            texts = complete(prompt_ids)
            seconds = time.perf_counter() - began
            if texts != expected:
                raise RuntimeError(f"{name} does not give the text of {HF}")
            if turn:  # the first one warms up
                speeds[name].append(sum(map(len, texts)) / seconds)
    return speeds


def report(name: str, speeds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    print(f"\n{name}\n{'':14}{'tokens/s':>10}{'of HF generate':>16}")
    figures = {}
    for contestant, own in speeds.items():
        ratios = [a / b for a, b in zip(own, speeds[HF], strict=True)]
        figures[contestant] = {"tokens_per_s": round(statistics.median(own), 1)}
        figures[contestant]["ratio_vs_hf_generate"] = round(statistics.median(ratios), 2)
        print(f"{contestant:14}{statistics.median(own):10.1f}{statistics.median(ratios):15.2f}x", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model, fewer turns; under 2 minutes")
    parser.add_argument("--size", choices=SIZES, help="default: 100M, with --quick 10M")
    args = parser.parse_args()
    if "GOMP_SPINCOUNT" not in os.environ:  # set for the ranks too; `generate`'s threads must not spin either
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.inference", *sys.argv[1:]], {**os.environ, **SPIN})
    size, turns, new_tokens = args.size or ("10M" if args.quick else "100M"), 3 if args.quick else 7, 48
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        settings = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=CONTEXT, **SIZES[size])
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(settings)
        model.save_pretrained(temporary)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size}: {parameters:,} parameters, {usable_cores()} cores, {new_tokens} new tokens a prompt")
        engines = {layout: start(layout, Path(temporary)) for layout in LAYOUTS}
        try:
            contestants = {HF: by_hf(Path(temporary), new_tokens=new_tokens)}
            contestants |= {name: by_engine(ranks, new_tokens=new_tokens) for name, ranks in engines.items()}
            for number in (1, 8):
                name = f"{number} prompt{'s' if number > 1 else ''} at a time"
                figures[str(number)] = report(name, race(contestants, prompts(number), turns=turns))
        finally:
            for ranks in engines.values():
                ranks.close()
    keys = ("tokens_per_s", "ratio_vs_hf_generate")
    by_key = {key: {n: {c: row[key] for c, row in rows.items()} for n, rows in figures.items()} for key in keys}
    print(json.dumps({**by_key, "parameters": parameters, "cores": usable_cores(), "new_tokens": new_tokens}))


if __name__ == "__main__":
    main()
