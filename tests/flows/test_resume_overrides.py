"""`shardline resume RUN section.field=value`: what is exact goes on, what is not needs --force, MLflow has the diff."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.artifacts import download_artifacts

from tests.support.configs import read_plan
from tests.support.ranks import losses, run_ranks
from tests.support.user_folder import AS_FILES, UserFolder
from training.records.plan import RunPlan
from training.records.train_result import TrainResult
from training.tracking.rows import read_rows
from training.tracking.stop_rules import elapsed_s

pytestmark = pytest.mark.long  # whole pipelines beside those of tests/flows/test_pipeline.py

SHORT = (
    *AS_FILES,
    *("train.steps=20", "train.schedule=constant", "evaluation.every_steps=10", "train.log_every_steps=1"),
)


@pytest.fixture(scope="module")
def user_folder(user_of_prefect: UserFolder) -> UserFolder:
    return user_of_prefect


@pytest.fixture(scope="module")
def begun(user_folder: UserFolder) -> Path:
    """The folder of a run of 20 steps that came to its end."""
    outcome = json.loads(user_folder.run("pretrain", str(user_folder.config), *SHORT, "--json")[0])
    return user_folder.home / outcome["run_id"]


@pytest.fixture(scope="module")
def extended(user_folder: UserFolder, begun: Path) -> tuple[dict[str, Any], str]:
    """The same run, 40 steps long: outcome, and what was said."""
    out, err = user_folder.run("resume", begun.name, "train.steps=40", "evaluation.sample_tokens=8", "--json")
    return json.loads(out), err


def artifact(user_folder: UserFolder, run_dir: Path, name: str) -> Any:
    uri = f"sqlite:///{user_folder.home}/mlflow.db"
    run_id = user_folder.mlflow_run(run_dir).info.run_id
    return json.loads(Path(download_artifacts(run_id=run_id, artifact_path=name, tracking_uri=uri)).read_text())


def test_a_constant_rate_goes_on_exactly_and_the_result_is_registered(
    extended: tuple[dict[str, Any], str], user_folder: UserFolder, begun: Path
) -> None:
    outcome, err = extended
    assert (outcome["run_id"], outcome["step"], outcome["version"]) == (begun.name, 40, 2)
    assert "resumed with train.steps 20 -> 40 (exact)" in err
    assert "resumed with evaluation.sample_tokens 16 -> 8 (exact)" in err
    assert RunPlan.read(begun / "plan-1.json").steps == 20
    assert read_plan(begun).steps == 40
    assert sorted(losses(begun / "plan.json")) == list(range(1, 41))


def test_mlflow_has_the_diff_and_the_new_config(
    extended: tuple[dict[str, Any], str], user_folder: UserFolder, begun: Path
) -> None:
    run = user_folder.mlflow_run(begun)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "20", "MLflow keeps the parameters that a run began with"
    assert run.data.tags["shardline.exact"] == "true"
    assert "after step 20: " in run.data.tags["shardline.resume_overrides"]
    (resumption,) = artifact(user_folder, begun, "resume-overrides.json")["resumptions"]
    changed = {change["field"]: (change["old"], change["new"]) for change in resumption["changes"]}
    assert changed == {"train.steps": (20, 40), "evaluation.sample_tokens": (16, 8)}
    assert artifact(user_folder, begun, "config.json")["train"]["steps"] == 40


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["train.seed=5", "train.clip_norm=2"],
            ["--force", "train.seed 1337 -> 5 (breaks", "clip_norm 1.0 -> 2"],
        ),
        (["model.layers=3", "--force"], ["start a new one: model.layers 2 -> 3 (cannot be changed"]),
        (["train.steps=30"], ["the run is at step 40 already, by the new settings it would end at step 30"]),
        (["train.stpes=30"], ["train.stpes is not a field of the config"]),
    ],
)
def test_what_cannot_or_should_not_go_on_ends_with_2_and_changes_nothing(
    overrides: list[str],
    messages: list[str],
    extended: tuple[dict[str, Any], str],
    user_folder: UserFolder,
    begun: Path,
) -> None:
    before = (begun / "plan.json").read_text()
    _, err = user_folder.run("resume", begun.name, *overrides, expect=2)
    assert all(message in err for message in messages), err
    assert (begun / "plan.json").read_text() == before
    assert user_folder.mlflow_run(begun).info.status == "FINISHED"


def test_an_extended_run_is_to_the_bit_the_one_that_was_long_from_the_start(
    extended: tuple[dict[str, Any], str], begun: Path, tmp_path: Path
) -> None:
    shutil.copy(begun / "plan.json", tmp_path)
    run_ranks(tmp_path / "plan.json")
    assert losses(tmp_path / "plan.json") == losses(begun / "plan.json")


def test_approval_that_a_resume_asks_for_is_not_passed_over_by_the_run(user_folder: UserFolder, begun: Path) -> None:
    """The gates are those of the latest plan: the run neither promotes its model by itself nor waits in its flow."""
    changed = ("train.steps=44", "gates.approval=prefect", "gates.min_improvement=-10")
    outcome = json.loads(user_folder.run("resume", begun.name, *changed, "--json")[0])
    assert (outcome["step"], outcome["alias"]) == (44, "challenger")
    assert outcome["verdict"].startswith("waits for approval: ")


def test_force_goes_on_and_the_run_can_no_longer_be_reproduced(user_folder: UserFolder, begun: Path) -> None:
    _, err = user_folder.run("resume", begun.name, "train.learning_rate=0.001", "train.steps=50", "--force")
    assert "train.learning_rate 0.003 -> 0.001 (breaks exactness: step 6 had learning rate 0.003, would" in err
    run = user_folder.mlflow_run(begun)
    assert (run.info.status, run.data.tags["shardline.exact"]) == ("FINISHED", "false")
    assert TrainResult.read(begun / "result.json").step == 50
    _, err = user_folder.run("reproduce", begun.name, expect=2)
    assert "no single config gives its losses" in err


def test_a_run_that_its_hours_ended_is_registered_and_trains_on_with_more(user_folder: UserFolder) -> None:
    endless = (*AS_FILES, "train.steps=1000000", "train.schedule=constant", f"train.max_hours={1 / 3600}")
    out, err = user_folder.run("pretrain", str(user_folder.config), *endless, "--json")
    first = json.loads(out)
    assert "training is done by train.max_hours" in err
    assert TrainResult.read(user_folder.home / first["run_id"] / "result.json").stopped_by == "hours"
    assert (first["step"] < 1_000_000, first["version"] > 0) == (True, True)
    assert user_folder.mlflow_run(user_folder.home / first["run_id"]).info.status == "FINISHED"

    again, err = user_folder.run("resume", first["run_id"], "--json")
    assert "training is done already by train.max_hours" in err
    assert json.loads(again)["step"] == first["step"]
    trained_s = elapsed_s(read_rows(user_folder.home / first["run_id"] / "metrics.jsonl"))
    longer = f"train.max_hours={(trained_s + 10) / 3600}"
    more, err = user_folder.run("resume", first["run_id"], longer, "--json")
    assert json.loads(more)["step"] > first["step"]
