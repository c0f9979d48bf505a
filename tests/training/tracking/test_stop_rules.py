"""Hours and early stop end a run in order, on all ranks alike; a resumed run counts on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import inventory, tiny_config
from tests.support.ranks import result, run_ranks
from tests.support.tiny_shards import MakeRun
from training.planner.plan import make_plan
from training.records.plan import RunPlan
from training.records.train_result import StoppedBy, TrainResult
from training.tracking.rows import read_rows
from training.tracking.stop_rules import elapsed_s, is_finished, since_best, validations

LIMIT_S = 1.0
NO_LEARNING = {"train__schedule": "constant", "train__learning_rate": 1e-12}  # no weight moves: no validation is better


def rows(plan_path: Path) -> list[dict[str, Any]]:
    return read_rows(plan_path.parent / "metrics.jsonl")


def change(plan_path: Path, *, steps: int = 0, **train: Any) -> None:
    """Another plan in the place of the first, as a resume with overrides makes one."""
    plan = RunPlan.read(plan_path)
    config = plan.config.model_copy(update={"train": plan.config.train.model_copy(update=train)})
    steps = steps or plan.steps
    update = {"config": config, "steps": steps, "sequences": steps * config.train.global_batch}
    plan.model_copy(update=update).write(plan_path)


def validated_at(plan_path: Path) -> list[int]:
    return [row["step"] for row in rows(plan_path) if "val_loss" in row]


def test_hours_stop_all_ranks_with_a_checkpoint_and_earlier_attempts_count(make_run: MakeRun) -> None:
    hours = LIMIT_S / 3600
    plan_path = make_run("hours", ranks=2, train__steps=100_000, train__max_hours=hours, checkpoint__every_steps=5000)
    run_ranks(plan_path)
    first = result(plan_path)
    assert first.stopped_by == "hours"
    assert first.step < 100_000
    assert (plan_path.parent / first.checkpoint / "manifest.json").exists()
    assert validated_at(plan_path)[-1] == first.step, "its end has a validation"
    assert LIMIT_S <= elapsed_s(rows(plan_path)) < 2 * LIMIT_S + 10

    before = elapsed_s(rows(plan_path))
    change(plan_path, max_hours=(before + LIMIT_S) / 3600)
    run_ranks(plan_path)
    assert result(plan_path).step > first.step
    elapsed = [row["elapsed_s"] for row in rows(plan_path) if "elapsed_s" in row]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] >= before + LIMIT_S


@pytest.fixture(scope="module")
def stopped_early(make_run: MakeRun) -> Path:
    plan_path = make_run(
        "early",
        parallel__strategy="single",
        train__steps=100,
        evaluation__every_steps=2,
        evaluation__early_stop_validations=2,
        **NO_LEARNING,
    )
    run_ranks(plan_path)
    return plan_path


def test_early_stop_after_so_many_validations_without_a_new_best(stopped_early: Path) -> None:
    """Best at step 2, not bettered at 4 and 6."""
    assert result(stopped_early).stopped_by == "early stop"
    assert result(stopped_early).step == 6
    assert validated_at(stopped_early) == [2, 4, 6]
    assert (stopped_early.parent / result(stopped_early).checkpoint / "manifest.json").exists()


def test_a_resumed_run_stops_early_at_the_same_step(stopped_early: Path, make_run: MakeRun) -> None:
    plan_path = make_run(
        "early-resumed",
        parallel__strategy="single",
        train__steps=5,
        evaluation__every_steps=2,
        evaluation__early_stop_validations=2,
        **NO_LEARNING,
    )
    run_ranks(plan_path)
    assert validated_at(plan_path) == [2, 4, 5], "one more at the end, which is no due one"
    change(plan_path, steps=100)
    run_ranks(plan_path)
    assert result(plan_path).step == result(stopped_early).step
    assert result(plan_path).stopped_by == "early stop"


def test_without_validations_there_is_none_at_the_end(make_run: MakeRun) -> None:
    plan_path = make_run("unvalidated", parallel__strategy="single", train__steps=3, evaluation__every_steps=0)
    run_ranks(plan_path)
    assert validated_at(plan_path) == []
    assert result(plan_path).stopped_by == "steps"


def test_the_best_is_the_lowest_and_only_due_validations_count() -> None:
    logged = [{"step": 2, "val_loss": 3.0}, {"step": 4, "val_loss": 2.0}, {"step": 5, "val_loss": 1.0}, {"step": 6}]
    assert validations(logged, every_steps=2) == [3.0, 2.0]
    assert [since_best(losses) for losses in ([], [3.0], [3.0, 2.0, 2.0, 2.5])] == [0, 0, 2]


@pytest.mark.parametrize(
    ("stopped_by", "step", "limits", "finished"),
    [
        ("steps", 8, {}, True),
        ("steps", 5, {}, False),
        ("signal", 5, {}, False),
        ("hours", 5, {"train__max_hours": 0.5}, True),
        ("hours", 5, {"train__max_hours": 2.0}, False),
        ("hours", 5, {"train__max_hours": 0.0}, False),
        ("early stop", 5, {"evaluation__early_stop_validations": 1}, True),
        ("early stop", 5, {"evaluation__early_stop_validations": 2}, False),
        ("early stop", 5, {"evaluation__early_stop_validations": 0}, False),
    ],
)
def test_a_run_is_finished_until_its_plan_reaches_further(
    stopped_by: StoppedBy, step: int, limits: dict[str, Any], finished: bool
) -> None:
    plan = make_plan(tiny_config(train__steps=8, evaluation__every_steps=2, **limits), inventory(1))
    ended = TrainResult.model_construct(step=step, stopped_by=stopped_by)
    logged = [{"step": 2, "val_loss": 1.0}, {"step": 4, "val_loss": 2.0}, {"step": 5, "elapsed_s": 3600.0}]
    assert is_finished(plan, ended, logged) is finished
