"""The hardware check: container limits, GPUs, the cached measurement and what it says when something fails."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Literal

import psutil
import pytest

from tasks.hardware.machine import Gpu, cpu_quota, driver_gpus, usable_cores, visible_gpus
from tasks.hardware.measure import (
    CachedMeasurement,
    HardwareCache,
    check_hardware,
    keep_cached,
    read_cache,
    run_measure,
    why_no_gpu_is_used,
)
from tests.support.waiting import until
from training.node.limits import usable_memory_bytes
from training.records.inventory import Device, Measured


def cgroup(folder: Path, membership: str, files: dict[str, str]) -> dict[str, Path]:
    """A control-group tree and a membership file, as /sys/fs/cgroup and /proc/self/cgroup hold them."""
    for name, content in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (folder / "membership").write_text(membership)
    return {"root": folder / "cgroup", "membership": folder / "membership"}


# Container limits


def test_a_container_with_one_cpu_has_one_core(tmp_path: Path) -> None:
    tree = cgroup(tmp_path, "0::/\n", {"cpu.max": "100000 100000", "memory.max": str(512 << 20)})
    assert cpu_quota(**tree) == 1.0
    assert usable_cores(**tree) == 1
    assert usable_memory_bytes(**tree) == 512 << 20


def test_half_a_cpu_is_still_one_thread(tmp_path: Path) -> None:
    tree = cgroup(tmp_path, "0::/\n", {"cpu.max": "50000 100000"})
    assert cpu_quota(**tree) == 0.5
    assert usable_cores(**tree) == 1


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {
        "cpu.max": "max 100000",
        "a/cpu.max": "150000 100000",
        "a/b/cpu.max": "400000 100000",
        "a/memory.max": "max",
    }
    tree = cgroup(tmp_path, "0::/a/b\n", files)
    assert cpu_quota(**tree) == 1.5
    assert usable_cores(**tree) == 1
    assert usable_memory_bytes(**tree) == psutil.virtual_memory().total


def test_version_1_groups_with_the_hosts_path_in_a_container(tmp_path: Path) -> None:
    files = {
        "cpu/cpu.cfs_quota_us": "100000",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(1 << 30),
    }
    tree = cgroup(tmp_path, "4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n2:name=systemd:/\n", files)
    assert cpu_quota(**tree) == 1.0
    assert usable_memory_bytes(**tree) == 1 << 30


def test_no_limit_leaves_the_machine(tmp_path: Path) -> None:
    files = {
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    tree = cgroup(tmp_path, "4:memory:/\n1:cpu:/\n0::/\n", files)
    assert cpu_quota(**tree) is None
    assert usable_cores(**tree) == len(os.sched_getaffinity(0))
    assert usable_memory_bytes(**tree) == psutil.virtual_memory().total


# GPUs


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "012"), ("", ""), ("-1", ""), ("2,0", "20"), ("GPU-b", "1"), ("0,7,1", "0"), ("GPU-c, 1", "21")],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, expected: str) -> None:
    gpus = tuple(Gpu(name="H100", uuid=f"GPU-{c}{c}", driver="580.1") for c in "abc")
    assert visible_gpus(gpus, visible) == tuple(gpus[int(i)] for i in expected)


@pytest.mark.parametrize("visible", ["MIG-3f2504e0-4f89-11d3-9a0c-0305e82c3301", "0,MIG-GPU-a/1/0"])
def test_a_slice_of_a_gpu_is_refused_and_not_taken_for_no_gpu(visible: str) -> None:
    gpus = (Gpu(name="H100", uuid="GPU-aa", driver="580.1"),)
    with pytest.raises(ValueError, match=r"MIG.*not supported: name whole GPUs"):
        visible_gpus(gpus, visible)


def measured_on(kind: Literal["cpu", "cuda"], **versions: str) -> Measured:
    device = Device(kind=kind, name="x", memory_gib=1.0)
    return Measured(devices=(device,), allreduce_gb_per_s=0.0, versions={"torch": "2.13.0", **versions})


@pytest.mark.parametrize(
    ("measured", "driver", "why"),
    [
        (measured_on("cuda", cuda="13.0"), "535.104.05", None),
        (measured_on("cpu"), "580.65.06", "a build without CUDA: install one with CUDA"),
        (
            measured_on("cpu", cuda="13.0"),
            "535.104.05",
            "is built for CUDA 13.0, which needs driver 580 or newer, and the driver is 535.104.05: update it",
        ),
        (measured_on("cpu", cuda="12.8"), "535.104.05", "sees none of them"),
    ],
)
def test_gpus_that_torch_cannot_use_are_said_with_the_reason(measured: Measured, driver: str, why: str | None) -> None:
    found = why_no_gpu_is_used(measured, driver=driver)
    assert (found is None) if why is None else (found is not None and why in found)


@pytest.mark.slow  # measures
@pytest.mark.skipif(bool(driver_gpus()), reason="torch may be able to use this machine's GPUs")
def test_a_machine_whose_gpus_torch_cannot_use_does_not_train_on_its_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver lists a GPU; torch, measured for real, is this environment's."""
    monkeypatch.setattr("tasks.hardware.machine.driver_gpus", lambda: (Gpu(name="H100", uuid="GPU-a", driver="535"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"GPUs are visible \(1 x H100\), but torch .*: install"):
        check_hardware(home=tmp_path)
    assert not (tmp_path / "hardware.json").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not driver_gpus(), reason="no NVIDIA driver")
def test_each_gpu_is_a_device(tmp_path: Path) -> None:
    (host,) = check_hardware(home=tmp_path).hosts
    assert [device.kind for device in host.devices] == ["cuda"] * len(driver_gpus())
    assert host.versions["driver"] == driver_gpus()[0].driver
    with pytest.raises(ValueError, match=r"GPUs are visible: lower parallel\.ranks"):
        check_hardware(home=tmp_path, ranks=len(driver_gpus()) + 1)


# The measurement and its cache


def with_rate(entry: CachedMeasurement, fp32: float, **key: str) -> CachedMeasurement:
    device = entry.measured.devices[0].model_copy(update={"matmul_tflops": {"fp32": fp32, "bf16": fp32}})
    measured = entry.measured.model_copy(update={"devices": (device,)})
    return entry.model_copy(update={"key": entry.key | key, "measured": measured})


@pytest.mark.slow
def test_measured_once_then_taken_from_the_cache_until_something_changes_and_not_kept_if_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("tasks.hardware.measure.BUSY_PERCENT", 100.0)  # whatever else runs beside the tests
    caplog.set_level(logging.INFO, logger="tasks.hardware.measure")
    home = tmp_path / "not" / "there" / "yet"
    first = check_hardware(home=home, ranks=1).hosts[0]
    assert "measured the rates of" in caplog.text
    assert len(first.devices) == 1
    assert first.devices[0].memory_gib == first.memory_gib
    assert first.disk_free_gib > 0

    (entry,) = read_cache(home).entries
    HardwareCache(entries=(with_rate(entry, 123.0),)).write(home / "hardware.json")
    caplog.clear()
    again = check_hardware(home=home, ranks=1).hosts[0]
    assert again.devices[0].matmul_tflops["fp32"] == 123.0
    assert again.measured_at == first.measured_at
    assert f"using the rates measured at {first.measured_at}" in caplog.text
    assert "measured the rates of" not in caplog.text

    outdated = HardwareCache(entries=(with_rate(entry, 123.0, torch="2.11.0"),))
    outdated.write(home / "hardware.json")
    caplog.clear()
    monkeypatch.setattr("tasks.hardware.measure.BUSY_PERCENT", -1.0)  # so that any machine is a busy one
    changed = check_hardware(home=home, ranks=1).hosts[0]
    assert 0 < changed.devices[0].matmul_tflops["fp32"] < 100
    assert "torch '2.11.0' ->" in caplog.text
    assert "measured the rates of" in caplog.text
    assert "busy: rates will be low, so they are not kept and the next run measures again" in caplog.text
    assert read_cache(home) == outdated


def test_ranks_below_zero_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks = -1: give 1 or more, or 0"):
        check_hardware(home=tmp_path, ranks=-1)


def test_a_new_measurement_outdates_only_its_own_host_and_ranks(tmp_path: Path) -> None:
    device = Device(kind="cpu", name="EPYC", memory_gib=8)
    measured = Measured(devices=(device,), allreduce_gb_per_s=0, versions={})
    for host, ranks, torch in [("a", "1", "2.11"), ("a", "2", "2.11"), ("b", "1", "2.11"), ("a", "1", "2.13")]:
        key = {"host": host, "ranks": ranks, "torch": torch}
        keep_cached(tmp_path, CachedMeasurement(key=key, measured_at="2026-01-01", measured=measured))
    kept = [" ".join(entry.key.values()) for entry in read_cache(tmp_path).entries]
    assert kept == ["a 2 2.11", "b 1 2.11", "a 1 2.13"]


def test_a_cache_of_another_version_is_measured_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "hardware.json").write_text('{"entries": [{"rates": 1}]}')
    assert read_cache(tmp_path).entries == ()
    assert "written by another version" in caplog.text


def test_a_failed_measurement_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"measuring 1 rank failed \(exit code 1; rank 0: ImportError: libtorch_cpu.so: cannot"
    ):
        run_measure(1, 1)


@pytest.mark.slow
def test_a_killed_rank_is_named() -> None:
    def kill() -> None:
        until(ranks, "two ranks")
        ranks()[1].kill()

    def ranks() -> list[psutil.Process]:
        family = psutil.Process().children(recursive=True)
        found = {process.name(): process for process in family if process.name().startswith("rank-")}
        return [found["rank-0"], found["rank-1"]] if len(found) == 2 else []

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match=r"measuring 2 ranks failed \(exit code 1; rank 1: ended by signal 9"):
        run_measure(2, 1)
    killer.join()


def test_a_measurement_that_hangs_is_stopped() -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RuntimeError, match=r"no answer in 0.2 s"):
        run_measure(1, 1, timeout_s=0.2)
    assert set(psutil.Process().children(recursive=True)) <= set(before)
