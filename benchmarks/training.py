"""Training speed on this CPU: Shardline, a plain nanoGPT-like loop, Hugging Face Trainer and Accelerate, side by side.

    python -m benchmarks.training [--quick] [--plot losses.png]

All train the same Hugging Face class from the same weights on the same batches, in fp32 on the same number of threads,
each in its own process, in turns (benchmarks/support/race.py). Shardline is `python -m training.train` with
train.compile=true; its rate, like theirs, is what it writes to metrics.jsonl. Then Shardline on 2 ranks of 1 thread
against 1 rank of 1 thread, for every strategy, on the same global batch.

FLOPs per token: 6 N + 12 L H Q T (training/planner/model_shape.py). Matmul rates are what training/measure.py finds.
The last line is one JSON object: `ratio_vs_plain_loop`, `ratio_vs_hf_trainer`, `ratio_vs_accelerate` by model size,
`scaling_2_ranks` by strategy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support.race import Contestant, loss_difference, race, ratio
from benchmarks.support.workload import Size, inventory, measure, write_corpus, write_plan
from training.measure import visible_cores
from training.planner.model_shape import flops_per_token
from training.records.inventory import Measured

VOCAB_SIZE = 65  # tiny Shakespeare's
SIZES = (
    Size("shakespeare-char", {"layers": 4, "heads": 4, "width": 128}, VOCAB_SIZE, 64, 12, 12, 10),
    Size("10M", {"layers": 6, "heads": 6, "width": 384}, VOCAB_SIZE, 256, 4, 4, 1),
)
SCALED = Size("10M", {"layers": 6, "heads": 6, "width": 384}, VOCAB_SIZE, 256, 32, 4, 1)  # 4 micro-batches a rank
BASELINES = {"plain loop": "plain", "HF Trainer": "trainer", "Accelerate": "accelerated"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "tp2": {"strategy": "ddp", "tp": 2},
    "pp2": {"strategy": "ddp", "pp": 2},
}
STEPS = 20_000  # more than any contestant gets to
COMPARED_STEPS = 100


def compare(size: Size, folder: Path, *, measured: Measured, args: argparse.Namespace) -> list[Contestant]:
    """Run Shardline and the baselines in turns; return them, Shardline first."""
    write_corpus(folder / "tokens", vocab_size=size.vocab_size, text=args.text)
    contestants = [Contestant("Shardline", folder / "shardline")]
    if not args.quick:
        contestants.append(Contestant("Shardline, eager", folder / "eager"))
    contestants += [
        Contestant(name, folder / module, f"benchmarks.baselines.{module}") for name, module in BASELINES.items()
    ]
    for contestant in contestants:
        write_plan(
            contestant.run_dir,
            size=size,
            shards_dir=folder / "tokens",
            inventory=inventory(measured, ranks=1, threads=args.threads),
            steps=STEPS,
            compiled=contestant.name == "Shardline",
            parallel={"strategy": "single", "precision": args.precision},
        )
    race(contestants, turns=2 if args.quick else 10, rows=3 if args.quick else 5, warmup_rows=1 if args.quick else 3)
    return contestants


def scale(name: str, folder: Path, *, measured: Measured, args: argparse.Namespace) -> float:
    """Return tokens/s of 2 ranks divided by those of 1 rank, 1 thread each, in the same steps on the same batches."""
    write_corpus(folder / "tokens", vocab_size=SCALED.vocab_size, text=args.text)
    contestants = [Contestant("2 ranks", folder / "two"), Contestant("1 rank", folder / "one")]
    layouts = [STRATEGIES[name] | {"ranks": 2}, {"strategy": "single"}]
    for ranks, contestant, parallel in zip((2, 1), contestants, layouts, strict=True):
        write_plan(
            contestant.run_dir,
            size=SCALED,
            shards_dir=folder / "tokens",
            inventory=inventory(measured, ranks=ranks, threads=1),
            steps=STEPS,
            compiled=True,
            parallel=parallel | {"precision": args.precision},
        )
    race(contestants, turns=2 if args.quick else 6, rows=1 if args.quick else 3, warmup_rows=1)
    return ratio(*contestants)


def matmul_scaling(folder: Path, *, precision: str) -> float:
    """Return the product rate of 2 concurrent processes divided by that of one: the limit of a gain from 2 ranks."""
    alone, one, other = (
        device.matmul_tflops[precision]
        for ranks in (1, 2)
        for device in measure(folder, threads=1, ranks=ranks).devices
    )
    scaling = round(2 * min(one, other) / alone, 3)
    print(f"2 processes x 1 thread against 1, matrix products only: {scaling:.2f}x", flush=True)
    return scaling


def report(size: Size, contestants: list[Contestant], *, tflops: float) -> dict[str, Any]:
    """Print the table and return the figures by contestant. `tflops`: the measured matmul rate."""
    ours, plan = contestants[0], contestants[0].plan
    print(f"\n{size.name}: {plan.shape.parameters:,} parameters, {size.batch} x {size.context} tokens a step")
    print(f"{plan.precision} on {plan.threads_per_rank} threads; matrix products at {1000 * tflops:.0f} GFLOP/s")
    print(f"{'':20}{'tokens/s':>10}{'ms/step':>10}{'of matmul rate':>16}{'Shardline is':>14}{'max |loss diff|':>18}")
    figures = {}
    for contestant in contestants:
        rate = contestant.tokens_per_s
        difference, steps = loss_difference(ours, contestant, steps=COMPARED_STEPS)
        figures[contestant.name] = {
            "tokens_per_s": round(rate),
            "matmul_share": round(rate * flops_per_token(plan.shape) / 1e12 / tflops, 3),
            "shardline_ratio": round(ratio(ours, contestant), 3),
            "max_loss_difference": difference,
        }
        share, times = figures[contestant.name]["matmul_share"], figures[contestant.name]["shardline_ratio"]
        print(
            f"{contestant.name:20}{rate:10,.0f}{1000 * plan.batch_tokens / rate:10.1f}{share:16.0%}"
            f"{times:13.2f}x{difference:12.1e} in {steps}"
        )
    return figures


def plot(path: Path, races: dict[str, list[Contestant]]) -> None:
    """Plot the losses by step: one panel for each size, with all contestants."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(races), figsize=(6 * len(races), 4), squeeze=False)
    for panel, (name, contestants) in zip(panels[0], races.items(), strict=True):
        for contestant, style in zip(contestants, ("-", ":", "--", "-.", ":"), strict=False):
            curve = [(row["step"], row["loss"]) for row in contestant.rows if "loss" in row]
            panel.plot(*zip(*curve, strict=True), style, label=contestant.name)
        panel.set(title=name, xlabel="step", ylabel="training loss (nats per token)")
        panel.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, and scaling of ddp only; under 2 minutes")
    parser.add_argument("--text", type=Path, help="train on this file instead of the standard library")
    parser.add_argument("--threads", type=int, default=visible_cores(), help="of each contestant (default: all cores)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sizes", nargs="*", default=[size.name for size in SIZES], help="which of the sizes")
    parser.add_argument("--scaling", nargs="*", help="strategies to scale (default: all that can)")
    parser.add_argument("--plot", type=Path, help="draw the loss curves to this file")
    args = parser.parse_args()
    scaled = args.scaling if args.scaling is not None else ["ddp"] if args.quick else list(STRATEGIES)
    figures, scaling, races = dict[str, Any](), dict[str, float](), dict[str, list[Contestant]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measured = measure(folder, threads=args.threads)
        rates = [measured.devices[0].matmul_tflops[args.precision]]
        for size in (size for size in SIZES if size.name in args.sizes):
            races[size.name] = compare(size, folder / size.name, measured=measured, args=args)
        # Measure twice and take the higher rate: a busy moment lowers a rate, nothing raises it.
        rates.append(measure(folder, threads=args.threads).devices[0].matmul_tflops[args.precision])
        for size in (size for size in SIZES if size.name in races):
            figures[size.name] = report(size, races[size.name], tflops=max(rates))
        if args.plot:
            plot(args.plot, races)
        ceiling = matmul_scaling(folder, precision=args.precision) if scaled else None
        for name in scaled:
            try:
                scaling[name] = round(scale(name, folder / name, measured=measured, args=args), 3)
                print(f"2 ranks x 1 thread against 1 rank x 1 thread, {name:6} {scaling[name]:.2f}x", flush=True)
            except (RuntimeError, ValueError) as error:
                print(f"{name}: {error}")
    ratios = {
        f"ratio_vs_{key}": {size: rows[name]["shardline_ratio"] for size, rows in figures.items()}
        for key, name in (("plain_loop", "plain loop"), ("hf_trainer", "HF Trainer"), ("accelerate", "Accelerate"))
    }
    settings = {"threads": args.threads, "precision": args.precision, "matmul_gflops": round(1000 * max(rates))}
    scalings = {"scaling_2_ranks": scaling, "matmul_scaling_2_processes": ceiling}
    print(json.dumps({**ratios, **scalings, "figures": figures, **settings}))


if __name__ == "__main__":
    main()
