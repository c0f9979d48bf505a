"""Checkpoints evaluated beside training, through the real command, which is killed once in the middle."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tasks.evaluation.beside import evaluations_of
from tasks.evaluation.report import metrics_of_checkpoint
from tests.support.lm_eval_tasks import write_tasks
from tests.support.ranks import losses, run_ranks
from tests.support.user_folder import DEADLINE_S, UserFolder
from training.records.results import EvalReport


def until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.005)


def processes_with(*words: str) -> list[psutil.Process]:
    """The processes whose command line has all of these words."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if all(word in line for word in words):
            found.append(process)
    return found


def evaluated_steps(run_dir: Path) -> list[int]:
    return [each.own.step for each in evaluations_of(run_dir)]


@pytest.mark.long  # other tests leave the evaluator no CPU
def test_checkpoints_get_their_losses_beside_a_training_that_is_killed_resumed_and_undisturbed(
    tmp_path: Path, begun_home: Path
) -> None:
    """Training stands still while a checkpoint is evaluated, so that the test does not hang on this machine's speed."""
    user_folder = UserFolder(tmp_path, begun=begun_home)
    sea, other = tmp_path / "sea.txt", tmp_path / "other.txt"
    sea.write_text("the sea and the sky sails\n" * 40)
    other.write_text("zebras quibble; 0123456789\n" * 40)
    sets = f"evaluation.held_out_sets={{sea: {sea}, numbers: {other}}}"
    files = write_tasks(tmp_path / "tasks", continuations=["no"] * 9)
    measured = (sets, f"evaluation.task_files=[{files}]", "evaluation.tasks=[endings]", "evaluation.every_steps=0")
    slow_steps = ("train.global_batch=64", "train.context=64", "train.log_every_steps=1", "parallel.strategy=single")
    options = ("evaluation.checkpoints=beside", *measured, *slow_steps)
    process = user_folder.start("pretrain", str(user_folder.config), *options)
    until(lambda: bool(user_folder.run_dirs()), "the run's folder")
    (run_dir,) = user_folder.run_dirs()
    evaluator = str(run_dir / "beside")

    until((run_dir / "checkpoints" / "00000020").exists, "the first checkpoint")
    for rank in processes_with("training.train", str(run_dir)):
        rank.suspend()
    until(lambda: evaluated_steps(run_dir) == [20], "the first evaluation")
    for rank in processes_with("training.train", str(run_dir)):
        rank.resume()
    until((run_dir / "checkpoints" / "00000040").exists, "the second checkpoint")
    until((run_dir / "beside" / "attempts" / "4").exists, "the second evaluation's start")
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not processes_with(evaluator), "the end of the killed run's evaluator")
    assert evaluated_steps(run_dir) == [20]

    out, err = user_folder.run("resume", run_dir.name, "--json")
    steps = evaluated_steps(run_dir)  # the ranks of a killed run save a checkpoint of 40 or a little later
    assert (steps[0], steps[-1], len(steps)) == (20, 60, 3), err
    results = {each.own.step: each for each in evaluations_of(run_dir)}
    assert not processes_with(evaluator)
    mlflow_run = user_folder.mlflow_run(run_dir).info.run_id
    for key in ("eval/loss", "eval/sets/sea/loss", "eval/sets/numbers/loss", "eval/endings/acc"):
        logged = {each.step: each.value for each in user_folder.mlflow.get_metric_history(mlflow_run, key)}
        assert logged == {step: metrics_of_checkpoint(found)[key] for step, found in results.items()}
    with closing(sqlite3.connect(user_folder.home / "prefect" / "prefect.db")) as db:
        query = "select name from task_run where name like 'Evaluate checkpoint %' and state_type = 'COMPLETED'"
        shown = [name for (name,) in db.execute(query)]
    assert sorted(shown) == [f"Evaluate checkpoint {step}" for step in steps]
    assert results[60].sets["sea"].loss < results[20].sets["sea"].loss < results[20].sets["numbers"].loss
    assert results[60].own == EvalReport.read(run_dir / "eval.json"), "measured once"
    assert json.loads(out)["val_loss"] == results[60].own.loss
    assert "Checkpoints, evaluated beside training" in (run_dir / "report.html").read_text()

    undisturbed = tmp_path / "undisturbed" / "plan.json"
    undisturbed.parent.mkdir()
    shutil.copy(run_dir / "plan.json", undisturbed)
    run_ranks(undisturbed)
    assert losses(run_dir / "plan.json") == losses(undisturbed)
