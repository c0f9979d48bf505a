"""A rank stays on the cores next to its GPU: found in sysfs, within what the process may use, else with a reason."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from training.runtime.numa import bind_near

GPU = "0000:c1:00.0"


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    """The cores that this process may use; all threads get them back afterwards."""
    cores = os.sched_getaffinity(0)
    yield cores
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def sysfs(folder: Path, *, cores: dict[int, str], gpu_node: int) -> Path:
    for node, listed in cores.items():
        path = folder / f"devices/system/node/node{node}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(f"{listed}\n")
    device = folder / f"bus/pci/devices/{GPU}/numa_node"
    device.parent.mkdir(parents=True)
    device.write_text(f"{gpu_node}\n")
    return folder


def test_all_threads_stay_on_the_node_of_the_gpu(tmp_path: Path, allowed: set[int]) -> None:
    first = min(allowed)
    found, started, ask = list[set[int]](), threading.Event(), threading.Event()

    def report() -> None:
        started.set()
        ask.wait()
        found.append(os.sched_getaffinity(0))

    earlier = threading.Thread(target=report)
    earlier.start()
    started.wait()
    said = bind_near(GPU, sysfs=sysfs(tmp_path, cores={0: "4096-4099", 1: f"{first},5000-5003"}, gpu_node=1))
    ask.set()
    earlier.join()
    assert os.sched_getaffinity(0) == {first}
    assert found == [{first}]
    assert said.startswith(f"bound to 1 of {len(allowed)} cores, those of memory node 1")


@pytest.mark.parametrize(
    ("cores", "gpu_node", "why"),
    [
        ({0: "0-127"}, 0, "this host has one memory node"),
        ({0: "0-63", 1: "64-127"}, -1, "names no memory node"),
        ({0: "0-127", 1: "4096-4099"}, 1, "may use is on node 1"),
    ],
)
def test_else_nothing_is_bound_and_the_reason_is_said(
    cores: dict[int, str], gpu_node: int, why: str, tmp_path: Path, allowed: set[int]
) -> None:
    said = bind_near(GPU, sysfs=sysfs(tmp_path, cores=cores, gpu_node=gpu_node))
    assert said.startswith("not bound to cores: ")
    assert why in said
    assert os.sched_getaffinity(0) == allowed
