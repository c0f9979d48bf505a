"""System metrics of every host of a run, in its one MLflow run."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support.configs import read_plan
from tests.support.launched_runs import train
from tests.support.rig.rig import Rig
from tests.support.rig.runs import make_docker_run
from training.tracking.rows import read_rows


@pytest.mark.long
def test_each_host_has_its_own_under_its_name(
    rig: Rig, shardline_home: Path, mlflow_server: str, tiny_shards: Path
) -> None:
    run_dir = make_docker_run(rig, shardline_home, tiny_shards, "machines", 1, 1, train__steps=20)
    train(run_dir)
    client, plan = MlflowClient(mlflow_server), read_plan(run_dir)
    for name in plan.hosts:
        rows = read_rows(run_dir / "system" / f"{name}.jsonl")
        assert rows[-1]["step"] == 20
        history = client.get_metric_history(plan.mlflow_run_id, f"system/{name}/system_memory_usage_percentage")
        assert [metric.step for metric in history] == [row["step"] for row in rows]
        assert all(0 < metric.value < 100 for metric in history)
