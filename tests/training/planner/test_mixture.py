"""How much of each source a plan says the run will see."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import inventory, reasons, tiny_config
from training.planner.plan import make_plan
from training.records.plan import RunPlan
from training.shards.packing import Epoch

EPOCH = (Epoch(1000, 16_000), Epoch(100, 1600), Epoch(50, 400))  # the last one's sequences are half empty


def plan(sources: list[dict[str, Any]], *, phases: Any = (), **train: Any) -> RunPlan:
    named = [{"path": name, **source} for name, source in zip("abc", sources, strict=True)]
    config = tiny_config(
        data__path="",
        data__sources=named,
        data__phases=phases,
        **{f"train__{key}": value for key, value in train.items()},
    )
    return make_plan(config, inventory(1), epoch=EPOCH)


def epochs(made: RunPlan) -> list[float]:
    return [source.epochs for source in made.sources]


def test_weights_are_of_tokens() -> None:
    made = plan([{"weight": 2}, {"weight": 1}, {"weight": 1}], steps=100)
    tokens = [source.epochs * source.tokens for source in made.sources]
    assert [each / sum(tokens) for each in tokens] == pytest.approx([0.5, 0.25, 0.25], abs=0.002)
    assert sum(source.epochs * source.sequences for source in made.sources) == made.sequences == 800


def test_epochs_and_weights_share_a_run() -> None:
    made = plan([{"weight": 3}, {"weight": 1}, {"epochs": 2}], steps=100)
    assert epochs(made) == pytest.approx([0.525, 1.75, 2.0], abs=0.03)


def test_sources_without_either_are_seen_once_in_a_pass() -> None:
    made = plan([{}, {"epochs": 3}, {}], steps=10_000, max_epochs=1)
    assert made.sequences == 1350
    assert epochs(made) == pytest.approx([1, 3, 1], abs=0.03)
    half = plan([{}, {"epochs": 3}, {}], steps=10_000, max_epochs=0.5)
    assert epochs(half) == pytest.approx([0.5, 1.5, 0.5], abs=0.03)


def test_the_plan_says_what_is_seen_and_warns_above_four_epochs() -> None:
    made = plan([{"weight": 8}, {"weight": 1}, {"weight": 1}], steps=1000)
    assert "text: a 80.0% of the tokens, 5.82 epochs; b 10.0% of the tokens" in " ".join(made.reasons)
    warned = reasons(made, "beyond 4 epochs")
    assert [reason.partition(" ")[0] for reason in warned] == ["a", "b", "c"]
    seldom = plan([{"weight": 8}, {"weight": 1}, {"weight": 1}], steps=100)
    assert not reasons(seldom, "beyond 4 epochs")


def test_a_corpus_that_is_no_mixture_is_warned_of_too() -> None:
    made = make_plan(tiny_config(train__steps=1000), inventory(1), epoch=EPOCH[:1])
    assert epochs(made) == [8.0]
    assert reasons(made, "stdlib is seen 8.0 times: beyond 4 epochs")
    assert made.mixture == ()


def test_phases_are_counted_in_steps_or_in_shares_of_the_run() -> None:
    weights = [{"weight": 1}, {"weight": 1}, {"weight": 1}]
    made = plan(weights, steps=100, phases=[{"from_step": 50, "weights": {"b": 1}}])
    assert [phase.first_step for phase in made.mixture] == [0, 50]
    assert made.mixture[1].shares == (0, 1, 0)
    annealed = plan(weights, steps=1000, phases=[{"from_share": 0.9, "weights": {"a": 1, "b": 3}}])
    assert [phase.first_step for phase in annealed.mixture] == [0, 900]
    late = plan(weights, steps=40, phases=[{"from_step": 50, "weights": {"b": 1}}])
    assert len(late.mixture) == 1
    assert reasons(late, "the phase from step 50 on is not reached")


def test_epochs_that_fill_the_run_leave_nothing_to_weights() -> None:
    with pytest.raises(ValueError, match=r"with epochs have 1,000 sequences, the whole run has 800: nothing is left"):
        plan([{"epochs": 1}, {"weight": 1}, {"weight": 1}], steps=100)


def test_a_source_shorter_than_a_sequence_is_refused() -> None:
    config = tiny_config(data__path="", data__sources=[{"path": "a"}, {"path": "b"}])
    with pytest.raises(ValueError, match="training text of b fills no sequence"):
        make_plan(config, inventory(1), epoch=(EPOCH[0], Epoch(0, 0)))
