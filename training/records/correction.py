"""What runs measured beside their predictions, and the factors that this puts on the prices of later plans."""

from __future__ import annotations

from training.records.record import Record


class Correction(Record):
    """Factors on a layout's predictions; `runs`: the IDs of those that they were measured in.

    `computing` is on all of a step but its exposed communication.
    """

    computing: float = 1.0
    communication: float = 1.0
    memory: float = 1.0
    runs: tuple[str, ...] = ()


class Priced(Record):
    """What a plan's prices are of. What a run measures corrects prices of the same machine and of jobs that are alike.

    `machine`: a sentence for each host, with the time at which its rates were measured.
    """

    machine: tuple[str, ...]
    job: str
    step_flops: float
    layout: str


class Measurement(Record):
    """What one run measured, and what its plan would have predicted without any correction.

    `exposed_share`: of a step, in which only communication ran; None if no step was timed by phase.
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
    """SHARDLINE_HOME/corrections.json: what the last runs measured, oldest first."""

    measurements: tuple[Measurement, ...] = ()
