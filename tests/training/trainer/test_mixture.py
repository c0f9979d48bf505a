"""A run on a mixture: what it reports by source, and what a resume leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mixture_shards import NAMES, plan_of, write_mixture
from tests.support.ranks import kill_and_resume, run_ranks
from training.records.plan import RunPlan
from training.tracking.rows import METRICS, read_rows

STEPS = 40
PHASES = ({"from_step": 25, "weights": {"b": 1, "c": 3}},)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("runs")
    shards = write_mixture(folder / "shards")

    def made(name: str, *, ranks: int) -> Path:
        plan = plan_of(
            shards,
            ranks=ranks,
            data__phases=PHASES,
            train__steps=STEPS,
            checkpoint__every_steps=5,
            evaluation__every_steps=10,
            evaluation__quick_sequences=1000,
            model__dropout=0.0,
        )
        path = folder / name / "plan.json"
        plan.model_copy(update={"run_id": name}).write(path)
        return path

    return made


@pytest.fixture(scope="module")
def undisturbed(make: Callable[..., Path]) -> Path:
    plan_path = make("undisturbed", ranks=2)
    run_ranks(plan_path)
    return plan_path


def test_tokens_seen_and_validation_losses_are_logged_by_source(undisturbed: Path) -> None:
    plan, rows = RunPlan.read(undisturbed), read_rows(undisturbed.parent / METRICS)
    seen = [row for row in rows if "tokens_seen/a" in row]
    assert [row["step"] for row in seen] == list(range(1, STEPS + 1))
    batch_tokens = plan.batch_tokens
    assert all(sum(row[f"tokens_seen/{name}"] for name in NAMES) == row["step"] * batch_tokens for row in seen)
    assert seen[-1]["tokens_seen/a"] == seen[24]["tokens_seen/a"], "the last phase has none of it"
    assert seen[-1]["tokens_seen/c"] - seen[24]["tokens_seen/c"] == 15 * batch_tokens * 3 / 4
    (final,) = [row for row in rows if "val_loss" in row and row["step"] == STEPS]
    num_targets = {"a": 174, "b": 74, "c": 124}  # of the held-out text of each, but for its first token
    mean = sum(final[f"val_loss/{name}"] * count for name, count in num_targets.items()) / sum(num_targets.values())
    assert final["val_loss"] == pytest.approx(mean)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_killed_run_goes_on_with_the_same_batches_on_any_number_of_ranks(
    ranks: int, make: Callable[..., Path], undisturbed: Path
) -> None:
    plan_path = kill_and_resume(make, ranks=ranks, at_step=22, undisturbed=undisturbed)
    assert tokens_seen(plan_path) == tokens_seen(undisturbed)


def tokens_seen(plan_path: Path) -> list[dict[str, float]]:
    rows = read_rows(plan_path.parent / METRICS)
    found = ({key: value for key, value in row.items() if key.startswith("tokens_seen")} for row in rows)
    return [row for row in found if row]
