"""Measures how many tokens Muon takes to AdamW's final loss, and what its step costs.

    python -m benchmarks.loss_per_token [--quick] [--search] [--text FILE]

Both optimizers train the same model from the same weights on the same batches, in fp32, at a constant learning rate
after a warm-up, so that a run's loss after n tokens is that of a run of n tokens. The held-out loss is measured every
EVALUATE_STEPS steps. `--search` finds each optimizer's rate by the lowest final loss over the same RATES, with a seed
of its own, and writes them to the results beside this file; without it the rates there are used. Tokens to a loss are
read off Muon's curve by linear interpolation. Both optimizers run at the same time, one thread each, so that other load
on the machine meets both.

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
from typing import Any

from benchmarks.support.race import Contestant, race, ratio
from benchmarks.support.workload import Size, inventory, measure, write_corpus, write_plan
from tests.support.ranks import run_ranks
from training.records.inventory import Measured
from training.tracking.rows import read_rows

RESULTS = Path(__file__).with_name("loss_per_token.json")
OPTIMIZERS = ("adamw", "muon")
RATES = (1e-3, 3e-3, 1e-2)
VOCAB_SIZE, STEPS, EVALUATE_STEPS, WARMUP_STEPS, SEARCH_SEED = 65, 250, 10, 20, 1
SIZES = (
    Size("width 64", {"layers": 2, "heads": 2, "width": 64}, VOCAB_SIZE, 64, 16, 16, EVALUATE_STEPS),
    Size("width 96", {"layers": 3, "heads": 3, "width": 96}, VOCAB_SIZE, 64, 16, 16, EVALUATE_STEPS),
)
# 100 x width tokens a step, on 2 ranks
STEP = Size("width 128", {"layers": 4, "heads": 4, "width": 128}, VOCAB_SIZE, 64, 200, 50, 1)


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


def train(folder: Path, size: Size, *, measured: Measured, optimizer: str, rate: float, seed: int) -> Curve:
    """Train one model in one process of one thread."""
    run_dir = folder / f"{size.name} {optimizer} {rate} {seed}"
    settings = {"optimizer": optimizer, "learning_rate": rate, "seed": seed, "warmup_steps": WARMUP_STEPS}
    write_plan(
        run_dir,
        size=replace(size, train=settings),
        shards_dir=folder,
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
    return Curve(losses, size.batch * size.context / statistics.median(rates))


def search(folder: Path, size: Size, optimizer: str, *, measured: Measured) -> tuple[float, dict[str, float]]:
    """Return the learning rate of the lowest final loss, and the final loss of each."""
    with ThreadPoolExecutor(2) as pool:
        one = functools.partial(train, folder, size, measured=measured, optimizer=optimizer, seed=SEARCH_SEED)
        curves = pool.map(lambda rate: one(rate=rate), RATES)
    finals = {rate: curve.final for rate, curve in zip(RATES, curves, strict=True)}
    best = min(finals, key=finals.__getitem__)
    print(f"{folder.name}, {size.name}, {optimizer}: {best:g} of {finals}", flush=True)
    return best, {f"{rate:g}": round(final, 4) for rate, final in finals.items()}


def compare(
    folder: Path, size: Size, rates: dict[str, float], *, measured: Measured, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Train with both optimizers from each seed; return AdamW's and Muon's losses, and the ratios."""
    found = []
    for seed in seeds:
        with ThreadPoolExecutor(2) as pool:
            one = functools.partial(train, folder, size, measured=measured, seed=seed)
            adamw, muon = pool.map(lambda name: one(optimizer=name, rate=rates[name]), OPTIMIZERS)  # noqa: B023
        tokens_ratio = muon.steps_to(adamw.final) / max(adamw.losses)
        found.append(
            {
                "seed": seed,
                "adamw_loss": round(adamw.final, 4),
                "muon_loss": round(muon.final, 4),
                "tokens_ratio": round(tokens_ratio, 3),
                "time_ratio": round(tokens_ratio * muon.step_s / adamw.step_s, 3),
            }
        )
        print(f"{folder.name:10} {size.name:10} {found[-1]}", flush=True)
    return found


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
    parser.add_argument("--search", action="store_true", help="search the learning rates, and write the results")
    parser.add_argument("--text", type=Path, help="the second corpus: a text file")
    parser.add_argument("--seeds", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--turns", type=int, default=5, help="of each optimizer, to compare their steps")
    args = parser.parse_args()
    committed = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results: dict[str, Any] = {"rates": committed.get("rates", {}), "searched": committed.get("searched", {})}
    corpora = {"stdlib": None} | ({args.text.stem: args.text} if args.text and not args.quick else {})
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(Path(temporary), threads=1)
        for corpus, text in corpora.items():
            folder = Path(temporary) / corpus
            write_corpus(folder, vocab_size=VOCAB_SIZE, text=text)
            for size in SIZES[:1] if args.quick else SIZES:
                rates = results["rates"].get(f"{corpus}, {size.name}") or results["rates"].get(f"stdlib, {size.name}")
                if args.search or rates is None:
                    found = {name: search(folder, size, name, measured=measured) for name in OPTIMIZERS}
                    rates = {name: best for name, (best, _) in found.items()}
                    results["searched"][f"{corpus}, {size.name}"] = {name: each for name, (_, each) in found.items()}
                results["rates"][f"{corpus}, {size.name}"] = rates
                seeds = args.seeds[:1] if args.quick else args.seeds
                for each in compare(folder, size, rates, measured=measured, seeds=seeds):
                    runs.append({"corpus": corpus, "size": size.name} | each)
        steps = {
            strategy: round(step_time(Path(temporary) / "stdlib", strategy, measured=measured, turns=args.turns), 3)
            for strategy in (("ddp",) if args.quick else ("ddp", "fsdp"))
        }
    medians = {key: round(statistics.median(run[key] for run in runs), 3) for key in ("tokens_ratio", "time_ratio")}
    if not args.quick:
        RESULTS.write_text(json.dumps(results | {"runs": runs, **medians, "step_time_ratio": steps}, indent=1) + "\n")
    print(json.dumps({**medians, "step_time_ratio": steps, "runs": runs}))


if __name__ == "__main__":
    main()
