"""Training speed on one GPU: Shardline, a plain loop and Hugging Face Trainer, side by side, bf16.

    python -m benchmarks.gpu [--quick] [--sizes gpt2-124m llama-1b llama-7b]

The models are GPT-2 124M, a Llama of 1.1 B and one of 6.7 B parameters; all contestants train the same weights on the
same batches. Each is a process of its own; they take turns, so that each has the GPU to itself. Then, at 1.1 B, every
strategy that one GPU can run is measured.

MFU is tokens/s x (6 N + 12 L H Q T) FLOPs per token (training/planner/model_shape.py, no recomputation), divided by the
data sheet's dense bf16 peak; the column beside it divides by what training/measure.py measures for a large product.
The last line is one JSON object: `ratio_vs_plain_loop`, `ratio_vs_hf_trainer` and `mfu` by model size, `strategies`.
Exits 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.race import Contestant, race, ratio
from benchmarks.support.workload import Size, inventory, measure, write_corpus, write_plan
from training.planner.gpu_catalog import find_gpu
from training.planner.model_shape import flops_per_token
from training.records.inventory import Measured

BASELINES = {"plain loop": "plain", "HF Trainer": "trainer"}
LLAMA_1B = {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 8, "mlp_width": 5632, "tie_embeddings": False}
LLAMA_7B = {"layers": 32, "width": 4096, "heads": 32, "mlp_width": 11008, "tie_embeddings": False}  # Llama 2 7B's
GENTLE = {"learning_rate": 1e-4}
SIZES = (
    Size(
        "gpt2-124m", {"architecture": "gpt2", "layers": 12, "heads": 12, "width": 768}, 50_257, 1024, 16, 16, 5, GENTLE
    ),
    Size("llama-1b", LLAMA_1B, 32_768, 2048, 8, 8, 2, GENTLE),
    # fp32 weights, gradients and moments take 100 GiB, bf16 copies 13: layers are recomputed to fit into 139 GiB.
    Size("llama-7b", LLAMA_7B, 32_000, 4096, 4, 4, 1, {**GENTLE, "activation_checkpointing": "full"}),
)
STRATEGIES_AT = "llama-1b"
TINY = (
    Size("gpt2-124m", {"architecture": "gpt2", "layers": 2, "heads": 2, "width": 64}, 512, 64, 4, 4, 2),
    Size("llama-1b", {"layers": 2, "heads": 2, "width": 64, "tie_embeddings": False}, 512, 64, 4, 4, 2),
)
STRATEGIES: dict[str, dict[str, str]] = {
    "single": {"strategy": "single"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, parameters offloaded": {"strategy": "fsdp", "offload": "parameters"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero2, optimizer offloaded": {"strategy": "zero2", "offload": "optimizer"},
    "zero3": {"strategy": "zero3"},
    "zero3, parameters offloaded": {"strategy": "zero3", "offload": "parameters"},
}
STEPS = 5_000


def contestant(
    name: str,
    run_dir: Path,
    *,
    size: Size,
    measured: Measured,
    parallel: dict[str, str],
    program: str = "training.train",
) -> Contestant:
    """Write the plan of a contestant's run and return the contestant. Raises ValueError if the model does not fit."""
    write_plan(
        run_dir,
        size=size,
        shards_dir=run_dir.parent / "tokens",
        inventory=inventory(measured, ranks=1, threads=4),
        steps=STEPS,
        compiled=program == "training.train",
        parallel={**parallel, "precision": "bf16"},
    )
    return Contestant(name, run_dir, program)


def take_turns(contestants: Sequence[Contestant], *, turns: int) -> list[Contestant]:
    """Run the contestants in turns; return those that did not fail. A failure, such as out of memory, is printed."""
    running = list(contestants)
    for _ in range(turns):
        for each in tuple(running):
            try:
                race([each], turns=1, rows=4, warmup_rows=2)
            except RuntimeError as error:
                print(f"{each.name} failed and is left out: {error}")
                running.remove(each)
    return running


def bf16_peak_tflops(device_name: str) -> float | None:
    """Return the data sheet's dense peak, to which MFU refers; None for a GPU that the planner's catalogue lacks."""
    gpu = find_gpu(device_name)
    return gpu.peak_tflops.get("bf16") if gpu is not None else None


def figures(each: Contestant, measured: Measured) -> dict[str, Any]:
    device, rate = measured.devices[0], each.tokens_per_s
    tflops = rate * flops_per_token(each.plan.shape) / 1e12
    sheet = bf16_peak_tflops(device.name)
    return {
        "tokens_per_s": round(rate),
        "mfu": sheet and round(tflops / sheet, 3),
        "share_of_measured": round(tflops / device.matmul_tflops["bf16"], 3),
        "peak_memory_gib": max((row.get("memory_peak/allocated_gib", 0.0) for row in each.rows), default=0.0),
    }


def report(title: str, contestants: Sequence[Contestant], measured: Measured, *, turns: int) -> dict[str, Any]:
    """Run the contestants and print a table; return their figures, each with how many times as fast the first is."""
    print(f"\n{title}", flush=True)
    running = take_turns(contestants, turns=turns)
    if contestants[0] not in running:
        return {}
    print(f"{'':30}{'tokens/s':>10}{'MFU':>8}{'of measured':>13}{'peak GiB':>10}{'first is':>10}")
    table = {}
    for each in running:
        row = table[each.name] = figures(each, measured) | {"first_ratio": round(ratio(contestants[0], each), 3)}
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        print(
            f"{each.name:30}{row['tokens_per_s']:10,}{mfu:>8}{row['share_of_measured']:13.1%}"
            f"{row['peak_memory_gib']:10.1f}{row['first_ratio']:9.2f}x",
            flush=True,
        )
    return table


def compare(size: Size, folder: Path, *, measured: Measured, turns: int) -> dict[str, dict[str, Any]]:
    write_corpus(folder / "tokens", vocab_size=size.vocab_size)
    entries = {"Shardline": "training.train"} | {
        name: f"benchmarks.baselines.{module}" for name, module in BASELINES.items()
    }
    contestants = [
        contestant(
            name, folder / program, size=size, measured=measured, parallel={"strategy": "single"}, program=program
        )
        for name, program in entries.items()
    ]
    parameters = contestants[0].plan.shape.parameters
    title = f"{size.name}: {parameters:,} parameters, {size.batch} x {size.context} tokens a step, bf16"
    return report(title, contestants, measured, turns=turns)


def strategies(size: Size, folder: Path, *, measured: Measured, turns: int) -> dict[str, dict[str, Any]]:
    write_corpus(folder / "tokens", vocab_size=size.vocab_size)
    contestants = []
    for number, (name, parallel) in enumerate(STRATEGIES.items()):
        try:
            run_dir = folder / f"{number}"
            contestants.append(contestant(name, run_dir, size=size, measured=measured, parallel=parallel))
        except ValueError as error:
            print(f"{name}: {error}")
    return report(f"{size.name} by strategy, on one device", contestants, measured, turns=turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn each instead of three, GPT-2 124M only")
    parser.add_argument("--sizes", nargs="*", choices=[size.name for size in SIZES], help="default: all")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # a trial on the CPU
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        print("benchmarks.gpu needs a CUDA device, torch sees none: use benchmarks.training on a CPU", file=sys.stderr)
        sys.exit(2)
    sizes, turns = (TINY if args.tiny else SIZES), 1 if args.quick else 3
    wanted = args.sizes or [size.name for size in (sizes[:1] if args.quick else sizes)]
    tables, by_strategy = dict[str, dict[str, Any]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measured = measure(folder, threads=4)
        device = measured.devices[0]
        print(f"{device.name}: bf16 products measured at {device.matmul_tflops['bf16']:.1f} TFLOP/s")
        for size in (size for size in sizes if size.name in wanted):
            try:
                tables[size.name] = compare(size, folder / size.name, measured=measured, turns=turns)
            except ValueError as error:
                print(f"{size.name}: {error}")
            if size.name == STRATEGIES_AT:
                by_strategy = strategies(size, folder / "strategies", measured=measured, turns=turns)
    ratios = {
        f"ratio_vs_{key}": {size: rows[name]["first_ratio"] for size, rows in tables.items() if name in rows}
        for key, name in (("plain_loop", "plain loop"), ("hf_trainer", "HF Trainer"))
    }
    mfu = {size: rows["Shardline"]["mfu"] for size, rows in tables.items() if "Shardline" in rows}
    print(json.dumps({**ratios, "mfu": mfu, "strategies": by_strategy, "figures": tables, "device": device.name}))


if __name__ == "__main__":
    main()
