"""Two nights by the real flow: the second continues the champion on new text and a share of the first night's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.configs import read_plan
from tests.support.user_folder import CONFIG, UserFolder
from training.records.results import EvalReport

NIGHT = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from flows.servers.embedded import start_servers
wait = start_servers()
from flows.nightly import pretrain_nightly
wait()
outcome = pretrain_nightly(json.load(sys.stdin), replay=0.4)
print(outcome.model_dump_json() if outcome is not None else "{}")
"""
FEW = {
    "train": CONFIG["train"] | {"steps": 100, "max_epochs": 0.5, "schedule": "wsd", "warmup_steps": 2},
    "evaluation": CONFIG["evaluation"] | {"every_steps": 0},
    "export": CONFIG["export"] | {"latency_seconds": 0},
    "gates": {"min_improvement": -5.0, "max_regression": 5.0},
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def night(user: UserFolder, *, says: str) -> dict[str, str]:
    """Its outcome. `says`: words of what it logs."""
    config = yaml.safe_load(user.config.read_text()) | FEW
    unset = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    done = subprocess.run(
        [sys.executable, "-c", NIGHT],
        input=json.dumps(config),
        env=environment | {"SHARDLINE_HOME": str(user.home)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, says in done.stderr) == (0, True), done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_second_night_goes_on_with_new_text_and_replays_the_first(tmp_path: Path, begun_home: Path) -> None:
    user = UserFolder(tmp_path, begun=begun_home)
    first = night(user, says="verses has no champion yet: new to it is all of 40 files")
    assert night(user, says="nothing new: verses/1 knows the 40 files") == {}
    for number in range(30):
        (user.corpus / f"new-{number}.txt").write_text(f"ships sing of number {number}\n" * 12)
    second = night(user, says="new to verses/1: 30 of 70 files")
    before, plan = (read_plan(user.home / each["run_id"]) for each in (first, second))
    new, old = plan.sources
    assert old.name == "first"
    share = old.epochs * old.tokens / (new.epochs * new.tokens + old.epochs * old.tokens)
    assert share == pytest.approx(0.4, abs=0.05)
    assert plan.config.train.optimizer_path.startswith(str(user.home / first["run_id"] / "checkpoints"))
    assert plan.vocab_size == before.vocab_size
    report = EvalReport.read(user.home / second["run_id"] / "eval.json")
    assert set(report.loss_by_source) == {new.name, "first"}
    client = user.mlflow
    version = client.get_model_version("verses", "2")
    assert version.tags["shardline.gate.sources"].startswith("passed: 2 sources compared with the champion's")
    assert int(client.get_model_version_by_alias("verses", "champion").version) == 2
