"""Runs queue for GPUs that they need both; SHARDLINE_DEVICES stands for GPUs where there are none."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.containers import gpus_granted
from tasks.operations.gpu_queue import Holder, LocalDevices, devices_of, hold_gpus, overlap, wait_for_gpus
from tasks.runs.errors import RunStopped
from tasks.runs.owner import RanksLauncher
from tasks.workspace.processes import process_key
from tests.support.configs import tiny_config
from tests.support.waiting import holding

HOLDS = """
import sys
from contextlib import ExitStack
from tasks.operations.gpu_queue import LocalDevices
with ExitStack() as held:
    assert LocalDevices(sys.argv[2:], run_id=sys.argv[1], held=held).take() is None
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def shardline_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    monkeypatch.setenv("SHARDLINE_DEVICES", "gpu-0,gpu-1,gpu-2")
    return tmp_path


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process of another run, which has the first two."""
    with holding(HOLDS, "other-1", "gpu-1", "gpu-0") as process:
        yield process


def take(*names: str, run_id: str = "mine-1") -> str:
    """Who has them, in words, or nothing; what was taken is let go of."""
    with ExitStack() as held:
        return str(LocalDevices(names, run_id=run_id, held=held).take() or "")


def test_who_has_a_device_is_named_until_it_is_killed(other: subprocess.Popen[str]) -> None:
    assert take("gpu-1", "gpu-2") == f"run other-1 (pid {other.pid}) has gpu-1; `shardline stop other-1` ends it"
    assert take("gpu-2") == "", "of those that were refused together none is kept"
    assert take() == "", "a machine without"
    other.kill()
    other.wait()
    assert take("gpu-0", "gpu-1", "gpu-2") == ""


def test_ranks_that_outlived_their_launcher_are_waited_for(shardline_home: Path) -> None:
    assert take("gpu-0", run_id="other-1") == ""
    (shardline_home / "other-1").mkdir()
    rank = subprocess.Popen(["sleep", "60"])
    RanksLauncher(launcher=process_key(rank.pid)).write(shardline_home / "other-1" / "gang.json")
    with ExitStack() as held:
        devices = LocalDevices(["gpu-0"], run_id="mine-1", held=held)
        try:
            assert str(devices.take()) == (
                f"run other-1 has ended, but its ranks still run (pid {rank.pid}); `shardline stop other-1` ends them"
            )
            assert "run mine-1" in take("gpu-0", run_id="third-1"), "the place in front is kept"
        finally:
            rank.kill()
            rank.wait()
        assert devices.take() is None


def test_a_run_waits_and_says_for_whom_then_goes_on(
    other: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    waited = []

    def wait(look, holder: Holder) -> None:  # type: ignore[no-untyped-def]
        waited.append(holder)
        threading.Timer(0.3, other.kill).start()
        wait_for_gpus(look, holder, run_id="mine-1")

    with hold_gpus(tiny_config(parallel__ranks=2), run_id="mine-1", wait=wait):
        assert "run mine-1" in take("gpu-0", run_id="third-1")
        assert take("gpu-2", run_id="third-1") == "", "two ranks leave the third alone"
    assert take("gpu-0") == "", "a run that is through lets go"
    assert len(waited) == 1
    assert f"mine-1 waits for GPUs: run other-1 (pid {other.pid}) has gpu-0" in caplog.text


def test_a_run_that_is_stopped_while_it_waits_can_be_resumed() -> None:
    def interrupted() -> Holder | None:
        raise KeyboardInterrupt

    with pytest.raises(
        RunStopped,
        match=r"interrupted while it waited for GPUs \(run a has gpu-0; stop it\): `shardline resume mine-1`",
    ):
        wait_for_gpus(interrupted, Holder("a", "has gpu-0", "stop it"), run_id="mine-1")


def test_a_run_takes_as_many_devices_as_it_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_of(tiny_config()) == ("gpu-0", "gpu-1", "gpu-2")
    assert devices_of(tiny_config(parallel__ranks=2)) == ("gpu-0", "gpu-1")
    assert devices_of(tiny_config(parallel__strategy="single")) == ("gpu-0",)
    monkeypatch.delenv("SHARDLINE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_of(tiny_config()) == (), "CPU ranks share their cores"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((-1, ()), (1, ()), True),
        ((2, ()), (0, ("1",)), True),
        ((2, ()), (0, ("2", "3")), False),
        ((0, ("GPU-a",)), (0, ("GPU-b",)), False),
        ((0, ("GPU-a",)), (0, ("GPU-a", "GPU-b")), True),
        ((0, ("GPU-a",)), (1, ()), True),
        ((0, ()), (-1, ()), False),
    ],
)
def test_containers_whose_gpus_overlap(
    one: tuple[int, tuple[str, ...]], other: tuple[int, tuple[str, ...]], expected: bool
) -> None:
    assert overlap(gpus_granted(*one), gpus_granted(*other)) is expected
    assert overlap(gpus_granted(*other), gpus_granted(*one)) is expected
