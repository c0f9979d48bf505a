"""Measurements of runs beside their predictions, and the factors that correct later plans."""

from __future__ import annotations

from typing import Literal

from training.records.record import Record

# What ran before on the machine: the job itself in this layout, a similar job or layout, or nothing like it.
Measured = Literal["this job", "a similar job", "nothing"]


class Correction(Record):
    """Factors on a layout's predictions; `runs`: the IDs of the runs that they come from.

    `computing` applies to a whole step except its exposed communication. `measured`: how like the job those runs were.
    """

    computing: float = 1.0
    communication: float = 1.0
    memory: float = 1.0
    runs: tuple[str, ...] = ()
    measured: Measured = "nothing"


class Priced(Record):
    """The machine and job that a plan prices.

    A run's measurements correct prices of the same machine and of similar jobs. `machine`: a sentence for each host,
    with the time at which its rates were measured.
    """

    machine: tuple[str, ...]
    job: str
    step_flops: float
    layout: str


class Measurement(Record):
    """The measurements of one run, and its plan's predictions without any correction.

    `exposed_share`: the share of a step in which only communication ran; None if no step was timed by phase.
    `computing_s` and `communication_s`, which is the exposed part, add up to the predicted step.
    """

    run_id: str
    ended_at: str
    priced: Priced
    step_s: float
    exposed_share: float | None
    memory_gib: float
    computing_s: float
    communication_s: float
    predicted_memory_gib: float


class Measurements(Record):
    """SHARDLINE_HOME/corrections.json: the measurements of the last runs, oldest first."""

    measurements: tuple[Measurement, ...] = ()
