"""How long a run is: its steps, by what ends first, and the seconds that they take."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.config.run import RunConfig
from training.config.train import MOST_STEPS, Batches, TrainConfig, check_schedule
from training.planner.chosen_layout import ChosenLayout
from training.planner.mixture import one_pass
from training.planner.price.pricing import our_step
from training.planner.price.step_time import step_s
from training.records.words import format_duration
from training.shards.packing import Epoch

# Share of train.steps, because rates that were measured beside other programs can be a tenth of the true ones.
FEWEST_STEPS = 0.2


@dataclass(frozen=True)
class RunLength:
    """The length of a run. `in_time`: steps that train.target_minutes has time for, 0: no limit; `why`: the limit."""

    steps: int
    in_time: int
    sequences: int
    why: str
    batches: Batches

    def plan_fields(self) -> dict[str, Any]:
        """Return the fields of a RunPlan that the length decides."""
        phases = self.batches.phases if len(self.batches.phases) > 1 else ()
        lengths = {"steps": self.steps, "steps_in_time": self.in_time, "sequences": self.sequences}
        return {**lengths, "batch_phases": phases}


def run_length(
    config: RunConfig, epoch: Sequence[Epoch] | None, chosen: ChosenLayout, *, steps_in_time: int
) -> RunLength:
    """Return the run's length. `steps_in_time`: of the run's first plan; 0: by what is predicted for this one."""
    batches = batches_of(config, epoch)

    def total_s(steps: int) -> float:
        return steps * sum(mean_step_s(chosen, batches, steps).values()) if steps else 0.0

    in_time = steps_in_time or steps_that_fit(config.train, total_s)
    steps, sequences, why = length(config, epoch, steps_in_time=in_time)
    check_schedule(config.train, steps=steps)
    if steps == in_time:
        why += f"; {_time_limit(config.train, steps, total_s, is_kept=bool(steps_in_time))}"
    return RunLength(steps, in_time, sequences, why, batches)


def length(config: RunConfig, epoch: Sequence[Epoch] | None, *, steps_in_time: int = 0) -> tuple[int, int, str]:
    """Return the number of steps, the sequences in all of them, and the limit that sets the number.

    Batches are whole, except the last one under max_epochs, so that each pass takes every sequence once.
    `steps_in_time`: the limit that train.target_minutes sets; 0: none.
    """
    train, batches = config.train, batches_of(config, epoch)
    limits = {"train.steps": train.steps}
    if train.max_tokens:
        sequences = int(train.max_tokens / _sequence_tokens(config, epoch))
        limits[f"train.max_tokens = {train.max_tokens:,}"] = max(1, batches.steps_for(sequences + 1) - 1)
    if steps_in_time:
        limits[f"train.target_minutes = {train.target_minutes:g}"] = steps_in_time
    found = [(steps, batches.sequences_before(steps), why) for why, steps in limits.items()]
    if train.max_epochs and epoch is not None:
        whole = one_pass(config.data, epoch).sequences
        sequences = max(1, round(train.max_epochs * whole))
        why = f"train.max_epochs = {train.max_epochs:g}, of {whole:,} sequences each"
        found.append((batches.steps_for(sequences), sequences, why))
    return min(found)


def batches_of(config: RunConfig, epoch: Sequence[Epoch] | None) -> Batches:
    """Return the sequences of each step."""
    return Batches.of(config.train, sequence_tokens=_sequence_tokens(config, epoch))


def _sequence_tokens(config: RunConfig, epoch: Sequence[Epoch] | None) -> float:
    """Return the mean tokens of a sequence, because some packings leave places empty."""
    if epoch is None:
        return float(config.train.context)
    whole = one_pass(config.data, epoch)
    return whole.tokens / whole.sequences


def steps_that_fit(train: TrainConfig, total_s: Callable[[int], float]) -> int:
    """Return the number of steps that fit into train.target_minutes, by the seconds of so many steps; 0 without this
    limit.
    """
    if not train.target_minutes:
        return 0
    fit = bisect.bisect_right(range(MOST_STEPS), 60 * train.target_minutes, key=total_s) - 1
    return max(math.ceil(FEWEST_STEPS * train.steps), fit)


def _time_limit(train: TrainConfig, steps: int, total_s: Callable[[int], float], *, is_kept: bool) -> str:
    """Return why train.target_minutes gives this number of steps, and how to get all of them."""
    if is_kept:
        why = "as in this run's first plan"
    else:
        why = f"a step takes {1000 * total_s(steps) / steps:,.0f} ms as predicted for this machine"
        if total_s(steps) > 60 * train.target_minutes:
            why += f", and {steps:,} is the minimum, {FEWEST_STEPS:.0%} of train.steps"
    all_steps = format_duration(total_s(train.steps))
    return f"{why}; train.target_minutes=0 takes all {train.steps:,}, about {all_steps} of training"


# Seconds of steps that were priced otherwise


def mean_step_s(chosen: ChosenLayout, batches: Batches, steps: int) -> dict[str, float]:
    """Return the mean seconds of the first `steps` steps by part: larger ones accumulate more, and once do the rest."""
    job, layout = chosen.question.job, replace(chosen.layout, stages=())  # as in times_as_long_eager
    times = batches.sequences_before(steps) / steps / job.global_batch  # a fraction: the parts are linear in it
    if times == 1:
        return dict(chosen.best.seconds)
    larger = replace(layout, accumulation=times * layout.accumulation)  # type: ignore[arg-type]
    once, more = (step_s(our_step(chosen.config, job, each, chosen.cluster)) for each in (layout, larger))
    mean = sum(more.values()) / sum(once.values())  # of parts that only unlike replicas have
    return {p: seconds * (more[p] / once[p] if p in once else mean) for p, seconds in chosen.best.seconds.items()}


def times_as_long_eager(chosen: ChosenLayout) -> float:
    """Return the time of an eager step over that of a compiled one, on devices like the run's slowest."""
    layout = replace(chosen.layout, stages=())  # one of unlike stages is priced rank by rank: here as equal ones
    eager, compiled = (
        sum(step_s(our_step(config, chosen.question.job, layout, chosen.cluster)).values())
        for on in (False, True)
        for config in [
            chosen.config.model_copy(update={"train": chosen.config.train.model_copy(update={"compile": on})})
        ]
    )
    return eager / compiled
