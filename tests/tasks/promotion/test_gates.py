"""The gate as a table: who may take the champion's place, and what the verdict says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tasks.promotion.gates import Candidate, check_latency, gate
from training.config.promotion import GatesConfig


def version(
    number: int, loss: float, *, dataset: str = "a" * 64, parity: bool = True, tokens: int = 0, **scores: float
) -> Candidate:
    found = {name.replace("__", "/"): value for name, value in scores.items()}
    return Candidate("m", number, dataset, loss, parity_passed=parity, tokens=tokens, scores=found)


CHAMPION = version(3, 2.5)
CASES = {
    "no champion": (version(1, 9.9), None, 0.0, True, "validation loss 9.9000, and there is no champion yet"),
    "better": (version(4, 2.4), CHAMPION, 0.0, True, "0.1000 nats per token below champion m/3's 2.5000"),
    "worse": (
        version(4, 2.6),
        CHAMPION,
        0.0,
        False,
        "0.1000 nats per token above champion m/3's 2.5000 (needed: below)",
    ),
    "equal": (
        version(4, 2.5),
        CHAMPION,
        0.0,
        False,
        "equal to champion m/3's 2.5000 (needed: below)",
    ),
    "better by enough": (version(4, 2.25), CHAMPION, 0.25, True, "(needed: at least 0.25 below)"),
    "better, not by enough": (version(4, 2.4), CHAMPION, 0.25, False, "(needed: at least 0.25 below)"),
    "other data": (
        version(4, 1.0, dataset="b" * 64),
        CHAMPION,
        0.0,
        False,
        "cannot be compared with 2.5000 of champion m/3: other data (dataset bbbbbbbbbbbb, champion's aaaaaaaaaaaa). "
        "Measure both on one text: `shardline evaluate m@champion --data TEXT` and "
        "`shardline evaluate m/4 --data TEXT`, then promote again; "
        "or skip the gates: shardline promote m --version 4 --force",
    ),
    "other tokens": (
        version(4, 1.0, tokens=1000),
        version(3, 2.5, tokens=2000),
        0.0,
        False,
        "other tokens (1,000 held-out tokens, champion's 2,000)",
    ),
    "worse, within the tolerance": (version(4, 2.6), CHAMPION, -0.25, True, "(needed: at most 0.25 above)"),
    "parity failed, no champion": (
        version(1, 2.0, parity=False),
        None,
        0.0,
        False,
        "the export is out of its parity bounds",
    ),
    "parity failed, better": (
        version(4, 2.0, parity=False),
        CHAMPION,
        0.0,
        False,
        "the export is out of its parity bounds",
    ),
    "not a number": (version(1, math.nan), None, 0.0, False, "is not finite"),
    "the champion's is not a number": (
        version(4, 2.0),
        version(3, math.nan),
        0.0,
        True,
        "champion m/3's is not finite",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case: str) -> None:
    challenger, champion, min_improvement, passed, sentence = CASES[case]
    verdict = gate(challenger, champion, gates=GatesConfig(min_improvement=min_improvement))
    assert verdict.passed is passed
    assert sentence in verdict.text
    assert verdict.text.startswith("passed: " if passed else "not passed: ")


@pytest.mark.parametrize(
    ("challenger", "passed", "sentence"),
    [
        (version(4, 2.0, arc__acc=0.5), True, "arc/acc 0.5000, at least 0.5"),
        (version(4, 2.0, arc__acc=0.4), False, "arc/acc 0.4000, needed: at least 0.5"),
        (version(4, 2.0, other__acc=1.0), False, "arc/acc not evaluated, needed: at least 0.5 (evaluated: other/acc;"),
        (version(4, 2.0), False, "(evaluated: no task; evaluation.tasks asks for more)"),
    ],
)
def test_required_tasks(challenger: Candidate, passed: bool, sentence: str) -> None:
    gates = GatesConfig(tasks={"arc": 0.5})
    verdict = gate(challenger, CHAMPION, gates=gates)
    assert [(check.gate, check.passed) for check in verdict.checks] == [
        ("parity", True), ("loss", True), ("tasks", passed)
    ]  # fmt: skip
    assert sentence in verdict.text


def test_the_parity_gate_says_what_the_export_has() -> None:
    without = gate(replace(version(4, 2.0), formats="Hugging Face, model.onnx"), None, gates=GatesConfig())
    assert without.checks[0].text == "the export is within its parity bounds: Hugging Face, model.onnx"


def test_the_latency_budget_is_held_against_the_smoke_test() -> None:
    assert check_latency(49.96, budget_ms=50).verdict == "passed: p95 50.0 ms, at most 50 ms"
    assert check_latency(51.0, budget_ms=50).verdict == "not passed: p95 51.0 ms, needed: at most 50 ms"
    assert not check_latency(None, budget_ms=50).passed


NEW = {"first": 2.0, "june": 2.5}
SOURCES: dict[str, tuple[dict[str, float], dict[str, float], float, bool, str]] = {
    "no worse": (NEW, {"first": 2.01, "june": 2.9}, 0.0, True, "2 sources compared"),
    "worse within the bound": (
        NEW,
        {"first": 1.98, "june": 2.9},
        0.05,
        True,
        "the worst, first, is 0.0200 nats per token above it",
    ),
    "one is forgotten": (
        NEW,
        {"first": 1.9, "june": 2.9},
        0.05,
        False,
        "worse than champion m/3 on first: 0.1 nats per token above it (needed: at most 0.05 above)",
    ),
    "not measured": (NEW, {"first": 2.0}, 0.1, False, "june was not measured for both"),
    "not a number": ({"first": math.nan}, {"first": 2.0}, 0.1, False, "first: nan nats"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_no_source_may_become_worse_by_more_than_its_bound(case: str) -> None:
    new, old, bound, passed, text = SOURCES[case]
    challenger, champion = replace(version(4, 2.2), by_source=new), replace(version(3, 2.5), by_source=old)
    verdict = gate(challenger, champion, gates=GatesConfig(max_regression=bound))
    (check,) = [check for check in verdict.checks if check.gate == "sources"]
    assert check.passed is passed
    assert text in check.text


def test_sources_are_not_compared_over_different_text_or_without_a_bound() -> None:
    challenger, champion = (
        replace(version(4, 2.2), by_source=NEW),
        replace(version(3, 2.5, dataset="b" * 64), by_source=NEW),
    )
    verdict = gate(challenger, champion, gates=GatesConfig(max_regression=1.0))
    assert [check.passed for check in verdict.checks if check.gate == "sources"] == [False]
    assert [check.gate for check in gate(challenger, champion, gates=GatesConfig()).checks] == ["parity", "loss"]


def test_that_there_is_no_champion_is_said_once() -> None:
    verdict = gate(replace(version(1, 2.0), by_source=NEW), None, gates=GatesConfig(max_regression=0.1))
    assert verdict.passed
    assert verdict.text.count("champion") == 1
