"""Measures the gain from batch shares in proportion to the devices' speeds, planned beforehand or found in training.

    python -m benchmarks.heterogeneous [--quick]

Needs root and Docker's programs (tests/rig/install.sh). Two Docker hosts of the test rig may use 1.0 and 0.5 cores; a
Llama of 1.3M parameters trains on one rank each under ddp, always on the same global batches:

    equal        equal shares, as if the hosts were alike
    planned      shares by the hosts' rates, measured in their containers beforehand
    rebalanced   equal shares at first, then adjusted to the measured steps; timed in the second half of the run

A step's time is the median over a run's steps, the speed-up the median over the repetitions. If one of two hosts is
twice as fast, the gain is 1.5x at most.

Then replicas of unlike shape are compared, on three hosts that may use 1.0, 0.5 and 0.5 cores. The small hosts are
planned with SMALL_GIB of memory, too little for the model's training state, so that plain ddp is not possible:

    pp           one pipeline of all three hosts, in equal stages
    fsdp         all three hosts, each layer gathered when it is needed; shares by speed
    unlike       the first host alone, and the other two as a pipeline; shares by speed
    auto         the layout that the planner chooses (not with --quick)

A pipeline of equal stages is as fast as its slowest stage, so `pp` uses 1.5 of the 2.0 cores, and with n micro-batches
a step it is busy n / (n + 2) of the time. In `unlike` one core is always busy, and the pipeline's core n / (n + 1) of
the time. So the gain over `pp` can be 2.0 / 1.5 = 1.33x if n is large, and 1.39x with the plan's 16 micro-batches for
`pp` and 6 for `unlike`. `unlike` is faster than `fsdp` because `fsdp` sends more and recomputes for lack of memory.

Then benchmarks/slow_link.py measures compressed gradients at 100 Mbit.
The last line is one JSON object: `speedup_planned_vs_equal`, `speedup_rebalanced_vs_equal`, `step_s` and `loss` (after
the same tokens) by way, `speedup_unlike_replicas_vs_best_uniform` and `unlike_replicas`, and all of slow_link's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.slow_link import show as show_link
from benchmarks.slow_link import slow_link
from benchmarks.support.hosts import docker_hosts, home_and_tokens
from tasks.launch.check_hosts import prepare_hosts
from tests.support.configs import tiny_config
from tests.support.launched_runs import train
from tests.support.rig.rig import Rig
from tests.support.rig.runs import docker_config, make_docker_run
from training.records.inventory import Device, Inventory
from training.records.plan import RunPlan
from training.tracking.rows import read_rows

CPUS = (1.0, 0.5)
UNLIKE_CPUS, SMALL_GIB = (1.0, 0.5, 0.5), 1.05
UNIFORM: dict[str, dict[str, Any]] = {
    "pp": {"parallel__strategy": "ddp", "parallel__pp": 3},
    "fsdp": {"parallel__strategy": "fsdp"},
}
UNLIKE: dict[str, dict[str, Any]] = {
    "unlike": {"parallel__strategy": "ddp", "parallel__stages": ((8,), (4, 4))},
    "auto": {"parallel__strategy": "auto"},
}
VOCAB, GLOBAL_BATCH = 256, 48
WARM_UP = 4  # steps, slower because of allocation and containers that still start
SPLIT_EVERY = 2  # steps; shares move after three such periods, half way each time
WAYS: dict[str, dict[str, Any]] = {
    "equal": {"parallel__shares": "equal", "parallel__rebalance": "off"},
    "planned": {"parallel__shares": "auto", "parallel__rebalance": "off"},
    "rebalanced": {"parallel__shares": "equal", "parallel__rebalance": "on"},
}


@dataclass(frozen=True)
class Outcome:
    """Figures of a run. `step_s`: median; `train_s`: all steps after the warm-up; `micro_batches`: at the end."""

    step_s: float
    train_s: float
    micro_batches: tuple[int, ...]
    loss: float


def settings(rig: Rig, cpus: Sequence[float], *, steps: int) -> dict[str, Any]:
    hosts = tuple(rig.host_config(i, slots=1, cpus=quota) for i, quota in enumerate(cpus))
    return {
        **docker_config(rig, hosts=hosts, lost_after_s=30.0, lease_s=120.0, collective_test=False),
        "model__layers": 4,
        "model__width": 128,
        "model__dropout": 0.0,
        "train__context": 128,
        "train__steps": steps,
        "train__global_batch": GLOBAL_BATCH,
        "train__micro_batch": GLOBAL_BATCH // len(cpus),
        "checkpoint__every_steps": 100_000,
        "evaluation__every_steps": 0,
        "profile__split_every_steps": SPLIT_EVERY,
    }


def measured(home: Path, common: dict[str, Any]) -> Inventory:
    """Measure the hosts as a flow does: in containers with the run's CPU quotas."""
    run_dir = home / "measured"
    run_dir.mkdir()
    return prepare_hosts(tiny_config(**common), run_dir=run_dir)


def run_one(run_dir: Path) -> Outcome:
    train(run_dir)
    plan, changes = RunPlan.read(run_dir / "plan.json"), read_rows(run_dir / "rebalances.jsonl")
    steps = [row for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row]
    settled = plan.steps // 2 if plan.rebalance else WARM_UP
    return Outcome(
        step_s=statistics.median(row["step_ms"] for row in steps if row["step"] > settled) / 1000,
        train_s=(steps[-1]["time_ms"] - steps[WARM_UP]["time_ms"]) / 1000,
        micro_batches=tuple(changes[-1]["after"]) if changes else plan.micro_batches,
        loss=steps[-1]["loss"],
    )


def unlike_speeds(
    rig: Rig, home: Path, shards: Path, machines: Inventory, *, steps: int, rounds: int
) -> dict[str, Any]:
    """Measure what unequal shares gain; runs of each kind take turns, so that a slow minute hits all of them."""
    common = settings(rig, CPUS, steps=steps)
    outcomes: dict[str, list[Outcome]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, shares in WAYS.items():
            run_dir = make_docker_run(rig, home, shards, f"{way}-{number}", 1, 1, machines=machines, **common, **shares)
            outcomes[way].append(run_one(run_dir))

    def speedup(way: str, what: str = "step_s") -> float:
        pairs = zip(outcomes["equal"], outcomes[way], strict=True)
        return round(statistics.median(getattr(equal, what) / getattr(other, what) for equal, other in pairs), 3)

    return {
        "speedup_planned_vs_equal": speedup("planned"),
        "speedup_rebalanced_vs_equal": speedup("rebalanced"),
        "speedup_rebalanced_from_the_start": speedup("rebalanced", "train_s"),
        "measured_gflops": {
            host.name: round(1000 * host.devices[0].matmul_tflops["fp32"], 1) for host in machines.hosts
        },
        "micro_batches": {way: each[-1].micro_batches for way, each in outcomes.items()},
        "step_s": {way: round(statistics.median(one.step_s for one in each), 3) for way, each in outcomes.items()},
        "loss": {way: each[-1].loss for way, each in outcomes.items()},
        "tokens": steps * GLOBAL_BATCH * common["train__context"],
    }


def unlike_replicas(rig: Rig, home: Path, shards: Path, machines: Inventory, *, quick: bool) -> dict[str, Any]:
    """Measure what a replica of two small hosts beside one large one gains over layouts whose replicas are alike."""
    common = settings(rig, UNLIKE_CPUS, steps=9 if quick else 24) | {
        "model__layers": 8,
        "model__width": 384,
        "model__heads": 8,
        "train__context": 64,
        "train__global_batch": 48,
        "train__micro_batch": 0,
        "parallel__rebalance": "off",
    }
    large, *small = machines.hosts
    small = [host.model_copy(update={"devices": (_with_memory(host.devices[0], SMALL_GIB),)}) for host in small]
    planned_on = Inventory(hosts=(large, *small))

    def run_dir_of(way: str, number: int, **layout: Any) -> Path:
        name = f"replicas-{way}-{number}"
        return make_docker_run(rig, home, shards, name, 1, 1, 1, machines=planned_on, **common | layout)

    ways = UNIFORM | {way: layout for way, layout in UNLIKE.items() if way != "auto" or not quick}
    made: dict[str, Path] = {}
    outcomes: dict[str, list[Outcome]] = {way: [] for way in ways}
    for number in range(1 if quick else 3):
        made = {way: run_dir_of(way, number, **layout) for way, layout in ways.items()}
        for way, run_dir in made.items():
            outcomes[way].append(run_one(run_dir))
    step_s = {way: statistics.median(one.step_s for one in each) for way, each in outcomes.items()}
    plans = {way: RunPlan.read(run_dir / "plan.json") for way, run_dir in made.items()}
    best_uniform_s = min(step_s[way] for way in UNIFORM)
    found = {
        "step_s": {way: round(seconds, 3) for way, seconds in step_s.items()},
        "predicted_step_s": {way: round(plan.predicted.step_ms / 1000, 3) for way, plan in plans.items()},
        "micro_batches": {way: (plan.micro_batches, plan.accumulation) for way, plan in plans.items()},
        "loss": {way: each[-1].loss for way, each in outcomes.items()},
        "stages": {way: plan.stages for way, plan in plans.items()},
        "cpus": UNLIKE_CPUS,
    }
    speedup = round(best_uniform_s / step_s["unlike"], 3)
    return {"speedup_unlike_replicas_vs_best_uniform": speedup, "unlike_replicas": found}


def _with_memory(device: Device, memory_gib: float) -> Device:
    return device.model_copy(update={"memory_gib": memory_gib})


def run(rig: Rig, *, quick: bool) -> dict[str, Any]:
    with home_and_tokens(rig, vocab_size=VOCAB) as (home, shards):
        machines = measured(home, settings(rig, UNLIKE_CPUS, steps=1))
        names = [host.name for host in rig.hosts[: len(CPUS)]]  # the inventory has the fastest first
        two = Inventory(hosts=tuple(host for host in machines.hosts if host.name in names))
        shares = unlike_speeds(rig, home, shards, two, steps=28 if quick else 60, rounds=1 if quick else 3)
        replicas = unlike_replicas(rig, home, shards, machines, quick=quick)
        return shares | replicas | slow_link(rig, home, shards, quick=quick)


def show(result: dict[str, Any]) -> None:
    tokens = f"after {result['tokens']:,} tokens"
    print(f"{'shares':12}{'sequences':>12}{'s a step':>10}{'speed-up':>10}{'loss':>10} {tokens}")
    for way, step_s in result["step_s"].items():
        sizes, gain = " + ".join(map(str, result["micro_batches"][way])), result["step_s"]["equal"] / step_s
        print(f"{way:12}{sizes:>12}{step_s:10.3f}{gain:10.2f}{result['loss'][way]:10.5f}")
    replicas = result["unlike_replicas"]
    print(f"\n{'replicas':12}{'micro-batches':>20}{'s a step':>10}{'predicted':>10}{'loss':>10}")
    for way, step_s in replicas["step_s"].items():
        sizes, accumulation = replicas["micro_batches"][way]
        made = f"{accumulation} x ({' + '.join(map(str, sizes))})"
        print(f"{way:12}{made:>20}{step_s:10.3f}{replicas['predicted_step_s'][way]:10.3f}{replicas['loss'][way]:10.5f}")
    gain = result["speedup_unlike_replicas_vs_best_uniform"]
    print(f"unlike replicas are {gain:.2f}x as fast as the best uniform layout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, and fewer steps, instead of 3 times")
    quick = parser.parse_args().quick
    began = time.monotonic()
    with docker_hosts() as rig:
        rig.favour()
        result = run(rig, quick=quick)
    show(result)
    print()
    show_link(result)
    print(json.dumps(result | {"cpus": CPUS, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
