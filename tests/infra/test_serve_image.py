"""The serving image: what its extra installs is enough for `shardline serve`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

SERVE = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import tasks.inference.onnx_batching, tasks.serving.server, flows.cli.command
sys.exit(flows.cli.command.main(["serve", "tiny@champion", "--port", "0"]))
"""


@pytest.mark.slow
def test_it_serves_without_torch_prefect_and_the_rest_of_the_head_node(tmp_path: Path) -> None:
    missing = {"torch", "prefect", "transformers", "datasets", "docker", "pandas", "matplotlib", "rich", "flask"}
    environment = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    environment |= {"SHARDLINE_HOME": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", SERVE.format(missing=missing)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment)
    # All is imported by then: the registry is asked, and is not there.
    assert (done.returncode, "MLflow at http://127.0.0.1:9 does not answer" in done.stderr) == (1, True), done.stderr
