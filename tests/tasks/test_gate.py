"""The gate as a table: who may take the champion's place, and what the verdict says."""

from __future__ import annotations

import math

import pytest

from tasks.gate import Candidate, gate


def version(number: int, loss: float, *, dataset: str = "a" * 64, parity: bool = True) -> Candidate:
    return Candidate(name="m", version=number, dataset=dataset, loss=loss, parity_passed=parity)


CHAMPION = version(3, 2.5)
CASES = {
    "no champion": (version(1, 9.9), None, 0.0, True, "validation loss 9.9000, and there is no champion yet"),
    "better": (version(4, 2.4), CHAMPION, 0.0, True, "champion m/3 2.5000: +0.1000 nats per token"),
    "worse": (version(4, 2.6), CHAMPION, 0.0, False, "-0.1000 nats per token, needed: better"),
    "equal": (version(4, 2.5), CHAMPION, 0.0, False, "+0.0000 nats per token, needed: better"),
    "better by enough": (version(4, 2.25), CHAMPION, 0.25, True, "which is at least 0.25 better"),
    "better, not by enough": (version(4, 2.4), CHAMPION, 0.25, False, "needed: at least 0.25 better"),
    "other data": (
        version(4, 1.0, dataset="b" * 64),
        CHAMPION,
        0.0,
        False,
        "cannot be compared with 2.5000 of champion m/3: other data (dataset bbbbbbbbbbbb, champion's aaaaaaaaaaaa). "
        "To put it in place all the same: shardline promote m --version 4 --force",
    ),
    "parity failed, no champion": (version(1, 2.0, parity=False), None, 0.0, False, "ONNX parity out of bounds"),
    "parity failed, better": (version(4, 2.0, parity=False), CHAMPION, 0.0, False, "ONNX parity out of bounds"),
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
    challenger, champion, min_improvement, passed, said = CASES[case]
    verdict = gate(challenger, champion, min_improvement=min_improvement)
    assert verdict.passed is passed
    assert said in verdict.text
    assert verdict.text.startswith("passed: " if passed else "not passed: ")
