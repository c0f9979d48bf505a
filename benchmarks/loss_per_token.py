"""Measures how many tokens Muon takes to AdamW's final loss, and what its step costs.

    python -m benchmarks.loss_per_token [--quick] [--search] [--text FILE]

Both optimizers train the same model from the same weights on the same batches, in fp32, at a constant learning rate
after a warm-up, so that a run's loss after n tokens is that of a run of n tokens. The held-out loss is measured every
EVALUATE_STEPS steps. Each optimizer's rate, for each size, is that of the lowest final loss over RATES on the standard
library, with a seed of its own. The results beside this file keep these losses; `--search` trains at the rates that
they lack, adds them, and ends. Tokens to a loss are read off Muon's curve by linear interpolation. Runs of both
optimizers go at the same time, one thread each, so that other load on the machine meets both.

Two sizes and two corpora: this Python's standard library, and the text of `--text`. Then both optimizers take turns on
2 ranks under ddp and fsdp, at 100 x width tokens a step (benchmarks/support/race.py). `--quick`: the smaller size, the
standard library, one seed.

The last line is one JSON object: `tokens_ratio`, Muon's tokens to AdamW's final loss through AdamW's, the median over
sizes, corpora and seeds; `time_ratio`, the same in seconds; `step_time_ratio`, by strategy.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.support.race import Contestant, race, ratio
from benchmarks.support.workload import Size, inventory, measure, write_corpus, write_plan
from tests.support.ranks import run_ranks
from training.records.inventory import Measured
from training.tracking.rows import read_rows

RESULTS = Path(__file__).with_name("loss_per_token.json")
OPTIMIZERS = ("adamw", "muon")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
VOCAB_SIZE, STEPS, EVALUATE_STEPS, WARMUP_STEPS, SEARCH_SEED = 65, 200, 10, 20, 1
SIZES = {
    size.name: size
    for size in (
        Size("width 64", {"layers": 2, "heads": 2, "width": 64}, VOCAB_SIZE, 64, 16, 16, EVALUATE_STEPS),
        Size("width 96", {"layers": 3, "heads": 3, "width": 96}, VOCAB_SIZE, 64, 16, 16, EVALUATE_STEPS),
    )
}
# 100 x width tokens a step, on 2 ranks
STEP = Size("width 128", {"layers": 4, "heads": 4, "width": 128}, VOCAB_SIZE, 64, 200, 50, 1)
Searched = dict[str, dict[str, dict[str, float]]]  # size -> optimizer -> learning rate -> final loss


@dataclass(frozen=True)
class Curve:
    """A run's held-out losses by step, and its median seconds a step."""

    losses: dict[int, float]
    step_s: float

    @property
    def final(self) -> float:
        return self.losses[max(self.losses)]

    def steps_to(self, loss: float) -> float:
        """Return the steps to a loss, between two measurements by a line; infinite if it is not reached."""
        before = 0, float("inf")
        for step, now in self.losses.items():
            if now <= loss:
                share = (before[1] - loss) / (before[1] - now) if before[1] < float("inf") else 1.0
                return before[0] + share * (step - before[0])
            before = step, now
        return float("inf")


@dataclass(frozen=True)
class Run:
    corpus: str
    size: str
    optimizer: str
    rate: float
    seed: int


def train(folder: Path, run: Run, *, measured: Measured) -> Curve:
    """Train one model in one process of one thread."""
    size, run_dir = SIZES[run.size], folder / f"{run.corpus} {run.size} {run.optimizer} {run.rate} {run.seed}"
    settings = {"optimizer": run.optimizer, "learning_rate": run.rate, "seed": run.seed, "warmup_steps": WARMUP_STEPS}
    write_plan(
        run_dir,
        size=replace(size, train=settings),
        shards_dir=folder / run.corpus,
        inventory=inventory(measured, ranks=1, threads=1),
        steps=STEPS,
        compiled=False,
        parallel={"strategy": "single", "precision": "fp32"},
        evaluation={"every_steps": EVALUATE_STEPS},
    )
    run_ranks(run_dir / "plan.json")
    rows = read_rows(run_dir / "metrics.jsonl")
    losses = {int(row["step"]): float(row["val_loss"]) for row in rows if "val_loss" in row}
    rates = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
    print(f"{run_dir.name}: {losses[max(losses)]:.4f}", flush=True)
    return Curve(losses, size.batch * size.context / statistics.median(rates))


def train_all(folder: Path, runs: Sequence[Run], *, measured: Measured, at_once: int) -> dict[Run, Curve]:
    with ThreadPoolExecutor(at_once) as pool:
        curves = pool.map(functools.partial(train, folder, measured=measured), runs)
        return dict(zip(runs, curves, strict=True))


def untried(sizes: Sequence[str], searched: Searched) -> list[Run]:
    return [
        Run("stdlib", size, name, rate, SEARCH_SEED)
        for size in sizes
        for rate in RATES
        for name in OPTIMIZERS
        if f"{rate:g}" not in searched.get(size, {}).get(name, {})
    ]


def compared(adamw: Curve, muon: Curve) -> dict[str, float]:
    tokens_ratio = muon.steps_to(adamw.final) / max(adamw.losses)
    return {
        "adamw_loss": round(adamw.final, 4),
        "muon_loss": round(muon.final, 4),
        "tokens_ratio": round(tokens_ratio, 3),
        "time_ratio": round(tokens_ratio * muon.step_s / adamw.step_s, 3),
    }


def step_time(folder: Path, strategy: str, *, measured: Measured, turns: int) -> float:
    """Return the seconds of Muon's step through AdamW's, on 2 ranks of one thread."""
    contestants = [Contestant(name, folder / f"{strategy} {name}") for name in OPTIMIZERS]
    for contestant in contestants:
        write_plan(
            contestant.run_dir,
            size=replace(STEP, train={"optimizer": contestant.name}),
            shards_dir=folder,
            inventory=inventory(measured, ranks=2, threads=1),
            steps=10_000,
            compiled=False,
            parallel={"strategy": strategy, "ranks": 2, "precision": "fp32"},
        )
    race(contestants, turns=turns, rows=1, warmup_rows=1)
    return ratio(*contestants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, one corpus, one seed; under 2 minutes alone")
    parser.add_argument("--search", action="store_true", help="only train at the rates that the results lack")
    parser.add_argument("--text", type=Path, help="the second corpus: a text file")
    parser.add_argument("--sizes", nargs="*", default=[*SIZES], help="which of the sizes")
    parser.add_argument("--seeds", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--turns", type=int, default=5, help="of each optimizer, to compare their steps")
    parser.add_argument("--at-once", type=int, default=2, help="runs at one time")
    args = parser.parse_args()
    committed = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    searched: Searched = committed.get("searched", {})
    corpora = {"stdlib": None} | ({args.text.stem: args.text} if args.text and not args.quick else {})
    sizes, seeds = args.sizes, args.seeds
    if args.quick:
        sizes, seeds = sizes[:1], seeds[:1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train_runs = functools.partial(train_all, folder, measured=measure(folder, threads=1), at_once=args.at_once)
        for corpus, text in corpora.items():
            write_corpus(folder / corpus, vocab_size=VOCAB_SIZE, text=text)
        for run, curve in train_runs(untried(sizes, searched)).items():
            searched.setdefault(run.size, {}).setdefault(run.optimizer, {})[f"{run.rate:g}"] = round(curve.final, 4)
        if args.search:
            RESULTS.write_text(json.dumps(committed | {"searched": searched}, indent=1) + "\n")
            return
        best = {
            (size, name): float(min(finals, key=finals.__getitem__))
            for size in sizes
            for name, finals in searched[size].items()
        }
        keys = [(corpus, size, seed) for corpus in corpora for size in sizes for seed in seeds]
        curves = train_runs(
            [Run(corpus, size, name, best[size, name], seed) for corpus, size, seed in keys for name in OPTIMIZERS]
        )
        runs = [
            {"corpus": corpus, "size": size, "seed": seed}
            | compared(*(curves[Run(corpus, size, name, best[size, name], seed)] for name in OPTIMIZERS))
            for corpus, size, seed in keys
        ]
        medians = {key: round(statistics.median(run[key] for run in runs), 3) for key in ("tokens_ratio", "time_ratio")}
        results = {"steps": STEPS, "searched": searched, "runs": runs, **medians}
        if not args.quick:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results), flush=True)
        steps = {
            strategy: round(
                step_time(folder / "stdlib", strategy, measured=measure(folder, threads=1), turns=args.turns), 3
            )
            for strategy in ("ddp", "fsdp")
        }
    if not args.quick:
        RESULTS.write_text(json.dumps(results | {"step_time_ratio": steps}, indent=1) + "\n")
    print(json.dumps({**medians, "step_time_ratio": steps, "runs": runs}))


if __name__ == "__main__":
    main()
