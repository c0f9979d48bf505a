"""This machine's rates as a first run would measure them, for all that need some but do not test the measurement."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tasks.hardware.machine import usable_cores
from tasks.hardware.measure import CachedMeasurement, cache_key, keep_cached, measure_ranks

RANKS = (1, 2)


def measure(folder: Path) -> None:
    """Write hardware.json for one CPU rank and for two; also if other tests keep the machine busy."""
    cores = usable_cores()
    for ranks in RANKS:
        measurement = CachedMeasurement(
            key=cache_key(cores=cores, gpus=(), ranks=ranks),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            measured=measure_ranks(cores=cores, ranks=ranks),
        )
        keep_cached(folder, measurement)
