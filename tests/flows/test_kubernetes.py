"""The whole pipeline with its ranks in pods, by the command a user types; on the stand-in for a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.workspace.processes import free_port
from tests.support.kubernetes_api import KubernetesApi, why_no_pods
from tests.support.user_folder import UserFolder
from training.records.inventory import Inventory

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())]


def test_text_becomes_a_registered_model_in_pods(tmp_path: Path) -> None:
    user = UserFolder(tmp_path)
    with KubernetesApi(tmp_path / "cluster") as api:
        cluster = {"kubeconfig": str(api.kubeconfig), "nodes": 2, "volume_claim": "shared"}
        overrides = [f"launch.kubernetes.{name}={value}" for name, value in cluster.items()]
        launch = {"launcher": "kubernetes", "image": "x", "port": free_port(), "shm_gib": 0.1}
        overrides += [f"launch.{name}={value}" for name, value in launch.items()]
        out, err = user.run("pretrain", str(user.config), *overrides, "--json")
        assert not api.all("pods")
    assert json.loads(out)["alias"] == "champion", err
    [run_dir] = user.run_dirs()
    machines = Inventory.read(run_dir / "inventory.json")
    assert {host.name for host in machines.hosts} == {"node-0", "node-1"}
    assert all(host.network_gb_per_s for host in machines.hosts)  # the collective test's
    metrics = user.mlflow_run(run_dir).data.metrics  # sent by the launcher: pods do not reach a file of this machine
    assert metrics["eval/loss"] == json.loads(out)["val_loss"]
