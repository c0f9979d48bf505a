"""Compares whole gradients, compressed ones and local SGD on a network link that is slower than the computation.

    python -m benchmarks.slow_link [--quick]

Needs root and Docker's programs (tests/rig/install.sh). Two Docker hosts of the test rig have one rank each, and their
network carries 100 Mbit/s each way; a Llama of 3.3M parameters trains under ddp, always on the same global batches:

    dense        fp32 gradients, all-reduced
    bf16         the same in 16 bits
    topk         the tenth with the largest magnitudes, as int32 indices and fp32 values
    powersgd     products of matrices of 4 columns
    local-sgd    each host trains alone; after a cycle of steps comes an outer step (rate 0.7, Nesterov momentum 0.9)

What topk and powersgd leave out is added to the gradients of later steps. A step's time is the mean over one local-sgd
cycle with its outer step, and then the median over cycles; speed-ups are medians over the repetitions. `sent_mib` is
what a rank reports to send per step, `counted_mib` what the kernel counted on the host's interface, headers included.
`loss` and `val_loss` are those of each run after the same number of tokens. The last line is one JSON object:
`slow_link` with these figures by way, `speedup_topk_vs_dense`, `speedup_powersgd_vs_dense`, and so on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.hosts import docker_hosts, home_and_tokens
from tests.support.launched_runs import train
from tests.support.rig.network import INTERFACE, ip
from tests.support.rig.rig import Rig
from tests.support.rig.runs import docker_config, make_docker_run
from training.records.plan import RunPlan
from training.tracking.rows import read_rows

RATE = "100mbit"
VOCAB, RATIO, RANK = 256, 0.1, 4
WARM_UP = 3  # steps
WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk": {"parallel__compression": "topk", "parallel__topk_ratio": RATIO},
    "powersgd": {"parallel__compression": "powersgd", "parallel__powersgd_rank": RANK},
    "local-sgd": {"parallel__strategy": "local-sgd"},
    "bf16": {"parallel__compression": "bf16"},
}


@dataclass(frozen=True)
class Size:
    """The number of steps to run. `cycle`: steps between two outer steps of local-sgd."""

    cycle: int
    cycles: int
    rounds: int
    ways: tuple[str, ...]

    @property
    def steps(self) -> int:
        return WARM_UP + self.cycle * self.cycles


QUICK, FULL = Size(3, 2, 1, ("dense", "topk", "powersgd")), Size(20, 6, 3, tuple(WAYS))


@dataclass(frozen=True)
class Outcome:
    step_s: float
    sent_mib: float
    counted_mib: float
    loss: float
    val_loss: float


def settings(rig: Rig, size: Size) -> dict[str, Any]:
    return {
        **docker_config(rig, 1, 1, lost_after_s=60.0, lease_s=180.0, collective_test=False),
        "model__layers": 4,
        "model__width": 256,
        "model__heads": 4,
        "model__dropout": 0.0,
        "train__context": 64,
        "train__steps": size.steps,
        "train__global_batch": 8,
        "train__micro_batch": 4,
        "train__learning_rate": 1e-3,
        "parallel__bucket_mib": 4,
        "parallel__timeout_s": 120,
        "parallel__outer_every_steps": size.cycle,
        "checkpoint__every_steps": 100_000,
        "evaluation__every_steps": 100_000,
        "evaluation__quick_sequences": 64,
    }


def run_one(rig: Rig, run_dir: Path, size: Size) -> Outcome:
    before = counted_bytes(rig)
    train(run_dir)
    counted = counted_bytes(rig) - before
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = {int(row["step"]): row for row in rows if "loss" in row}
    ends = range(WARM_UP, size.steps + 1, size.cycle)
    cycles = [(steps[b]["time_ms"] - steps[a]["time_ms"]) / 1000 / size.cycle for a, b in itertools.pairwise(ends)]
    return Outcome(
        step_s=statistics.median(cycles),
        sent_mib=sum(row.get("communication_mib", 0.0) for row in steps.values()) / size.steps,
        counted_mib=counted / size.steps / 2**20,
        loss=statistics.fmean(steps[n]["loss"] for n in range(size.steps - size.cycle + 1, size.steps + 1)),
        val_loss=next(row["val_loss"] for row in reversed(rows) if "val_loss" in row),
    )


def counted_bytes(rig: Rig) -> int:
    """Return the bytes that the second host has sent, as its kernel counted them."""
    (link,) = json.loads(ip("-n", rig.network.namespaces[1], "-s", "-j", "link", "show", INTERFACE))
    return int(link["stats64"]["tx"]["bytes"])


def slow_link(rig: Rig, home: Path, shards: Path, *, quick: bool) -> dict[str, Any]:
    """Measure what compression gains; runs of each kind take turns, so that a slow minute hits all of them."""
    size = QUICK if quick else FULL
    common = settings(rig, size)
    outcomes: dict[str, list[Outcome]] = {way: [] for way in size.ways}
    for host in rig.hosts[:2]:
        rig.shape(host, RATE)
    for number in range(size.rounds):
        for way in size.ways:
            run_dir = make_docker_run(rig, home, shards, f"link-{way}-{number}", 1, 1, **(common | WAYS[way]))
            outcomes[way].append(run_one(rig, run_dir, size))
    parameters = RunPlan.read(run_dir / "plan.json").shape.parameters
    rig.reset()

    def middle(way: str, what: str, digits: int) -> float:
        return round(statistics.median(getattr(one, what) for one in outcomes[way]), digits)

    def speedup(way: str) -> float:
        pairs = zip(outcomes["dense"], outcomes[way], strict=True)
        return round(statistics.median(dense.step_s / other.step_s for dense, other in pairs), 2)

    speedups = {f"speedup_{way.replace('-', '_')}_vs_dense": speedup(way) for way in size.ways if way != "dense"}
    return speedups | {
        "slow_link": {
            "rate": RATE,
            "parameters": parameters,
            "topk_ratio": RATIO,
            "powersgd_rank": RANK,
            "outer_every_steps": size.cycle,
            "steps": size.steps,
            "tokens": size.steps * common["train__global_batch"] * common["train__context"],
            "step_s": {way: middle(way, "step_s", 3) for way in size.ways},
            "sent_mib": {way: middle(way, "sent_mib", 3) for way in size.ways},
            "counted_mib": {way: middle(way, "counted_mib", 3) for way in size.ways},
            "loss": {way: middle(way, "loss", 4) for way in size.ways},
            "val_loss": {way: middle(way, "val_loss", 4) for way in size.ways},
        }
    }


def show(result: dict[str, Any]) -> None:
    link = result["slow_link"]
    print(
        f"{link['parameters']:,} parameters, {link['rate']} each way between 2 hosts; losses after {link['tokens']:,} "
        f"tokens ({link['steps']} steps)\n{'gradients':12}{'s a step':>10}{'speed-up':>10}{'MiB sent':>10}"
        f"{'counted':>10}{'loss':>9}{'validation':>12}"
    )
    for way, step_s in link["step_s"].items():
        gain, sent, counted = link["step_s"]["dense"] / step_s, link["sent_mib"][way], link["counted_mib"][way]
        print(
            f"{way:12}{step_s:10.3f}{gain:10.2f}{sent:10.2f}{counted:10.2f}{link['loss'][way]:9.4f}"
            f"{link['val_loss'][way]:12.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="9 steps of three kinds, instead of 3 times 123 of five")
    quick = parser.parse_args().quick
    began = time.monotonic()
    with docker_hosts() as rig, home_and_tokens(rig, vocab_size=VOCAB) as (home, shards):
        result = slow_link(rig, home, shards, quick=quick)
    show(result)
    print(json.dumps(result | {"seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
