"""What is not known of a GPU is left out: it neither ends training nor counts as idle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from training.monitoring import system_metrics
from training.monitoring.device_stats import GIB, DeviceStats


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int | Exception]:
    """What NVML says of the GPU, one reading after the other; its memory as torch's allocator reports it."""
    waiting: list[int | Exception] = []

    def utilization(device: torch.device) -> int:
        reading = waiting.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return waiting


def rows(stats: DeviceStats, readings: list[int | Exception]) -> Iterator[dict[str, float]]:
    while readings:
        stats.add([stats.sample()])
        yield stats.row()


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN),  # a container, after `systemctl daemon-reload` on its host
        pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),  # a MIG slice
        RuntimeError("cuda driver can't be loaded, is cuda enabled?"),
        ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported."),
    ],
)
def test_an_error_of_nvml_leaves_one_reading_out_and_is_said_once(
    error: Exception, readings: list[int | Exception], caplog: pytest.LogCaptureFixture
) -> None:
    stats = DeviceStats(torch.device("cuda:0"), threads=1)
    readings += [40, error, error, 60]
    with caplog.at_level(logging.WARNING):
        utilisations = [row.get("device_utilisation") for row in rows(stats, readings)]
    assert utilisations == [0.4, None, None, 0.6]
    assert stats.overall()["device_utilisation"] == pytest.approx(0.5)
    assert stats.overall()["peak_memory_gib"] == 1
    (said,) = caplog.messages
    assert str(error) in said


def test_one_rank_that_does_not_know_its_utilisation_does_not_hide_the_others() -> None:
    stats = DeviceStats(torch.device("cpu"), threads=1)
    _, *memory = stats.sample()
    stats.add([[float("nan"), *memory], [0.5, *memory], [0.7, *memory]])
    assert stats.row()["device_utilisation"] == pytest.approx(0.6)


def test_a_mig_slice_shows_its_memory_in_the_system_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML knows no utilisation of a MIG slice, and no power."""

    def not_supported(gpu: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    memory = SimpleNamespace(used=5_000_000, total=10_000_000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", not_supported)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", not_supported)
    known = system_metrics._gpu_stats(object())
    assert known == {"memory_usage_megabytes": 5.0, "memory_usage_percentage": 50.0}
