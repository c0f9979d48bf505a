"""What each machine of a run is at while it trains: CPU, memory, disk, network and GPUs.

A thread of the machine's first rank writes rows to runs/ID/system/MACHINE.jsonl, which go the way of all metrics. They
have the names that MLflow gives them, so that its page shows them under "System metrics".
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from training.tracking.rows import SYSTEM, RowLog, read_rows

if TYPE_CHECKING:
    from training.monitoring.meter import Meter

logger = logging.getLogger(__name__)

SAMPLE_EVERY_S = 10.0
LAST_SAMPLE_S = 5.0  # a file server that hangs is not waited for longer
MB = 1_000_000  # as MLflow counts


@contextmanager
def record_system_metrics(run_dir: Path, *, meter: Meter) -> Iterator[None]:
    """While it trains, by the first rank of each machine. Rows beyond the step where a resume begins must be gone."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_sample_until, args=(over, run_dir, meter), daemon=True, name="machine")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LAST_SAMPLE_S)


def _sample_until(over: threading.Event, run_dir: Path, meter: Meter) -> None:
    """A row per sample, but one per step at most; what goes wrong costs rows, never the run."""
    machine = os.environ.get("SHARDLINE_HOST") or socket.gethostname()
    path = run_dir / SYSTEM / f"{machine}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        last = max((row["step"] for row in read_rows(path)), default=-1)
        log, gauges = RowLog(path), MachineStats(run_dir)
        is_over = False
        while not is_over:
            is_over = over.wait(SAMPLE_EVERY_S)
            if meter.step > last:
                last = meter.step
                log.write(last, **{f"system/{machine}/{name}": value for name, value in gauges.read().items()})
        log.close()
    except Exception as error:
        logger.warning("system metrics of %s end here (%s)", machine, error)


class MachineStats:
    """Readings of the whole machine; CPU since the last one, network since this was made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.network = folder, psutil.net_io_counters()
        self.gpus = _gpus()
        psutil.cpu_percent()  # the first one tells nothing

    def read(self) -> dict[str, float]:
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(str(self.folder)), psutil.net_io_counters()
        row = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MB,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / MB,
        }
        if network and self.network:  # none in some containers
            row["network_receive_megabytes"] = (network.bytes_recv - self.network.bytes_recv) / MB
            row["network_transmit_megabytes"] = (network.bytes_sent - self.network.bytes_sent) / MB
        for number, gpu in enumerate(self.gpus):
            row |= {f"gpu_{number}_{name}": value for name, value in _of_gpu(gpu).items()}
        return row


def _gpus() -> list[object]:
    """NVML's handles of those that this machine, or container, sees; none without nvidia-ml-py or a driver."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]


def _of_gpu(gpu: object) -> dict[str, float]:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    row = {
        "memory_usage_megabytes": memory.used / MB,
        "memory_usage_percentage": 100 * memory.used / memory.total,
        "utilization_percentage": float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    }
    with suppress(pynvml.NVMLError):  # not every GPU tells
        row["power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000
    return row
