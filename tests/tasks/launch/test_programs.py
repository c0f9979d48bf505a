"""The command that runs the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tasks.launch import local, nsight
from tasks.launch.local import end_earlier_attempt
from tasks.launch.nsight import check_here
from tasks.launch.programs import NewRows
from tasks.runs.owner import RanksLauncher
from tasks.workspace.processes import process_key
from tests.support.configs import tiny_config
from tests.support.tiny_shards import MakeRun
from training.config.run import ProfileConfig
from training.node.fork_server import RankOrder
from training.node.ranks import rank_order
from training.records.node import NodeTask
from training.records.plan import RunPlan


@pytest.fixture
def plan_path(make_run: MakeRun) -> Path:
    return make_run("nsys", ranks=2, profile__nsys=True)


def order_of(module: str, plan_path: Path, *, log_dir: Path) -> RankOrder:
    """What a node of this machine has started."""
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    task = NodeTask(
        **plan.command(module, run_dir=run_dir),
        prefix=nsight.prefix(module, plan, run_dir=run_dir),
        num_ranks=2,
        world_size=2,
        master_port=29_400,
        end="end.json",
    )
    return rank_order(task, {}, log_dir=log_dir)


def test_nsys_wraps_each_training_rank_and_names_its_report_after_it(plan_path: Path, tmp_path: Path) -> None:
    order = order_of("training.train", plan_path, log_dir=tmp_path)
    assert order.prefix[:4] == ("nsys", "profile", "--sample=none", "--trace=cuda,nvtx,osrt")
    assert order.prefix[5].startswith(str(plan_path.parent / "profile"))
    assert order.prefix[5].endswith("-rank-%q{RANK}")
    assert order.args == (str(plan_path),)
    assert [environment["RANK"] for environment in order.environments] == ["0", "1"]
    assert order_of("training.evaluate", plan_path, log_dir=tmp_path).prefix == ()


def test_nsys_on_gpus_records_the_steps_that_are_asked_for(plan_path: Path) -> None:
    plan = RunPlan.read(plan_path)
    config = plan.config.model_copy(update={"profile": ProfileConfig(nsys=True, steps=(3, 4))})
    on_gpus = plan.model_copy(update={"config": config, "device_kind": "cuda"})
    command = nsight.prefix("training.train", on_gpus, run_dir=plan_path.parent)
    assert command[4:6] == ("--capture-range=cudaProfilerApi", "--capture-range-end=repeat:2")
    everything = nsight.prefix("training.train", plan, run_dir=plan_path.parent)
    assert not any("capture" in word for word in everything)


def test_ranks_on_gpus_get_memory_segments_that_grow(make_run: MakeRun) -> None:
    plan = RunPlan.read(make_run("segments"))
    assert plan.environment() == {}
    assert plan.model_copy(update={"device_kind": "cuda"}).environment() == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
    }


def test_nsys_that_is_not_installed_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"install Nsight Systems, or use profile.steps"):
        check_here(tiny_config(profile__nsys=True))
    check_here(tiny_config())


def test_rows_are_read_whole_while_they_are_written(tmp_path: Path) -> None:
    """A line may be half there at one moment and whole at the next: it is one row all the same."""
    path, number = tmp_path / "metrics.jsonl", 4000
    path.touch()
    reader = NewRows(path)
    writes = (
        "import json, sys\n"
        "file = open(sys.argv[1], 'ab', buffering=0)\n"
        "for step in range(int(sys.argv[2])):\n"
        "    for byte in json.dumps({'step': step, 'loss': 0.5}).encode() + b'\\n':\n"
        "        file.write(bytes([byte]))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", writes, str(path), str(number)])
    rows: list[dict[str, float]] = []
    while writer.poll() is None:
        rows += reader.read()
    rows += reader.read()
    assert [row["step"] for row in rows] == list(range(number))


def test_ranks_that_leave_by_themselves_while_they_are_stopped_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    RanksLauncher(launcher=process_key(earlier.pid)).write(tmp_path / "gang.json")

    def found_then_gone(run_dir: Path) -> psutil.Process:
        process = psutil.Process(earlier.pid)
        earlier.communicate()
        return process

    monkeypatch.setattr(local, "ranks_launcher", found_then_gone)
    end_earlier_attempt(tmp_path, grace_s=60)
    assert not psutil.pid_exists(earlier.pid)
