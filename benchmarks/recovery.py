"""Seconds from a failure to the next training step, and what checkpoints cost, on two Docker hosts of the test rig.

    python -m benchmarks.recovery [--quick]

Needs root and Docker's programs (tests/rig/install.sh). A Llama of 1.3M parameters trains under ddp on 2 + 1 ranks and
fails in these ways: docker kill of a node and of the first node, kill -9 of a dockerd that comes back after 3 s
(training continues meanwhile), a partition that heals, and a host that loses its power for good where launch.min_hosts
allows to continue without it. The last two include the time until a host is declared lost (launch.lost_after_s), and
the partition's own length. In all these ways every attempt imports its program anew. The two kinds of docker kill are
repeated with a standby on each host (launch.standby_after_s), which has finished its imports when the failure comes,
and with copies of the state in the hosts' memory every 5 steps (checkpoint.memory_every_steps).

Checkpoint share: how much longer an average step takes, with a checkpoint every 20 steps, than steps during which no
checkpoint is being written. The last line is one JSON object: `seconds_to_next_step` by scenario, medians over the
repetitions, `ratio_vs_cold` (seconds with a standby divided by those without, the larger of the two kinds of docker
kill), `steps_lost` (the largest number of steps made again after a failure, with copies in memory), and
`checkpoint_share`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.support.hosts import docker_hosts, home_and_tokens
from tasks.hardware.preflight import check_hosts
from tasks.launch.docker_hosts import hosts_of
from tasks.launch.rank_environment import give_to_ranks
from tasks.launch.recovery import attempts_of
from tests.support.rig.rig import Rig, RigHost
from tests.support.rig.runs import make_docker_run, train
from training.records.plan import RunPlan
from training.tracking.rows import read_rows

STEPS_BETWEEN = 6  # between two failures
RESTART_S = 3.0  # until a killed dockerd is started again
WARM = ", standby"
EVERY = 20  # steps between two checkpoints
MEMORY_EVERY = 5  # steps between two copies in memory
VOCAB = 256


@dataclass(frozen=True)
class Scenario:
    """A failure to inject. `restarts`: it ends the attempt, so the next step counts only in the next attempt."""

    name: str
    inject: Callable[[], object]
    restarts: bool = True


@dataclass(frozen=True)
class Patience:
    """The durations of the failures. `cycles`: how many cycles of EVERY steps are timed for the checkpoints' share."""

    partition_s: float
    lost_after_s: float
    cycles: int


@dataclass(frozen=True)
class Measured:
    seconds: dict[str, float]  # by scenario
    steps_lost: int
    checkpoint_share: float
    step_s: float
    stall_ms: float


QUICK, FULL = Patience(9.0, 5.0, cycles=5), Patience(45.0, 20.0, cycles=9)


class AllMeasured(Exception):
    """Ends a run once all failures were injected and timed."""


class FailureTimer:
    """Injects one failure after the other, and times each up to the first step after it; `look` is train's `on_row`.

    `undisturbed_steps`: steps before the first failure; `made`: the time at which each of these was made.
    """

    def __init__(
        self,
        run_dir: Path,
        scenarios: Sequence[Scenario],
        *,
        undisturbed_steps: int,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.run_dir, self.waiting, self.undisturbed_steps = run_dir, list(scenarios), undisturbed_steps
        self.is_ready = is_ready
        self.made: dict[int, float] = {}
        self.newest_step = 0
        self.lost: dict[str, int] = {}  # steps, by scenario
        self.seconds: dict[str, float] = {}
        self.current: Scenario | None = None
        self.since = 0.0  # the newest failure, or the first step after it
        self.ended, self.steps = 0, 0

    def look(self, row: dict[str, float]) -> None:
        made = row["time_ms"] / 1000
        if "loss" not in row or made <= self.since:
            return
        if self.current is None or not self._is_of_next_attempt(made):
            self.newest_step = int(row["step"])
        if self.current is None:
            self.steps += 1
            if row["step"] <= self.undisturbed_steps:
                self.made[int(row["step"])] = made
            elif self.waiting and self.steps > STEPS_BETWEEN and self.is_ready():  # none wait while the run stops
                self._inject()
        elif not self.current.restarts or self._is_of_next_attempt(made):
            self.seconds[self.current.name] = made - self.since
            self.lost[self.current.name] = max(0, self.newest_step + 1 - int(row["step"]))
            self.current, self.since, self.steps = None, made, 0
            if not self.waiting:
                raise AllMeasured

    def _inject(self) -> None:
        self.current = self.waiting.pop(0)
        self.ended, self.since = len(attempts_of(self.run_dir)), time.time()
        self.current.inject()

    def _is_of_next_attempt(self, made: float) -> bool:
        ended = attempts_of(self.run_dir)[self.ended :]
        return bool(ended) and made > datetime.fromisoformat(ended[-1]["ended_at"]).timestamp()


def scenarios_of(rig: Rig, *, partition_s: float) -> list[Scenario]:
    first, second, _ = rig.hosts

    def kill_daemon() -> None:
        rig.kill_daemon(second)
        threading.Timer(RESTART_S, lambda: rig.start_daemon(second)).start()

    def cut() -> None:
        rig.partition(second)
        threading.Timer(partition_s, lambda: rig.heal(second)).start()

    return [
        Scenario("docker kill", lambda: kill_node(rig, second)),
        Scenario("docker kill of the first node", lambda: kill_node(rig, first)),
        Scenario("kill -9 of dockerd", kill_daemon, restarts=False),
        Scenario("partition", cut),
    ]


def kill_node(rig: Rig, host: RigHost) -> None:
    """Kill, by `docker kill`, the container that trains on the host: the older one, if there is a standby too."""
    running = [container for container in rig.containers(host) if container.status == "running"]
    client = rig.daemons[host.index].client()
    try:
        client.api.kill(running[-1].id)  # Docker lists the newest first
    finally:
        client.close()


def make_run(rig: Rig, home: Path, shards: Path, name: str, **overrides: Any) -> Path:
    settings: dict[str, Any] = {
        "model__layers": 4,
        "model__width": 128,
        "model__dropout": 0.0,
        "train__context": 128,
        "train__steps": 100_000,
        "checkpoint__every_steps": EVERY,
        "evaluation__every_steps": 0,
    }
    return make_docker_run(rig, home, shards, name, 2, 1, **(settings | overrides))


def run_with_failures(
    run_dir: Path,
    scenarios: Sequence[Scenario],
    *,
    undisturbed_steps: int = 0,
    is_ready: Callable[[], bool] = lambda: True,
) -> FailureTimer:
    timer = FailureTimer(run_dir, scenarios, undisturbed_steps=undisturbed_steps, is_ready=is_ready)
    try:
        train(run_dir, on_row=timer.look)
    except AllMeasured:
        return timer
    raise AssertionError("the run ended before all failures were measured")


def measure(rig: Rig, home: Path, shards: Path, name: str, *, patience: Patience) -> Measured:
    settings: dict[str, Any] = {"launch__lost_after_s": patience.lost_after_s, "launch__daemon_grace_s": 60.0}
    settings["launch__standby_after_s"] = None
    run_dir = make_run(rig, home, shards, f"{name}-failing", **settings)
    timer = run_with_failures(
        run_dir, scenarios_of(rig, partition_s=patience.partition_s), undisturbed_steps=(1 + patience.cycles) * EVERY
    )
    lost = Scenario("host lost, min_hosts=1", lambda: rig.power_off(rig.hosts[1]))
    fewer = make_run(rig, home, shards, f"{name}-lost", **settings, launch__min_hosts=1)
    seconds = timer.seconds | run_with_failures(fewer, [lost]).seconds
    rig.reset()
    warm = with_standbys(rig, home, shards, name, settings | {"launch__standby_after_s": 0.0})
    seconds |= warm.seconds
    stalls = [
        row["checkpoint_stall_ms"] for row in read_rows(run_dir / "metrics.jsonl") if "checkpoint_stall_ms" in row
    ]
    share, step_s = checkpoint_share(timer.made)
    lost_steps = max(warm.lost.values())
    return Measured(
        seconds=seconds,
        steps_lost=lost_steps,
        checkpoint_share=share,
        step_s=step_s,
        stall_ms=statistics.median(stalls),
    )


def with_standbys(rig: Rig, home: Path, shards: Path, name: str, settings: dict[str, Any]) -> FailureTimer:
    """Time the two kinds of docker kill, each injected when the standbys on both hosts have finished their imports."""
    memory_dir = Path(tempfile.mkdtemp(prefix="shardline-benchmark-", dir="/dev/shm"))
    memory_dir.chmod(0o777)  # as /dev/shm is for all users
    copies = {"checkpoint__memory_every_steps": MEMORY_EVERY, "checkpoint__memory_dir": str(memory_dir / "copies")}
    run_dir = make_run(rig, home, shards, f"{name}-standby", **(settings | copies))
    launch = RunPlan.read(run_dir / "plan.json").config.launch
    give_to_ranks(run_dir, launch)
    check_hosts(hosts_of(launch), launch, home=home, run_dir=run_dir, memory_dir=str(memory_dir / "copies"))
    kills = [replace(it, name=f"{it.name}{WARM}") for it in scenarios_of(rig, partition_s=0.0)[:2]]

    def is_ready() -> bool:
        return all((run_dir / "attempts" / "standby" / f"{host.name}.ready").exists() for host in rig.hosts[:2])

    try:
        return run_with_failures(run_dir, kills, is_ready=is_ready)
    finally:
        shutil.rmtree(memory_dir)


def ratio_vs_cold(seconds: dict[str, float]) -> float:
    """Return the larger ratio, over the kinds of docker kill, of seconds with a standby to seconds without."""
    return max(seconds[name] / seconds[name.removesuffix(WARM)] for name in seconds if name.endswith(WARM))


def checkpoint_share(made: dict[int, float]) -> tuple[float, float]:
    """Return the share of checkpoints in a step, and the seconds of an undisturbed step.

    The share compares all steps of a cycle with those of its second half, when the checkpoint has long been published.
    Steps are medians over the cycles; the first cycle warms up.
    """
    took = {step: made[step] - made[step - 1] for step in range(EVERY + 1, max(made) + 1)}
    cycle = [statistics.median(took[step] for step in took if (step - 1) % EVERY == place) for place in range(EVERY)]
    undisturbed = statistics.fmean(cycle[EVERY // 2 :])
    return statistics.fmean(cycle) / undisturbed - 1, undisturbed


def run(rig: Rig, *, repetitions: int, patience: Patience) -> dict[str, Any]:
    with home_and_tokens(rig, vocab_size=VOCAB) as (home, shards):
        measured = [measure(rig, home, shards, f"run{n}", patience=patience) for n in range(repetitions)]
    seconds = {name: statistics.median(one.seconds[name] for one in measured) for name in measured[0].seconds}
    return {
        "seconds_to_next_step": {name: round(value, 2) for name, value in seconds.items()},
        "ratio_vs_cold": round(ratio_vs_cold(seconds), 3),
        "steps_lost": max(one.steps_lost for one in measured),
        "memory_every_steps": MEMORY_EVERY,
        "checkpoint_share": round(statistics.median(one.checkpoint_share for one in measured), 4),
        "checkpoint_every_steps": EVERY,
        "checkpoint_stall_ms": round(statistics.median(one.stall_ms for one in measured), 1),
        "step_s": round(statistics.median(one.step_s for one in measured), 3),
        "partition_s": patience.partition_s,
        "lost_after_s": patience.lost_after_s,
        "repetitions": repetitions,
        "cores": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, and a short partition, instead of 3 times")
    quick = parser.parse_args().quick
    patience = QUICK if quick else FULL
    with docker_hosts() as rig:
        result = run(rig, repetitions=1 if quick else 3, patience=patience)
    print(f"{'from the failure to the next step':36}{'seconds':>8}")
    for name, seconds in result["seconds_to_next_step"].items():
        print(f"{name:36}{seconds:8.1f}")
    print(
        f"(a host is lost after {patience.lost_after_s:.0f} s of silence, "
        f"the partition lasts {patience.partition_s:.0f} s)\n"
        f"checkpoints every {EVERY} steps of {1000 * result['step_s']:.0f} ms make a step "
        f"{100 * result['checkpoint_share']:.1f} % longer; training stands still for "
        f"{result['checkpoint_stall_ms']:.0f} ms each\n"
        f"with a standby, recovery takes {result['ratio_vs_cold']:.2f} of the time; with copies in memory every "
        f"{MEMORY_EVERY} steps a docker kill costs {result['steps_lost']} steps at most"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
