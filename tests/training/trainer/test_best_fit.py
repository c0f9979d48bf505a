"""A run on documents packed by best fit: what it reports, and what a resume on other ranks leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.numbered_corpus import CONTEXT, CPU, NUM_TOKENS, global_batch, plan_of, write_numbered
from tests.support.ranks import kill_and_resume, losses, run_ranks
from training.data.loader import Loader
from training.records.plan import RunPlan
from training.shards.stream import TokenStream
from training.tracking.rows import METRICS, read_rows

KILLED_AT = 11


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("runs")
    shards = write_numbered(folder / "shards")

    def made(name: str, *, ranks: int) -> Path:
        plan = plan_of(
            shards,
            ranks=ranks,
            train__packing="best-fit",
            train__steps=1000,
            train__max_epochs=2.5,
            model__dropout=0.0,
            evaluation__every_steps=10,
            evaluation__quick_sequences=1000,
        )
        path = folder / name / "plan.json"
        plan.model_copy(update={"run_id": name, "threads_per_rank": 1}).write(path)
        return path

    return made


@pytest.fixture(scope="module")
def undisturbed(make: Callable[..., Path]) -> Path:
    plan_path = make("undisturbed", ranks=2)
    run_ranks(plan_path)
    return plan_path


def test_cut_documents_and_padding_are_logged_and_padding_is_no_token(undisturbed: Path) -> None:
    plan, rows = RunPlan.read(undisturbed), read_rows(undisturbed.parent / METRICS)
    loader = Loader(plan, dp_rank=0, device=CPU)
    lengths = np.diff(TokenStream(Path(plan.shards_dir), "train").document_bounds())
    found = {row["step"]: row for row in rows if "tokens" in row}
    assert list(found) == list(range(1, plan.steps + 1))
    tokens = 0
    for step, row in found.items():
        tokens += loader.num_tokens(step - 1)
        assert row["tokens"] == tokens
        assert row["cut_documents_share"] == pytest.approx((lengths > CONTEXT).mean())
        sequences = min(8, plan.sequences - 8 * (step - 1))
        padding = 1 - loader.num_tokens(step - 1) / (sequences * CONTEXT)
        assert row["padding_share"] == pytest.approx(padding, abs=1e-9)
    assert 2.4 < tokens / NUM_TOKENS["train"] < 2.6
    assert max(row["padding_share"] for row in found.values()) > 0


def test_the_loss_is_the_mean_over_all_ranks_real_tokens(undisturbed: Path, make: Callable[..., Path]) -> None:
    alone = make("alone", ranks=1)
    run_ranks(alone)
    one, two = losses(alone), losses(undisturbed)
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 2e-6 * one[1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1, 4])
def test_a_killed_run_goes_on_with_the_same_packs_on_any_number_of_ranks(
    ranks: int, make: Callable[..., Path], undisturbed: Path
) -> None:
    plan_path = kill_and_resume(make, ranks=ranks, at_step=KILLED_AT, undisturbed=undisturbed)
    for name in ("tokens", "padding_share"):
        assert by_step(plan_path, name) == by_step(undisturbed, name)
    ours, theirs = RunPlan.read(plan_path), RunPlan.read(undisturbed)
    for step in range(KILLED_AT, ours.steps):
        assert torch.equal(global_batch(ours, step)[0], global_batch(theirs, step)[0])


def by_step(plan_path: Path, name: str) -> dict[float, float]:
    return {row["step"]: row[name] for row in read_rows(plan_path.parent / METRICS) if name in row}
