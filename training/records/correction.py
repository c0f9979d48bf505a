"""Measurements of runs beside their predictions, and the factors that correct later plans."""

from __future__ import annotations

from typing import Literal

from training.records.record import Record

# What ran before on the machine: the job itself in this layout, a similar job or layout, or nothing like it.
Measured = Literal["this job", "a similar job", "nothing"]


class Correction(Record):
    """Factors, from earlier runs, on a layout's predictions: 1.1 makes a prediction 10% larger."""

    computing: float = 1.0
    """Factor on all seconds of a step except its exposed communication."""
    communication: float = 1.0
    """Factor on the seconds of a step in which ranks only communicate."""
    memory: float = 1.0
    """Factor on the memory that runs measure; never applied to what is in no run's peak."""
    runs: tuple[str, ...] = ()
    """IDs of the runs from which the factors come; empty if nothing is corrected."""
    measured: Measured = "nothing"
    """How similar the runs in `runs` are: this job in this layout, a similar job or layout, or nothing like it."""


class Priced(Record):
    """The machine and job that a plan prices.

    A run's measurements correct prices of the same machine and of similar jobs.
    """

    machine: tuple[str, ...]
    """A sentence for each host: devices, cores, when its rates were measured. Empty for hypothetical hosts."""
    job: str
    """Kind of the job: the model's architecture, the precision, and whether layers are compiled."""
    step_flops: float
    """Floating-point operations of one step with train.global_batch, over all ranks; jobs of like ones are similar."""
    layout: str
    """The layout in words, without its micro-batch, such as `fsdp tp 2 on 4 ranks`."""


class Measurement(Record):
    """The measurements of one run, and its plan's predictions without any correction."""

    run_id: str
    """ID of the run that was measured."""
    ended_at: str
    """Time at which its training ended, in ISO 8601 and UTC."""
    priced: Priced
    """Machine, job and layout of the run."""
    step_s: float
    """Measured mean seconds of a step."""
    exposed_share: float | None
    """Measured share of a step in which ranks only communicated, a median; None if no step was timed by phase."""
    memory_gib: float
    """Measured peak GiB of the rank that took most."""
    computing_s: float
    """Predicted seconds of a step without its exposed communication, before any correction."""
    communication_s: float
    """Predicted seconds of a step in which ranks only communicate; with `computing_s` they add up to a step."""
    predicted_memory_gib: float
    """Predicted peak GiB of the rank that takes most, before any correction."""


class Measurements(Record):
    """SHARDLINE_HOME/corrections.json: the measurements of the last runs, oldest first."""

    measurements: tuple[Measurement, ...] = ()
    """One measurement for each run, the newest last; a few runs are kept of each machine, job and layout."""
