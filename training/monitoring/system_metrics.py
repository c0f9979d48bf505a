"""System metrics of each machine of a run while it trains: CPU, memory, disk, network and GPUs.

A thread of the machine's first rank writes rows to runs/ID/system/MACHINE.jsonl, which are sent as all metrics are.
They have MLflow's names, so that its page shows them under "System metrics".
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from training.monitoring.rates import Rates
from training.tracking.rows import SYSTEM, RowLog, read_rows

logger = logging.getLogger(__name__)

SAMPLE_EVERY_S = 10.0
LAST_SAMPLE_S = 5.0  # longest wait for a file server that hangs
MB = 1_000_000  # MLflow's unit


class SystemMetrics:
    """The thread that samples this machine. It runs only in the first rank of each machine.

    Rows beyond the step that a run resumes from must be dropped before `start`.
    """

    def __init__(self, run_dir: Path, *, rates: Rates) -> None:
        self.run_dir, self.rates, self.ended = run_dir, rates, threading.Event()
        self.thread: threading.Thread | None = None
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self.thread = threading.Thread(target=self._sample_until_ended, daemon=True, name="machine")

    def start(self) -> None:
        if self.thread is not None:
            self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        if self.thread is not None:
            self.thread.join(LAST_SAMPLE_S)

    def _sample_until_ended(self) -> None:
        """Write a row per sample, but at most one per step. An error ends the rows, never the run."""
        machine = os.environ.get("SHARDLINE_HOST") or socket.gethostname()
        path = self.run_dir / SYSTEM / f"{machine}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            last_step = max((row["step"] for row in read_rows(path)), default=-1)
            log, stats = RowLog(path), MachineStats(self.run_dir)
            is_last = False
            while not is_last:
                is_last = self.ended.wait(SAMPLE_EVERY_S)
                if self.rates.step > last_step:
                    last_step = self.rates.step
                    log.write(last_step, **{f"system/{machine}/{name}": value for name, value in stats.read().items()})
            log.close()
        except Exception as error:
            logger.warning("system metrics of %s end here (%s)", machine, error)


class MachineStats:
    """Reads the whole machine: CPU since the last reading, network since this object was made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.network = folder, psutil.net_io_counters()
        self.gpus = _gpus()
        psutil.cpu_percent()  # the first reading is meaningless

    def read(self) -> dict[str, float]:
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(str(self.folder)), psutil.net_io_counters()
        row = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MB,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / MB,
        }
        if network and self.network:  # missing in some containers
            row["network_receive_megabytes"] = (network.bytes_recv - self.network.bytes_recv) / MB
            row["network_transmit_megabytes"] = (network.bytes_sent - self.network.bytes_sent) / MB
        for number, gpu in enumerate(self.gpus):
            row |= {f"gpu_{number}_{name}": value for name, value in _gpu_stats(gpu).items()}
        return row


def _gpus() -> list[object]:
    """Return NVML's handles of the GPUs of this machine or container; none without nvidia-ml-py or a driver."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _gpu_stats(gpu: object) -> dict[str, float]:
    """Return NVML's readings of the GPU. A MIG slice has no utilisation, and not every GPU reports its power."""
    import pynvml

    row = dict[str, float]()
    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        row["memory_usage_megabytes"] = memory.used / MB
        row["memory_usage_percentage"] = 100 * memory.used / memory.total
    with suppress(pynvml.NVMLError):
        row["utilization_percentage"] = float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
    with suppress(pynvml.NVMLError):
        row["power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000
    return row
