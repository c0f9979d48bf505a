"""SHARDLINE_HOME/corrections.json, beside hardware.json: measurements of the last runs, which correct plans.

If the file cannot be read or written, there are no corrections, and runs continue. To forget them, delete it.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from tasks.runs.folder import read_plan
from tasks.workspace.locks import exclusive
from tasks.workspace.paths import home
from training.planner.corrections import LAST_RUNS, machine_of, measurement_of
from training.records.correction import Measurement, Measurements
from training.records.inventory import Inventory
from training.records.train_result import TrainResult
from training.tracking.rows import METRICS, read_rows

logger = logging.getLogger(__name__)

CORRECTIONS = "corrections.json"
MOST_KEPT = 500  # runs, of all machines; some 0.8 kB each


def read_measurements(inventory: Inventory) -> tuple[Measurement, ...]:
    """Return the measurements of all runs; none for hosts that were not measured, such as hypothetical ones."""
    return _read(home() / CORRECTIONS) if machine_of(inventory) else ()


def learn(run_dir: Path, result: TrainResult) -> None:
    """Keep the measurements of a run that has just been trained, if they apply to later runs; otherwise log why not."""
    try:
        plan, rows = read_plan(run_dir), read_rows(run_dir / METRICS)
        if plan is None:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        keep(measurement_of(plan, result, rows, ended_at=now))
    except ValueError as why:
        logger.info("the speeds that this run measured do not correct the predictions of later plans: %s", why)
    except OSError as error:
        logger.warning("the speeds that this run measured could not be kept for later plans (%s)", error)


def keep(new: Measurement) -> None:
    """Add `new`, replace an earlier measurement of the same run, and drop those that no plan would read."""
    path = home() / CORRECTIONS
    with exclusive(path.with_name(f".{CORRECTIONS}.lock"), on_wait=lambda: None):
        newest_first = [new, *(each for each in reversed(_read(path)) if each.run_id != new.run_id)]
        kept, number = list[Measurement](), Counter[str]()
        for each in newest_first[:MOST_KEPT]:
            number[of := each.priced.model_dump_json()] += 1
            if number[of] <= LAST_RUNS:
                kept.append(each)
        Measurements(measurements=tuple(reversed(kept))).write(path)


def _read(path: Path) -> tuple[Measurement, ...]:
    kept = Measurements.read_or_none(path, otherwise="planning without the speeds that earlier runs measured")
    return kept.measurements if kept else ()
