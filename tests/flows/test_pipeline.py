"""The whole pipeline through the real command: text in, registered model out; and what a stop or a kill leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.launch.recovery import attempts_of
from tasks.workspace.processes import local_process
from tests.support.ranks import losses
from tests.support.user_folder import AS_FILES, DEADLINE_S, UserFolder, wait_for_step
from training.records.record import sha256_file
from training.records.train_result import TrainResult, train_failure

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory, begun_home: Path) -> UserFolder:
    return UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home)


@pytest.fixture(scope="module")
def first(user_folder: UserFolder) -> dict[str, Any]:
    """The first pretrain in a new folder; its stdout is one JSON object."""
    out, _ = user_folder.run("pretrain", str(user_folder.config), "profile.steps=[30]", "--json")
    outcome: dict[str, Any] = json.loads(out)
    return outcome


def test_the_first_run_ends_as_champion_with_exact_figures(first: dict[str, Any]) -> None:
    assert (first["model"], first["version"], first["alias"]) == ("verses", 1, "champion")
    assert first["step"] == 60
    assert 0 < first["val_loss"] < 5.0
    assert 0 < first["bits_per_byte"] < 8
    assert first["generated"].startswith("the ")
    assert list(first["stage_s"]) == [
        "tokenize", "hardware", "plan", "train", "evaluate", "export", "register", "generate"
    ]  # fmt: skip


def test_no_stage_of_it_imports_for_itself(first: dict[str, Any], user_folder: UserFolder) -> None:
    attempts = attempts_of(user_folder.home / first["run_id"])
    assert [attempt["program"] for attempt in attempts if attempt["stood_by"]] == [
        "training.train", "training.evaluate", "training.export"
    ]  # fmt: skip


def test_mlflow_has_config_metrics_data_and_a_true_status(
    first: dict[str, Any], user_folder: UserFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = user_folder.home / first["run_id"]
    run = user_folder.mlflow_run(run_dir)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "60"
    assert run.data.params["data.tokenizer.kind"] == "bpe"
    history = user_folder.mlflow.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == losses(run_dir / "plan.json")
    assert run.data.metrics["eval/loss"] == first["val_loss"]
    against_plan = first["against_plan"]
    assert against_plan.items() <= {key.removeprefix("train/"): it for key, it in run.data.metrics.items()}.items()
    step_error = against_plan["step_ms"] / against_plan["predicted_step_ms"] - 1
    assert against_plan["step_error_percent"] == pytest.approx(100 * step_error)
    memory_error = first["peak_memory_gib"] / against_plan["predicted_memory_gib"] - 1
    assert against_plan["memory_error_percent"] == pytest.approx(100 * memory_error)
    used = sum(first["spent"]["device_hours"].values())
    assert run.data.metrics["cost/device_hours"] == pytest.approx(used)
    assert run.inputs.dataset_inputs[0].dataset.digest
    kind = user_folder.mlflow.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"]
    assert kind == "custom_model_development", "MLflow's pages are those of training runs"
    artifacts = {artifact.path for artifact in user_folder.mlflow.list_artifacts(run.info.run_id)}
    assert {"config.json", "plan.json", "dataset.json", "inventory.json", "summary.png", "eval.json"} <= artifacts
    assert {"report.html", "curves.png", "latency.json", "export-latency.png"} <= artifacts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{user_folder.home}/mlflow.db")
    samples = user_folder.mlflow.load_table(run.info.experiment_id, "samples.json", [run.info.run_id])
    assert samples.columns.tolist() == ["step", "prompt", "text", "seed", "run"]
    assert samples[["step", "prompt", "run"]].values.tolist() == [[step, "the ", run_dir.name] for step in (30, 60)]
    assert samples["text"].map(len).min() > 0
    traces = {artifact.path for artifact in user_folder.mlflow.list_artifacts(run.info.run_id, "profile")}
    assert "profile/step-00000030-rank-0.json.gz" in traces


def test_prefect_and_mlflow_runs_link_to_each_other(first: dict[str, Any], user_folder: UserFolder) -> None:
    run = user_folder.mlflow_run(user_folder.home / first["run_id"])
    flow_run_id = run.data.tags["prefect.flow_run_id"]
    assert user_folder.prefect_states()[flow_run_id] == "COMPLETED"
    with closing(sqlite3.connect(user_folder.home / "prefect" / "prefect.db")) as db:
        name = db.execute("select name from flow_run where id = ?", (flow_run_id,)).fetchone()[0]
        rows = db.execute(
            "select key, data, description from artifact where flow_run_id = ?", (flow_run_id,)
        ).fetchall()
    artifacts, descriptions = {key: data for key, data, _ in rows}, {key: description for key, _, description in rows}
    assert name == first["run_id"]
    assert run.info.run_id in artifacts["mlflow-run"]
    assert {"plan", "evaluation", "gate", "outcome", "training"} <= artifacts.keys()
    assert "The run finished without an interruption" in artifacts["report"]
    last = losses(user_folder.home / first["run_id"] / "plan.json")[60]
    assert f"step 60/60  loss {last:.3f}" in descriptions["training"]


def test_lineage_walks_from_the_version_to_the_bytes_of_the_checkpoint(
    first: dict[str, Any], user_folder: UserFolder
) -> None:
    out, _ = user_folder.run("lineage", "verses@champion", "--json")
    lineage = json.loads(out)
    run_dir = user_folder.home / first["run_id"]
    manifest = run_dir / lineage["checkpoint"]["path"] / "manifest.json"
    assert lineage["checkpoint"]["sha256"] == sha256_file(manifest)
    for name, file in json.loads(manifest.read_text())["files"].items():
        assert sha256_file(manifest.parent / name) == file["sha256"]
    shards = next((user_folder.home / "tokens").glob("*/manifest.json"))
    assert lineage["dataset"]["fingerprint"] == json.loads(shards.read_text())["fingerprint"]
    assert lineage["tokenizer"]["sha256"] == sha256_file(shards.parent / "tokenizer" / "tokenizer.json")
    assert lineage["config"]["train"]["steps"] == 60
    assert len(lineage["git_commit"]) == 40 or lineage["git_commit"] == "unknown"


def test_generate_prints_a_continuation_of_the_prompt(first: dict[str, Any], user_folder: UserFolder) -> None:
    out, _ = user_folder.run("generate", "verses@champion", "the ", "--tokens", "12")
    again, _ = user_folder.run("generate", "verses@champion", "the ", "--tokens", "12")
    assert out == again
    assert out.startswith("the ")
    assert len(out) > 8


@pytest.mark.long
def test_a_second_run_does_not_tokenize_again_and_an_equal_model_stays_challenger(
    first: dict[str, Any], user_folder: UserFolder
) -> None:
    out, err = user_folder.run("pretrain", str(user_folder.config), "--json")
    second = json.loads(out)
    assert "not tokenized again" in err
    assert second["val_loss"] == first["val_loss"], "same config, same seed, same machine"
    assert (second["version"], second["alias"]) == (2, "challenger")
    assert json.loads(user_folder.run("lineage", "verses@champion", "--json")[0])["model"]["version"] == 1


@pytest.mark.long
def test_reproduce_finds_the_same_losses_to_the_bit(first: dict[str, Any], user_folder: UserFolder) -> None:
    out, _ = user_folder.run("reproduce", "verses@champion", "--json")
    agreement = json.loads(out)
    assert agreement["original"] == first["run_id"]
    assert agreement["compared"] == len(losses(user_folder.home / first["run_id"] / "plan.json"))
    assert agreement["max_difference"] == 0.0
    assert agreement["agrees"] is True


LONG = (
    *("name=long", *AS_FILES),
    *("train.steps=200", "train.log_every_steps=1", "checkpoint.every_steps=25", "evaluation.every_steps=0"),
)


@pytest.mark.parametrize(
    "signum",
    [pytest.param(signal.SIGINT, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.long)],
)
def test_a_stop_saves_a_checkpoint_says_killed_and_resume_goes_on_to_the_bit(
    signum: signal.Signals, user_folder: UserFolder, undisturbed: Callable[[Path], dict[int, float]]
) -> None:
    known = user_folder.run_dirs()
    process = user_folder.start("pretrain", str(user_folder.config), *LONG)
    run_dir = wait_for_step(user_folder, process, known, random.randint(30, 100))
    os.killpg(process.pid, signum)  # as a terminal does: all that shares its process group
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert f"shardline resume {run_dir.name}" in err
    result = TrainResult.read(run_dir / "result.json")
    assert result.stopped_by == "signal"
    assert (run_dir / result.checkpoint / "manifest.json").exists()
    stopped = user_folder.mlflow_run(run_dir)
    assert stopped.info.status == "KILLED"
    assert "The run did not finish: interrupted" in (run_dir / "report.html").read_text()
    assert user_folder.prefect_states()[stopped.data.tags["prefect.flow_run_id"]] == "CANCELLED"

    outcome = json.loads(user_folder.run("resume", run_dir.name, "--json")[0])
    assert outcome["mlflow_run_id"] == stopped.info.run_id, "a resume goes on with the same MLflow run"
    assert user_folder.mlflow_run(run_dir).info.status == "FINISHED"
    assert "The run was stopped after step" in (run_dir / "report.html").read_text()
    assert losses(run_dir / "plan.json") == undisturbed(run_dir)


@pytest.fixture
def killed(user_folder: UserFolder) -> Path:
    """A run whose launcher got a kill -9 in the middle; the ranks see it and leave by themselves."""
    known = user_folder.run_dirs()
    process = user_folder.start("pretrain", str(user_folder.config), *LONG)
    run_dir = wait_for_step(user_folder, process, known, random.randint(30, 100))
    process.kill()
    process.wait()  # not communicate(): the embedded Prefect server holds the pipes until the next start ends it
    return run_dir


def test_after_a_kill_9_resume_takes_over_and_every_status_is_true(
    user_folder: UserFolder, undisturbed: Callable[[Path], dict[int, float]], killed: Path
) -> None:
    assert user_folder.mlflow_run(killed).info.status == "RUNNING", "nobody was left to say otherwise"
    flow_run_id = user_folder.mlflow_run(killed).data.tags["prefect.flow_run_id"]
    left_behind = json.loads((killed / "owner.json").read_text())["children"]
    assert any(local_process(key) for key in left_behind)
    out, err = user_folder.run("resume", killed.name, "--json")
    assert not any(local_process(key) for key in left_behind)
    assert "was killed: reported it to MLflow as KILLED" in err
    assert user_folder.mlflow_run(killed).info.status == "FINISHED"
    assert user_folder.prefect_states()[flow_run_id] == "CRASHED"
    assert json.loads(out)["step"] == 200
    assert losses(killed / "plan.json") == undisturbed(killed)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=/no/such/file"], "/no/such/file"),
        (["train.steps=0"], "train.steps = 0"),
        (["train.context=100000"], "train.context + 1 = 100,001"),
        (["parallel.ranks=7"], "train.global_batch = 8 cannot be split evenly over 7 data-parallel ranks"),
        (["model.heads=5"], "model.width = 64 is not divisible by model.heads = 5"),
    ],
)
def test_bad_input_ends_with_2_and_one_clear_line(
    overrides: list[str], message: str, user_folder: UserFolder, first: dict[str, Any]
) -> None:
    _, err = user_folder.run("pretrain", str(user_folder.config), *overrides, expect=2)
    assert message in err
    assert "Traceback" not in err
    assert all(user_folder.mlflow_run(run_dir).info.status != "RUNNING" for run_dir in user_folder.run_dirs())


def test_a_failing_rank_ends_with_1_and_its_cause(user_folder: UserFolder) -> None:
    known = user_folder.run_dirs()
    reckless = ("learning_rate=10", "min_learning_rate=10", "weight_decay=10", "warmup_steps=0", "steps=400")
    _, err = user_folder.run(
        "pretrain", str(user_folder.config), *(f"train.{override}" for override in reckless), expect=1
    )
    assert "lower train.learning_rate" in err
    (run_dir,) = [path for path in user_folder.run_dirs() if path not in known]
    assert user_folder.mlflow_run(run_dir).info.status == "FAILED"
    assert "lower train.learning_rate" in (run_dir / "report.html").read_text()
    tags = user_folder.mlflow_run(run_dir).data.tags
    assert "lower train.learning_rate" in tags["shardline.ended_by"]
    failure = train_failure(run_dir / "result.json")
    assert failure is not None
    assert failure.stopped_by == tags["shardline.cause"] == "bad loss"
    assert "lower train.learning_rate" in failure.detail
    with pytest.raises(ValueError, match=rf"training ended by bad loss.*shardline resume {run_dir.name}"):
        TrainResult.read(run_dir / "result.json")
