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

from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left, docker_config

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
