"""A GPU that fails again and again costs its host, where launch.min_hosts allows that, and not the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.launch.programs import run_custom_program
from tasks.launch.recovery import attempts_of
from tasks.planning.custom_program import plan_custom_program
from tasks.runs.errors import RunFailed
from tests.support.configs import inventory
from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left, causes, docker_config
from training.config.run import RunConfig

FAULT = "CUDA error: uncorrectable ECC error encountered"
BROKEN_ON_HOST1 = f"""
import os, pathlib
pathlib.Path("hosts").open("a").write(os.environ["SHARDLINE_HOST"] + "\\n")
if os.environ["SHARDLINE_HOST"] == "host1" and os.environ["LOCAL_RANK"] == "1":
    raise RuntimeError("{FAULT}")
"""


def run(rig: Rig, home: Path, name: str, **launch: Any) -> Path:
    """Run the script on two hosts with two ranks each. Returns the run's folder."""
    script, run_dir = home / "broken.py", home / name
    script.write_text(BROKEN_ON_HOST1)
    run_dir.mkdir()
    machines = inventory(2, 2)
    machines.write(run_dir / "inventory.json")
    fields = {key.removeprefix("launch__"): value for key, value in docker_config(rig, 2, 2, **launch).items()}
    config = RunConfig.model_validate({"launch": fields, "trainer": {"script": str(script)}})
    plan = plan_custom_program(config, machines, run_id=name, mlflow_run_id="", experiment=("0", "Default"))
    run_custom_program(plan, run_dir=run_dir)
    return run_dir


def test_after_two_faults_of_one_gpu_the_run_goes_on_without_its_host(
    rig: Rig, shardline_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = run(rig, shardline_home, "spared", min_hosts=1)
    assert causes(run_dir) == ["gpu fault", "gpu fault", "done"]
    assert [attempt["hosts"] for attempt in attempts_of(run_dir)] == [{"host0": 2, "host1": 2}] * 2 + [{"host0": 2}]
    assert {attempt["ending"]["gpu"] for attempt in attempts_of(run_dir)[:2]} == {1}
    assert "host1, GPU 1 failed 2 times: the run goes on without host1" in caplog.text
    assert_nothing_is_left(rig)


def test_without_a_host_to_spare_the_run_ends_and_names_the_gpu(rig: Rig, shardline_home: Path) -> None:
    with pytest.raises(RunFailed) as failed:
        run(rig, shardline_home, "needed")
    assert causes(shardline_home / "needed") == ["gpu fault", "gpu fault"]
    assert failed.value.cause == "gpu fault"
    assert failed.value.detail == f"host1, GPU 1: RuntimeError: {FAULT}"
    assert "without host1 1 hosts are left of the 2 that are needed" in str(failed.value)
    assert "launch.min_hosts" in str(failed.value)
    assert_nothing_is_left(rig)
