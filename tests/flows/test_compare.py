"""`shardline compare` through the real command: child runs under one parent, failures as rows, a report."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flows.cli.command import main
from tests.support.ranks import losses
from tests.support.user_folder import DEADLINE_S, UserFolder, wait_for_step

SHORT = (
    "model.dropout=0",
    "train.steps=30",
    "train.target_minutes=0.001",
    "train.log_every_steps=1",
    "evaluation.every_steps=0",
)
RECKLESS = "parallel.strategy=single,train.learning_rate=10,train.min_learning_rate=10,train.weight_decay=10"
STRATEGIES = f"ddp,zero2,zero2+tp2,boom={RECKLESS},train.warmup_steps=0"


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory, begun_home: Path) -> UserFolder:
    return UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home)


def children(user_folder: UserFolder, parent: Path) -> dict[str, Any]:
    """Strategy -> child run, as MLflow has them."""
    run = user_folder.mlflow_run(parent)
    found = user_folder.mlflow.search_runs(
        [run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'", max_results=100
    )
    return {child.data.tags["shardline.strategy"]: child for child in found}


@pytest.mark.slow
def test_strategies_side_by_side_with_failures_as_rows(user_folder: UserFolder) -> None:
    out, _ = user_folder.run("compare", str(user_folder.config), "--strategies", STRATEGIES, *SHORT, "--json", expect=1)
    comparison = json.loads(out)
    rows = {row["strategy"]: row for row in comparison["rows"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "single": "done",
        "ddp": "done",
        "zero2": "done",
        "zero2+tp2": "refused",
        "boom": "bad loss",
    }
    assert "parallel.tp = 2" in rows["zero2+tp2"]["cause"]
    assert "lower train.learning_rate" in rows["boom"]["cause"]
    for name in ("ddp", "zero2"):
        assert rows[name]["devices"] == 2
        assert rows[name]["steps"] == rows["single"]["steps"] == 30, "not those that fit, which differ"
        assert rows[name]["loss_difference"] < 1e-5, "n ranks make the update of one"
        assert rows[name]["speedup"] == pytest.approx(rows[name]["samples_per_s"] / rows["single"]["samples_per_s"])
        assert rows[name]["exposed_communication_ms"] > 0
        assert rows[name]["average_memory_gib"] > 0
        assert rows[name]["steps_to_target"] == pytest.approx(rows["single"]["steps_to_target"], abs=1)

    parent = user_folder.home / comparison["run_id"]
    assert user_folder.mlflow_run(parent).info.status == "FINISHED"
    statuses = {name: child.info.status for name, child in children(user_folder, parent).items()}
    assert statuses == {"single": "FINISHED", "ddp": "FINISHED", "zero2": "FINISHED", "boom": "FAILED"}
    plans = {name: json.loads((user_folder.home / rows[name]["run_id"] / "plan.json").read_text()) for name in statuses}
    assert len({plan["shards_fingerprint"] for plan in plans.values()}) == 1
    assert plans["single"]["threads_per_rank"] == plans["ddp"]["threads_per_rank"], "one of the same devices"

    reports = {name: (user_folder.home / rows[name]["run_id"] / "report.html").read_text() for name in statuses}
    assert "The run finished without an interruption" in reports["ddp"]
    assert "The run did not finish: training.train on" in reports["boom"]

    files = {artifact.path for artifact in user_folder.mlflow.list_artifacts(comparison["mlflow_run_id"])}
    assert {f"comparison.{kind}" for kind in ("html", "png", "json", "yaml")} <= files
    page = (parent / "comparison.html").read_text()
    assert "lower train.learning_rate" in page
    assert (parent / "comparison.png").read_bytes().startswith(b"\x89PNG")
    with closing(sqlite3.connect(user_folder.home / "prefect" / "prefect.db")) as db:
        (table,) = db.execute("select data from artifact where key = 'comparison'").fetchone()
        named = {name for (name,) in db.execute("select name from task_run")}
    assert "bad loss" in table
    assert {"Train with single", "Train with boom"} <= named


@pytest.mark.long
def test_a_stop_tells_parent_and_child_and_resume_does_what_is_left(user_folder: UserFolder) -> None:
    known, long = user_folder.run_dirs(), ("train.steps=400", "train.log_every_steps=1", "evaluation.every_steps=0")
    process = user_folder.start("compare", str(user_folder.config), "--strategies", "ddp", *long)
    child = wait_for_step(user_folder, process, known, 50)
    parent = child.with_name(child.name.removesuffix("-single"))
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert f"stopped at single: `shardline resume {parent.name}` continues" in err
    assert user_folder.mlflow_run(child).info.status == "KILLED"
    assert user_folder.mlflow_run(parent).info.status == "KILLED"
    rows = {row["strategy"]: row for row in json.loads((parent / "comparison.json").read_text())["rows"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {"single": "stopped", "ddp": "not run"}
    assert rows["single"]["samples_per_s"] > 0

    again = json.loads(user_folder.run("resume", parent.name, "--json")[0])
    assert {row["strategy"]: row["outcome"] for row in again["rows"]} == {"single": "done", "ddp": "done"}
    assert again["mlflow_run_id"] == user_folder.mlflow_run(parent).info.run_id
    assert user_folder.mlflow_run(parent).info.status == "FINISHED"
    assert {name: child.info.status for name, child in children(user_folder, parent).items()} == {
        "single": "FINISHED",
        "ddp": "FINISHED",
    }
    assert max(losses(child / "plan.json")) == 400


def test_a_wrong_strategy_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user_folder = UserFolder(tmp_path)
    monkeypatch.setenv("SHARDLINE_HOME", str(user_folder.home))
    assert main(["compare", str(user_folder.config), "--strategies", "ddp,magic"]) == 2
    assert "'magic' (of 'magic') is not a strategy" in capsys.readouterr().err
    assert user_folder.run_dirs() == []
