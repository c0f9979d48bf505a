"""How far off the prices were in earlier runs on the same machine: factors on the prices of a plan, and the reason.

A machine's rates are measured in seconds before a run, and the cost model's constants were set elsewhere; what they
leave is learned from whole runs. A layout that ran here is corrected by its own runs, every other one by the median of
those that did. So while a single layout was measured, all of them are moved alike and keep their order: having run is
no advantage and no handicap. Where several were, as by a comparison, what they showed of each other decides.

Memory is corrected by a layout's own runs alone, and what fits is never counted smaller for it: a step that takes
longer than planned costs time, a rank that needs more memory than planned costs the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from training.config.run import RunConfig
from training.planner.cluster import are_alike
from training.planner.job import Layout
from training.records.correction import Correction, Measurement, Priced
from training.records.inventory import Host, Inventory
from training.records.plan import RunPlan, unmeasured_parts
from training.records.train_result import TrainResult
from training.records.words import counted

LEAST, MOST = 2 / 3, 3 / 2  # of a factor: what is further off is a defect, of the run or of the cost model
LAST_RUNS = 5  # of a layout, of which the median counts
SIMILAR_JOB = 4.0  # a run corrects the prices of jobs whose step has at most 4 times its operations, at least 1/4
MIN_STEPS, MIN_ROWS = 20, 3  # after an attempt's first step, which compiles and allocates
STEADY = 0.25  # of the median step: the distance of the quartiles where nothing else used the machine now and then


# What prices are of


def machine_of(inventory: Inventory) -> tuple[str, ...]:
    """Return a hash of the machine: its hosts, devices, cores, and one measurement of their rates.

    Empty if a host was not measured, as hypothetical ones are not: no run corrects their plans.
    """
    if not all(host.measured_at for host in inventory.hosts):
        return ()
    return tuple(sorted(_describe_host(host) for host in inventory.hosts))


def _describe_host(host: Host) -> str:
    devices = Counter(f"{device.kind} {device.name}" for device in host.devices)
    counted = ", ".join(f"{number} x {name}" for name, number in sorted(devices.items()))
    return f"{host.name}: {counted}, {host.cores} cores, measured {host.measured_at}"


def describe_kind(config: RunConfig, layout: Layout) -> str:
    """The layout without its micro-batch, and what else its steps' time depends on: `fsdp tp 2 on 4 ranks`."""
    words = [f"{layout.axes('tp', 'pp', 'cp')} on {layout.world_size} rank{'s' * (layout.world_size > 1)}"]
    words += ["sequence parallel"] if layout.sequence_parallel else []
    words += [*layout.how_shards_travel(), *layout.how_stages_lie(), *layout.how_memory_is_saved()]
    words += [f"{config.parallel.compression} compression"] if config.parallel.compression != "none" else []
    return ", ".join(words)


# Factors


def is_exposed(part: str) -> bool:
    """Whether the part of a step is communication that nothing hides."""
    return part.endswith("exposed")


def exposed_s(parts: Mapping[str, float]) -> float:
    return sum(seconds for part, seconds in parts.items() if is_exposed(part))


@dataclass(frozen=True)
class Corrections:
    """The corrections of every layout of one job on one machine. `by_kind`: of layouts that ran, by describe_kind."""

    by_kind: Mapping[str, Correction]
    others: Correction

    def of(self, config: RunConfig, layout: Layout) -> Correction:
        return self.by_kind.get(describe_kind(config, layout), self.others) if self.by_kind else self.others


NO_CORRECTIONS = Corrections({}, Correction())


def corrections_of(measurements: Sequence[Measurement], wanted: Priced) -> Corrections:
    """The corrections that these measurements give for the job and the machine of `wanted`."""
    runs: dict[str, list[Measurement]] = {}
    for each in measurements:
        ran = each.priced
        same = bool(ran.machine) and (ran.machine, ran.job) == (wanted.machine, wanted.job)
        if same and are_alike((ran.step_flops,), (wanted.step_flops,), factor=SIMILAR_JOB):
            runs.setdefault(ran.layout, []).append(each)
    if not runs:
        return NO_CORRECTIONS
    by_kind = {kind: _median(of_kind, wanted) for kind, of_kind in runs.items()}
    communicating = [by_kind[kind].communication for kind, of_kind in runs.items() if of_kind[-1].communication_s]
    others = Correction(
        computing=median(each.computing for each in by_kind.values()),
        communication=median(communicating) if communicating else 1.0,
        runs=tuple(run for each in by_kind.values() for run in each.runs),
        measured="a similar job",
    )
    return Corrections(by_kind, others)


def _median(runs: Sequence[Measurement], wanted: Priced) -> Correction:
    """Return the correction by the last runs of this job or, if there are none, by the last of similar ones."""
    own = [each for each in runs if each.priced.step_flops == wanted.step_flops]
    runs = (own or runs)[-LAST_RUNS:]
    computing, communication = zip(*map(_time_factors, runs), strict=True)
    return Correction(
        computing=median(computing),
        communication=median(communication),
        memory=median(_bounded(each.memory_gib / each.predicted_memory_gib) for each in runs),
        runs=tuple(each.run_id for each in runs),
        measured="this job" if own else "a similar job",
    )


def _time_factors(run: Measurement) -> tuple[float, float]:
    """Factors on computing and on exposed communication that make the prediction what the run measured.

    What one of them is beyond its bounds the other takes: communication that takes far longer than predicted is mostly
    a rank's wait for another's computing. Where no step was timed by phase, both are the whole step's.
    """
    whole = _bounded(run.step_s / (run.computing_s + run.communication_s))
    if run.exposed_share is None or not run.communication_s:
        return whole, whole if run.communication_s else 1.0
    communication = _bounded(run.exposed_share * run.step_s / run.communication_s)
    computing = _bounded((run.step_s - communication * run.communication_s) / run.computing_s)
    return computing, _bounded((run.step_s - computing * run.computing_s) / run.communication_s)


def _bounded(factor: float) -> float:
    return min(max(factor, LEAST), MOST)


def correct_seconds(parts: Mapping[str, float], correction: Correction) -> dict[str, float]:
    """Seconds of a step by part, corrected."""
    return {
        part: seconds * (correction.communication if is_exposed(part) else correction.computing)
        for part, seconds in parts.items()
    }


def correct_memory(parts: Mapping[str, float], factor: float, *, device_kind: str) -> dict[str, float]:
    """GiB by part; those that no run measures stay as they are."""
    unseen = unmeasured_parts(device_kind)
    return {part: gib if part in unseen else gib * factor for part, gib in parts.items()}


# What a run measured


def measurement_of(
    plan: RunPlan, result: TrainResult, rows: Sequence[Mapping[str, Any]], *, ended_at: str
) -> Measurement:
    """Return the run's measurements. Raises ValueError, with the reason, for a run that would teach nothing."""
    if plan.priced is None:
        raise ValueError("its plan was not made from this measurement of this machine's rates")
    if plan.idle_hosts or plan.rebalance or plan.batch_phases:
        what = "hosts were idle" if plan.idle_hosts else "its batches could change while it trained"
        raise ValueError(f"{what}, so its steps are not those that were priced")
    timed = [row for row in _steady_rows(rows) if row.get("split/step_ms")]
    shares = [row.get("split/exposed_communication_ms", 0.0) / row["split/step_ms"] for row in timed]
    seconds, used = plan.predicted.step_s, plan.predicted.correction
    exposed = exposed_s(seconds)
    return Measurement(
        run_id=plan.run_id,
        ended_at=ended_at,
        priced=plan.priced,
        step_s=result.step_ms / 1000,
        exposed_share=median(shares) if shares else None,
        memory_gib=result.peak_memory_gib,
        computing_s=(sum(seconds.values()) - exposed) / used.computing,
        communication_s=exposed / used.communication,
        predicted_memory_gib=plan.predicted.peak_gib(plan.device_kind) / used.memory,
    )


def _steady_rows(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The rows of the last attempt without its first. Raises ValueError if they are too few, or their steps unlike."""
    firsts = [number for number, row in enumerate(rows) if "tokens_per_s" in row and "eta_s" not in row]
    attempt = rows[firsts[-1] :] if firsts else []
    first, *logged = [row for row in attempt if "tokens_per_s" in row] or [{}]
    steps = logged[-1]["step"] - first["step"] if logged else 0
    if steps < MIN_STEPS or len(logged) < MIN_ROWS:
        raise ValueError(
            f"after its first step it logged {counted(len(logged), 'row')} of figures over {counted(steps, 'step')}, "
            f"and {MIN_ROWS} rows over {MIN_STEPS} steps are needed"
        )
    times = [row["step_ms"] for row in logged]
    low, middle, high = quantiles(times, n=4, method="inclusive")
    if high - low > STEADY * middle:
        raise ValueError(
            f"its steps were not steady ({low:,.1f} to {high:,.1f} ms in the middle half of its rows), as where other "
            "programs use the machine"
        )
    return attempt[1:]
