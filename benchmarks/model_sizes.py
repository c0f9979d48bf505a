"""Measures the held-out loss of four sizes of model against the compute of their training, and fits a power law.

    python -m benchmarks.model_sizes [--quick] [--tokens-per-parameter N] [--plot FILE.png]

Each model is what `model.size` makes of a size: its shape, batch, learning rate and warm-up. It sees fewer tokens than
the rule's 20 for each parameter, and its learning rate falls over these. The text is this Python's standard library
by characters. One process of one thread trains each in fp32; neither losses nor FLOPs depend on what else the machine
does. FLOPs are 6 x parameters x tokens, as in the rule. `--quick`: the two smallest, for 0.4 tokens a parameter.

The last line is one JSON object: `exponent`, of compute in the loss; `sizes`, with each one's parameters, tokens, FLOPs
and held-out loss.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.support.workload import inventory, measure, write_corpus
from tests.support.ranks import run_ranks
from training.config.run import RunConfig
from training.config.size_rule import parameters
from training.planner.plan import make_plan
from training.records.inventory import Inventory
from training.records.token_shards import TokenShards
from training.tracking.rows import read_rows

SIZES = ("55K", "400K", "900K", "1.3M")
VOCAB_SIZE, CONTEXT, VALIDATIONS = 65, 128, 8
TOKENS_PER_PARAMETER, QUICK_TOKENS_PER_PARAMETER = 1.0, 0.4


@dataclass(frozen=True)
class Trained:
    """A model that was trained. `losses`: held-out, in nats per character, by FLOPs."""

    size: str
    shape: str
    parameters: int
    learning_rate: float
    tokens: int
    losses: dict[float, float]

    @property
    def flops(self) -> float:
        return max(self.losses)

    @property
    def loss(self) -> float:
        return self.losses[self.flops]


def train(size: str, folder: Path, shards: TokenShards, *, machine: Inventory, per_parameter: float) -> Trained:
    max_tokens = round(per_parameter * parameters(size))
    content = {
        "name": "size",
        "data": {"path": "stdlib", "tokenizer": {"kind": "characters"}},
        "model": {"size": size},
        "train": {"context": CONTEXT, "max_tokens": max_tokens, "compile": False},
        "parallel": {"strategy": "single", "precision": "fp32"},
    }
    batch = RunConfig.model_validate(content).train.global_batch * CONTEXT
    every = max(1, max_tokens // batch // VALIDATIONS)
    content["evaluation"] = {"every_steps": every, "quick_sequences": 512, "samples_while_training": 0}
    config = RunConfig.model_validate(content)
    plan = make_plan(config, machine, run_id=size, shards=shards, shards_dir=str(folder))
    plan.write(folder / size / "plan.json")
    run_ranks(folder / size / "plan.json")
    per_step = 6 * plan.shape.parameters * batch
    rows = read_rows(folder / size / "metrics.jsonl")
    losses = {float(per_step * row["step"]): float(row["val_loss"]) for row in rows if "val_loss" in row}
    shape = f"{config.model.layers} x {config.model.width}"
    return Trained(size, shape, plan.shape.parameters, config.train.learning_rate, plan.steps * batch, losses)


def fit(trained: list[Trained]) -> tuple[float, float]:
    """Return a and b of loss = a x FLOPs^b through the final losses."""
    exponent, constant = np.polyfit(*(np.log([[each.flops for each in trained], [each.loss for each in trained]])), 1)
    return float(np.exp(constant)), float(exponent)


def plot(path: Path, trained: list[Trained]) -> None:
    """Draw each model's loss while it trains, and the power law through the final ones."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.4))
    for each in trained:
        (line,) = axes.plot([*each.losses], [*each.losses.values()], label=f"{each.size}: {each.shape}")
        axes.plot([each.flops], [each.loss], "o", color=line.get_color())
    constant, exponent = fit(trained)
    ends = np.array([trained[0].flops / 2, trained[-1].flops * 2])
    axes.plot(ends, constant * ends**exponent, "k--", linewidth=1, label=f"compute^{exponent:.3f}")
    axes.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel="held-out loss, nats per character")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.legend(title="layers x width")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes, briefly; under 2 minutes")
    parser.add_argument("--tokens-per-parameter", type=float, default=TOKENS_PER_PARAMETER, help="of each model")
    parser.add_argument("--plot", type=Path, help="draw loss against compute to this file")
    args = parser.parse_args()
    sizes = SIZES[:2] if args.quick else SIZES
    per_parameter = QUICK_TOKENS_PER_PARAMETER if args.quick else args.tokens_per_parameter
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shards = write_corpus(folder, vocab_size=VOCAB_SIZE)
        machine = inventory(measure(folder, threads=1), ranks=1, threads=1)
        run = functools.partial(train, folder=folder, shards=shards, machine=machine, per_parameter=per_parameter)
        with ThreadPoolExecutor(2) as pool:
            trained = [*pool.map(run, sizes)]
        print(f"{'size':6}{'layers x width':>16}{'parameters':>12}{'rate':>8}{'tokens':>12}{'FLOPs':>10}{'loss':>8}")
        for each in trained:
            print(
                f"{each.size:6}{each.shape:>16}{each.parameters:12,}{each.learning_rate:8.2g}{each.tokens:12,}"
                f"{each.flops:10.1e}{each.loss:8.3f}"
            )
    if args.plot:
        plot(args.plot, trained)
    figures = [asdict(each) | {"flops": each.flops, "loss": each.loss} for each in trained]
    print(json.dumps({"exponent": round(fit(trained)[1], 4), "sizes": figures}))


if __name__ == "__main__":
    main()
