"""One run's damaged records do not keep the commands that look at all runs from the others; they say so once."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flows.cli.command import main
from tasks.operations.gpu_queue import LocalDevices
from tasks.operations.prune import prune
from tasks.operations.ps import known_hosts, list_running
from tasks.operations.run_metrics import RunMetrics
from tasks.operations.servers import list_servers
from tasks.runs.owner import Owner, RanksLauncher
from tasks.serving.server_record import ServerRecord
from tasks.tracking.final_status import ENDING, RunStatus, reconcile_mlflow
from tasks.tracking.mlflow_run import run_begun_by, tracked
from tasks.workspace import skip
from tasks.workspace.locks import owned
from tasks.workspace.paths import tracking_uri
from tasks.workspace.processes import process_key
from tests.support.configs import tiny_config
from tests.support.tiny_shards import MakeRun

CURE = "restore it from a copy, or move it away"
# In the home of the fixture. `a`: its end is not reported yet.
OF_A = ("owner.json", "ending.json", "history.json", "gang.json", "metrics.sent.json", "run.json", "plan.json")
RECORDS = {*(f"a/{name}" for name in OF_A), "a/metrics.jsonl", "servers/1.json", "up.json"}
FLOW_RUN = "0f5b8b0e-0000-4000-8000-000000000000"


@pytest.fixture
def home(embedded_home: Path, make_run: MakeRun) -> Iterator[Path]:
    """Run a, which failed while MLflow was away, and run b, on which this process works; a server, and `up`."""
    ours = process_key(os.getpid())
    dead = ours.replace(f"/{os.getpid()}/", "/4194304/")
    plan = make_run("plan")
    for name in ("a", "b"):
        with tracked(tiny_config(), run_id=name, tags={"prefect.root_flow_run_id": FLOW_RUN}) as run:
            shutil.copy(plan, run.folder / "plan.json")
            (run.folder / "metrics.jsonl").write_text('{"step": 1, "time_ms": 1, "loss": 2.5}\n')
        Owner(process=ours if name == "b" else dead, children=(), flow_run=FLOW_RUN).write(run.folder / "owner.json")
        RanksLauncher(launcher=dead).write(run.folder / "gang.json")
    RunStatus(status="FAILED", cause="error", why="it broke").write(embedded_home / "a" / ENDING)
    ServerRecord(url="http://127.0.0.1:1", ref="m", model="m", process=dead).write(embedded_home / "servers" / "1.json")
    (embedded_home / "up.json").write_text(json.dumps({"prefect": {"url": "http://127.0.0.1:2", "process": dead}}))
    with owned(embedded_home / "b"):
        yield embedded_home


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + (b"\n" if path.suffix == ".jsonl" else b""))


def of_another_version(path: Path) -> None:
    """Take away the number of its format."""
    content = json.loads(path.read_bytes())
    del content["format"]
    path.write_text(json.dumps(content))


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def look_at_all(home: Path) -> None:
    """Do what ps, metrics, prune, a queue for a device, a retried flow run and reconcile do; each sees run b."""
    assert "b" in {row.run for row in list_running(known_hosts()).running}
    metrics = RunMetrics(home, keep_s=3600.0).collect()
    assert "b" in {sample.labels.get("run") for metric in metrics for sample in metric.samples}
    assert {"b"} <= {item.path for item in prune(older_than_days=0, keep_newest=0, dry_run=True).items}
    assert len(list_servers()) <= 1
    with ExitStack() as held:
        (home / "devices").mkdir(exist_ok=True)
        (home / "devices" / "gpu").write_text(json.dumps({"run": "a"}))
        assert LocalDevices(["gpu"], run_id="c", held=held).take() is None
    assert run_begun_by(FLOW_RUN, tiny_config()) == "b"
    assert [run.run_id for run in reconcile_mlflow()] in ([], ["a"])
    assert tracking_uri() == f"sqlite:///{home}/mlflow.db"


@pytest.mark.parametrize("damage", [empty, cut_in_half, replaced_by_a_folder])
def test_the_commands_go_on_and_name_it_once(
    damage: Callable[[Path], None], home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    shutil.copytree(home / "a", tmp_path / "whole")
    for name in sorted(RECORDS):
        kept = (home / name).read_bytes()
        damage(home / name)
        skip._said.clear()
        caplog.clear()
        look_at_all(home)
        said = [record.getMessage() for record in caplog.records if str(home / name) in record.getMessage()]
        silent = damage is empty and name == "a/metrics.jsonl"  # as before the first row
        assert len(said) == (0 if silent else 1), (name, said)
        assert all(message.endswith(CURE) for message in said)
        if damage is replaced_by_a_folder:
            (home / name).rmdir()
        (home / name).write_bytes(kept)
        for path in (tmp_path / "whole").glob("*.json*"):  # reconcile has reported the end of run a
            shutil.copy(path, home / "a")


def test_runs_of_another_version_are_left_out_in_one_line(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    for each in OF_A:
        if (path := home / "a" / each).exists():
            of_another_version(path)
    shutil.copytree(home / "a", home / "c")
    skip._said.clear()
    look_at_all(home)
    said = [message for message in caplog.messages if "another version of Shardline" in message]
    assert said.pop(0) == "left out 2 runs: another version of Shardline wrote a, c"
    assert all(message.startswith("whether ranks of run a still have GPUs is unknown: ") for message in said)
    kept = {item.path for item in prune(older_than_days=0, keep_newest=0, dry_run=True).items if item.kept}
    assert {"a", "c"} <= kept
    assert main(["stop", "a"]) == 1
    assert main(["resume", "a"]) == 1


def test_a_command_for_a_damaged_run_fails_and_names_the_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty(home / "a" / "run.json")
    assert main(["resume", "a"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == f"shardline: {home}/a/run.json is empty: restore it from a copy, or move it away"
