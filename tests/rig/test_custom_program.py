"""Programs of others, unchanged: a Hugging Face Trainer's and an Accelerate script on two hosts, in the flow's run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from tasks.launch.programs import run_custom_program
from tasks.planning.custom_program import plan_custom_program
from tests.support.configs import inventory
from tests.support.launched_runs import causes
from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left, docker_config
from training.config.run import RunConfig

SCRIPTS = Path(__file__).parents[1] / "programs" / "trainers"
REPO = Path(__file__).parents[2]
STEPS = 5

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def write_config(rig: Rig, home: Path, trainer: dict[str, Any], **launch: Any) -> Path:
    """A user's YAML file."""
    fields = docker_config(rig, 2, 1, **launch)
    config = {
        "name": Path(trainer["script"]).stem.replace("_", "-"),
        "launch": {key.removeprefix("launch__"): value for key, value in fields.items()},
        "trainer": trainer,
        "parallel": {"timeout_s": 120},
    }
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    return path


def pretrain(config: Path, *, uri: str) -> subprocess.CompletedProcess[str]:
    unset = ("PREFECT_API_URL", "PREFECT_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", "pretrain", str(config), "--json"],
        capture_output=True,
        text=True,
        env=env | {"MLFLOW_TRACKING_URI": uri},
        cwd=REPO,
    )


@pytest.mark.parametrize(
    ("script", "args"),
    [
        pytest.param("hf_trainer.py", ["{run_dir}/out", str(STEPS)], id="Hugging Face Trainer"),
        pytest.param("accelerated.py", [str(STEPS)], marks=pytest.mark.long, id="Accelerate"),
    ],
)
def test_a_script_of_others_logs_into_the_flows_run(
    rig: Rig, shardline_home: Path, mlflow_server: str, script: str, args: list[str]
) -> None:
    config = write_config(rig, shardline_home, {"script": str(SCRIPTS / script), "args": args})
    done = pretrain(config, uri=mlflow_server)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    run_dir = shardline_home / outcome["run_id"]
    assert outcome["hosts"] == {"host0": 2, "host1": 1}
    assert "evaluate, export, register" in done.stderr, "what is left out is said"

    client = MlflowClient(mlflow_server)
    (run,) = client.search_runs([client.get_run(outcome["mlflow_run_id"]).info.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == outcome["run_id"]
    assert run.data.tags["shardline.trainer"].endswith(script)
    logged = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(set(logged)) == list(range(1, STEPS + 1))
    assert [experiment.name for experiment in client.search_experiments()].count("a-project-of-its-own") == 0
    if script == "hf_trainer.py":
        assert (run_dir / "out" / f"checkpoint-{STEPS}" / "model.safetensors").exists()
    else:
        assert run.data.metrics["processes"] == 3
    assert_nothing_is_left(rig)


@pytest.mark.long
def test_a_script_that_fails_is_told_with_its_error(rig: Rig, shardline_home: Path, mlflow_server: str) -> None:
    script = shardline_home / "broken.py"
    script.write_text("raise ValueError('no such corpus: verses')\n")
    done = pretrain(
        write_config(rig, shardline_home, {"script": str(script)}, collective_test=False), uri=mlflow_server
    )
    assert done.returncode == 1
    assert "no such corpus: verses" in done.stderr
    assert "attempt 2" not in done.stderr, "no other attempt would end differently"
    (run_dir,) = (path.parent for path in shardline_home.glob("*/run.json"))
    run_id = json.loads((run_dir / "run.json").read_text())["mlflow_run_id"]
    assert MlflowClient(mlflow_server).get_run(run_id).info.status == "FAILED"
    assert_nothing_is_left(rig)


@pytest.mark.long
def test_a_script_whose_rank_is_killed_is_started_again(rig: Rig, shardline_home: Path) -> None:
    script = shardline_home / "fragile.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "tried = pathlib.Path(sys.argv[1], 'tried-' + os.environ['RANK'])\n"
        "if os.environ['RANK'] == '1' and not tried.exists():\n"
        "    tried.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path('done-' + os.environ['RANK']).touch()\n"  # where it stands
    )
    run_dir = shardline_home / "fragile"
    run_dir.mkdir()
    machines = inventory(1, 1)
    machines.write(run_dir / "inventory.json")
    launch = {key.removeprefix("launch__"): value for key, value in docker_config(rig, 1, 1).items()}
    config = RunConfig.model_validate({"launch": launch, "trainer": {"script": str(script), "args": ["{run_dir}"]}})
    plan = plan_custom_program(config, machines, run_id="fragile", mlflow_run_id="", experiment=("0", "Default"))
    run_custom_program(plan, run_dir=run_dir)
    assert causes(run_dir) == ["killed", "done"]
    assert sorted(path.name for path in run_dir.glob("done-*")) == ["done-0", "done-1"]
    assert_nothing_is_left(rig)
