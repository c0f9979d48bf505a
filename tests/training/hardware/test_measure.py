"""The measuring program, run for real as users run it: plain with one rank, under torchrun with two."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.hardware.machine import driver_gpus
from tasks.hardware.measure import HardwareCache
from training.measure import DTYPES, product
from training.records.inventory import Measured

# GFLOP/s of numpy's matrix product on one thread, the median of some 0.3 s: another library, another clock loop.
NUMPY_GFLOPS = """
import statistics, time, numpy
n = 1024
a, b = numpy.random.default_rng(0).standard_normal((2, n, n), dtype=numpy.float32)
a @ b
seconds = []
while sum(seconds) < 0.3:
    start = time.perf_counter()
    a @ b
    seconds.append(time.perf_counter() - start)
print(2 * n**3 / statistics.median(seconds) / 1e9)
"""

on_cpu = pytest.mark.skipif(bool(driver_gpus()), reason="this host's ranks are GPUs")


def measure(out: Path, *, ranks: int, threads: int) -> Measured:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "training.measure", str(out), str(threads)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, timeout=120)
    return Measured.read(out)


@pytest.mark.slow
@on_cpu
def test_one_rank_agrees_with_an_independent_timing(tmp_path: Path) -> None:
    measured = measure(tmp_path / "one.json", ranks=1, threads=1)
    numpy_gflops = subprocess.run(
        [sys.executable, "-c", NUMPY_GFLOPS],
        env=os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        capture_output=True,
        check=True,
    ).stdout
    (device,) = measured.devices
    # Both are wall-clock times, and other tests may run beside one of them: the unit and the order are what is checked.
    assert 1 / 6 < device.matmul_tflops["fp32"] * 1e3 / float(numpy_gflops) < 6
    assert measured.allreduce_gb_per_s == measured.allreduce_latency_us == 0
    assert {"python", "torch"} <= measured.versions.keys()


@on_cpu
@pytest.mark.slow
def test_two_ranks_measure_themselves_and_the_link_between_them(measured_hardware: Path) -> None:
    one, measured = (entry.measured for entry in HardwareCache.read(measured_hardware).entries)
    assert (len(one.devices), len(measured.devices)) == (1, 2)
    assert 0.01 < measured.allreduce_gb_per_s < 200
    assert 1 < measured.allreduce_latency_us < 1e6
    assert measured.links == ()
    for device in measured.devices:
        assert device.kind == "cpu"
        assert device.matmul_tflops.keys() == {"fp32", "bf16"}
        # bf16 is emulated here, and two ranks share the cores with other tests: 0.0003 was seen
        assert all(0.00005 < rate < 10 for rate in device.matmul_tflops.values())
        assert 0.3 < device.memory_gb_per_s < 1000


def test_the_fp8_product_that_is_timed_is_a_product() -> None:
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    eighths = product(*(matrix.to(DTYPES["fp8"]) for matrix in (a, b)))()
    assert (eighths.float() - a @ b).abs().mean() < 0.1 * (a @ b).abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not driver_gpus(), reason="no NVIDIA driver")
def test_every_two_gpus_have_a_link(tmp_path: Path) -> None:
    num_gpus = len(driver_gpus())
    if num_gpus < 2:
        pytest.skip("one GPU has no link to another")
    measured = measure(tmp_path / "gpus.json", ranks=num_gpus, threads=1)
    assert {link.ranks for link in measured.links} == set(itertools.combinations(range(num_gpus), 2))
    for link in measured.links:
        assert re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS|same board|\?", link.kind)
        assert 1 < link.gb_per_s < 1000
    assert 1 < measured.allreduce_latency_us < 1e4


@pytest.mark.gpu
@pytest.mark.skipif(not driver_gpus(), reason="no NVIDIA driver")
def test_a_gpu_is_measured_in_every_precision_it_has(tmp_path: Path) -> None:
    measured = measure(tmp_path / "gpu.json", ranks=1, threads=1)
    (device,) = measured.devices
    assert device.kind == "cuda"
    assert device.name in {gpu.name for gpu in driver_gpus()}
    assert device.memory_gb_per_s > 100
    assert {"cuda", "nccl"} <= measured.versions.keys()
    rates = device.matmul_tflops
    assert {"fp32", "fp16"} <= rates.keys()
    if float(device.compute_capability or 0) >= 8:
        assert rates["fp32"] < rates["tf32"] < rates["bf16"]
        assert 0.5 < rates["fp16"] / rates["bf16"] < 2
    if float(device.compute_capability or 0) >= 8.9:
        assert rates["fp8"] > 1.2 * rates["bf16"]
