"""Evaluation of checkpoints beside training: what is taken, left out and refused."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tasks.evaluation import beside, checks
from tasks.evaluation.beside import (
    CheckpointEvaluation,
    checkpoint_evaluator,
    evaluations_of,
    result_path,
    steps_left_out,
)
from tasks.evaluation.checks import check_beside
from tasks.evaluation.report import metrics_of_checkpoint, table_of_checkpoints
from tasks.hardware.machine import Gpu
from tasks.operations import gpu_queue
from tests.support.configs import tiny_config
from training.records.record import sha256_file
from training.records.results import EvalReport

REPORT = EvalReport(
    step=1, checkpoint_sha256="", shards_fingerprint="", loss=2.0, perplexity=7.4, bits_per_byte=1.5, accuracy=0.4,
    tokens=10, text_bytes=20, samples=(), seconds=1.0,
)  # fmt: skip


class Training:
    """A run's folder in which checkpoints appear and vanish, and an evaluator that waits for `go` at each of them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.taken, self.go = run_dir, list[int](), threading.Semaphore(0)
        self.refused = {5}

    def save(self, *steps: int) -> None:
        for step in steps:
            folder = self.run_dir / "checkpoints" / f"{step:08d}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(str(step))
            with (self.run_dir / "metrics.jsonl").open("a") as rows:
                rows.write(json.dumps({"step": step, "checkpoint_stall_ms": 1.0}) + "\n")

    def evaluate(self, folder: Path, raise_if_given_up: Callable[[], None]) -> None:
        step = int(folder.name)
        self.taken.append(step)
        while not self.go.acquire(timeout=0.01):
            raise_if_given_up()
        if step in self.refused:
            raise RuntimeError("out of memory\nmore lines")
        digest = sha256_file(folder / "manifest.json")  # raises FileNotFoundError for a deleted one
        own = REPORT.model_copy(update={"step": step, "checkpoint_sha256": digest})
        CheckpointEvaluation(own=own, sets={}).write(result_path(self.run_dir, step))

    def beside(self, timeout_s: float = 20.0) -> AbstractContextManager[None]:
        return checkpoint_evaluator(self.run_dir, self.evaluate, timeout_s=timeout_s)

    def until_taken(self, *steps: int) -> None:
        deadline = time.monotonic() + 20
        while self.taken != list(steps):
            assert time.monotonic() < deadline, (self.taken, steps)
            time.sleep(0.005)

    @property
    def results(self) -> list[int]:
        return [each.own.step for each in evaluations_of(self.run_dir)]


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(beside, "LOOK_EVERY_S", 0.01)
    return Training(tmp_path)


def test_a_slow_evaluation_takes_the_newest_first_and_older_ones_in_its_idle_time(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with training.beside():
        training.save(1)
        training.until_taken(1)
        training.save(2, 3)  # training goes on meanwhile
        training.go.release()
        training.until_taken(1, 3)
        assert "checkpoint 3 comes before [2]" in caplog.text
        training.go.release()
        training.until_taken(1, 3, 2)
        training.save(4, 5, 6)
        training.go.release()
        training.until_taken(1, 3, 2, 6)
        shutil.rmtree(training.run_dir / "checkpoints" / "00000004")  # nobody holds it
        training.go.release()
        training.until_taken(1, 3, 2, 6, 5)
        training.save(7)
        training.go.release(2)
    assert training.taken == [1, 3, 2, 6, 5, 7], "the end waits for the last one"
    assert training.results == [1, 2, 3, 6, 7]
    assert steps_left_out(training.run_dir) == [4, 5]
    assert "checkpoint 5 is not evaluated, which does not end the run: out of memory" in caplog.text

    shutil.rmtree(training.run_dir / "checkpoints" / "00000006")
    training.save(8)
    training.refused.clear()
    training.go.release(3)
    (training.run_dir / "checkpoints" / "00000007" / "manifest.json").write_text("trained again, from before it")
    with training.beside():
        training.until_taken(1, 3, 2, 6, 5, 7, 8, 7, 5)  # a resume evaluates what has no result of these weights
    assert training.results == [1, 2, 3, 5, 6, 7, 8]


def test_at_its_end_training_waits_for_the_last_checkpoint_alone_and_no_longer_than_asked(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.save(1, 2)
    with training.beside():
        training.until_taken(2)
        training.go.release()
    assert (training.taken, training.results) == ([2], [2]), "1 is old, and nobody waits for it"
    training.save(3)
    with training.beside(timeout_s=0.1):
        training.until_taken(2, 3)
    assert "checkpoint 3 is not evaluated" in caplog.text
    assert "trained 0.1 s ago" in caplog.text

    def fail() -> None:
        with training.beside():
            training.until_taken(2, 3, 3)
            raise RuntimeError("training failed, or was stopped")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="training failed"):
        fail()
    assert time.monotonic() - began < 10
    assert training.results == [2]


def test_the_figures_of_sets_have_their_own_names() -> None:
    found = CheckpointEvaluation(own=REPORT, sets={"books": REPORT.model_copy(update={"loss": 3.0})})
    metrics = metrics_of_checkpoint(found)
    assert (metrics["eval/loss"], metrics["eval/sets/books/loss"]) == (2.0, 3.0)
    assert table_of_checkpoints([found]) == [
        {"step": "1", "loss on held-out text": "2.0000", "loss on books": "3.0000"}
    ]


def test_gpus_that_training_leaves_free_evaluate_and_what_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = tuple(Gpu(name="H100", uuid=f"GPU-{number}", driver="1") for number in range(4))
    monkeypatch.setattr(checks, "gpus_here", lambda: gpus)
    wanted = {"evaluation__checkpoints": "beside"}
    assert check_beside(tiny_config(**wanted, parallel__ranks=2)) == "GPU-2"
    assert check_beside(tiny_config(**wanted, parallel__strategy="single")) == "GPU-1"
    for ranks in (4, 0):
        with pytest.raises(ValueError, match=r"a GPU that training leaves free, and training takes 4 of .* 4: set"):
            check_beside(tiny_config(**wanted, parallel__ranks=ranks))
    assert check_beside(tiny_config()) == ""
    monkeypatch.setenv(gpu_queue.NAMES, "a,b,c,d")
    assert gpu_queue.devices_of(tiny_config(**wanted, parallel__ranks=2)) == ("a", "b", "c"), "no other run gets it"
    config = tiny_config(**wanted)
    elsewhere = config.model_copy(update={"launch": config.launch.model_copy(update={"launcher": "slurm"})})
    assert check_beside(elsewhere) == "", "no GPU is known to be free: the CPUs evaluate"
    monkeypatch.setattr(checks, "gpus_here", lambda: ())
    sets = {"books": "/no/such/books"}
    with pytest.raises(ValueError, match=r"evaluation\.held_out_sets.*/no/such/books"):
        check_beside(tiny_config(**wanted, evaluation__held_out_sets=sets))
    with pytest.raises(ValueError, match=r"\(books\) would not be used: set evaluation.checkpoints=beside"):
        tiny_config(evaluation__held_out_sets=sets)
