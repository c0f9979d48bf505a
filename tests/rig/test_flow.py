"""The main job on two Docker hosts, through the command that users give: text in, registered model out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from mlflow import MlflowClient

from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left
from training.records.inventory import Inventory

REPO = Path(__file__).parents[2]


def config(rig: Rig, text: Path) -> dict[str, object]:
    hosts = [rig.host_config(0, slots=2), rig.host_config(1, slots=1)]
    return {
        "name": "rigged",
        "data": {"path": str(text), "tokenizer": {"kind": "bytes"}},
        "model": {"layers": 2, "width": 32, "heads": 4},
        "train": {"steps": 12, "context": 32, "global_batch": 6, "micro_batch": 1, "log_every_steps": 1},
        "parallel": {"strategy": "zero2", "precision": "fp32"},
        "evaluation": {"every_steps": 6, "quick_sequences": 6, "sample_tokens": 4},
        "launch": {
            "launcher": "docker",
            "hosts": hosts,
            "image": rig.image,
            "mounts": list(rig.mounts),
            "memlock": False,
            "shm_gib": 0.25,
        },
    }


def test_text_in_registered_model_out(rig: Rig, shardline_home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs" for n in range(400)))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config(rig, text)))))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PREFECT"))}
    environment["MLFLOW_TRACKING_PASSWORD"] = "not-to-be-seen"  # reaches ranks over stdin alone
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "pretrain", str(path), "--json"],
        env=environment,
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["step"], outcome["alias"]) == (12, "champion")
    run_dir = shardline_home / outcome["run_id"]
    client = MlflowClient(f"sqlite:///{shardline_home}/mlflow.db")
    assert client.get_run(outcome["mlflow_run_id"]).info.status == "FINISHED"
    assert len(client.get_metric_history(outcome["mlflow_run_id"], "loss")) == 12
    measured = client.get_run(outcome["mlflow_run_id"]).data.metrics
    assert all(0 < measured[f"system/{host}/system_memory_usage_percentage"] < 100 for host in ("host0", "host1"))
    artifacts = {file.path for file in client.list_artifacts(outcome["mlflow_run_id"])}
    assert {"plan.json", "inventory.json", "network.json", "summary.png"} <= artifacts
    plan = json.loads((run_dir / "plan.json").read_text())
    assert dict(zip(plan["hosts"], plan["ranks_per_host"], strict=True)) == {"host0": 2, "host1": 1}
    machines = Inventory.read(run_dir / "inventory.json").hosts
    assert all(0.01 < host.network_gb_per_s < 200 and 1 < host.network_latency_us < 1e6 for host in machines)
    logs = {path.name: path.read_text() for path in (run_dir / "logs").glob("*.log")}
    assert set(logs) == {"host0.log", "host1.log"}
    assert all("not-to-be-seen" not in path.read_text() for path in run_dir.rglob("*.json"))
    assert_nothing_is_left(rig)
