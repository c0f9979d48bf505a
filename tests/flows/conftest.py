"""What the tests of the flows share: this machine's rates, measured once, and `shardline up` for a module."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks.hardware.machine import usable_cores
from tasks.hardware.measure import DEFAULT_CPU_RANKS, CachedMeasurement, cache_key, keep_cached, measure_ranks
from tests.support.local_servers import LocalServers
from tests.support.made_once import made_once
from tests.support.user_folder import UserFolder


@pytest.fixture(scope="session")
def measured_hardware(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hardware.json of this machine; kept although other tests keep it busy, so that no run measures it again."""
    cores = usable_cores()
    ranks = min(DEFAULT_CPU_RANKS, cores)

    def measure(folder: Path) -> None:
        measurement = CachedMeasurement(
            key=cache_key(cores=cores, gpus=(), ranks=ranks),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            measured=measure_ranks(cores=cores, num_gpus=0, cpu_ranks=ranks),
        )
        keep_cached(folder, measurement)

    return made_once(tmp_path_factory, "hardware", measure) / "hardware.json"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, measured_hardware: Path) -> Iterator[LocalServers]:
    """Started, on a user's folder of its own; what still works at the module's end is stopped."""
    started = LocalServers(UserFolder(tmp_path_factory.mktemp("user"), hardware=measured_hardware))
    try:
        started.start()
        yield started
    finally:
        started.stop()
