"""The main job under Slurm, through the command that users give; and what it shows of planted secrets meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import yaml
from mlflow import MlflowClient

from tests.support.repository import REPO
from tests.support.slurm_cluster import SlurmCluster
from training.records.inventory import Inventory

CONFIG = {
    "name": "slurmed",
    "data": {"tokenizer": {"kind": "bytes"}},
    "model": {"layers": 2, "width": 32, "heads": 4},
    "train": {"steps": 12, "context": 32, "global_batch": 6, "micro_batch": 1, "log_every_steps": 1},
    "parallel": {"strategy": "zero2", "precision": "fp32"},
    "evaluation": {"every_steps": 6, "quick_sequences": 6, "sample_tokens": 4},
    "export": {"latency_seconds": 0},
    "launch": {"launcher": "slurm", "slurm": {"nodes": 2, "time_limit_s": 1800}},
}
PLANTED = {
    "HF_TOKEN": "hf_planted-1f0c5a",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-2b77e0",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-3d91c4",
}
LOOK_EVERY_S = 0.5


def shown(cluster: SlurmCluster) -> dict[str, bytes]:
    """Where -> what any user of the cluster, or its controller's disk, can see now."""
    seen = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            seen[f"command line {command[:80]!r}"] = command
    for job in cluster.jobs():
        with suppress(AssertionError):  # it has just ended
            seen[f"job {job}"] = cluster.ask("scontrol", "--details", "show", "job", job).encode()
            seen[f"script of {job}"] = cluster.ask("scontrol", "write", "batch_script", job, "-").encode()
    for path in [*(cluster.folder / "state").rglob("*"), *(cluster.folder / "spool").rglob("*")]:
        with suppress(OSError):
            if path.is_file():
                seen[str(path)] = path.read_bytes()
    return seen


def test_text_in_registered_model_out_and_no_secret_seen(cluster: SlurmCluster, home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs" for n in range(400)))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"data": CONFIG["data"] | {"path": str(text)}}))  # type: ignore[operator]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PREFECT"))}
    seen: dict[str, bytes] = {}
    output = tmp_path / "output.json"
    with output.open("wb") as stdout, (tmp_path / "command.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "pretrain", str(path), "--json"],
            env=environment | PLANTED,
            cwd=REPO,
            stdout=stdout,
            stderr=log,
        )
        while process.poll() is None:
            seen |= shown(cluster)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY_S)
    assert process.returncode == 0, (tmp_path / "command.log").read_text()
    outcome = json.loads(output.read_text())
    assert (outcome["step"], outcome["alias"]) == (12, "champion")
    run_dir = home / outcome["run_id"]
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    assert client.get_run(outcome["mlflow_run_id"]).info.status == "FINISHED"
    assert len(client.get_metric_history(outcome["mlflow_run_id"], "loss")) == 12
    plan = json.loads((run_dir / "plan.json").read_text())
    assert dict(zip(plan["hosts"], plan["ranks_per_host"], strict=True)) == {"node0": 1, "node1": 1}
    machines = Inventory.read(run_dir / "inventory.json").hosts
    assert {host.name for host in machines} == {"node0", "node1"}
    assert all(host.network_gb_per_s > 0 and host.cores == 1 for host in machines), "measured inside of the allocation"
    assert cluster.jobs() == [], "the nodes were given back"
    left = {str(file): file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    assert any(b"training.node" in content for content in seen.values())
    assert any(name.startswith("script of") for name in seen)
    for name, secret in PLANTED.items():
        found = [where for where, content in (seen | left).items() if secret.encode() in content]
        assert not found, f"{name} is in {found}"
