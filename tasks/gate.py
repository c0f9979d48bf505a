"""The gate between challenger and champion: plain values in, a verdict with its numbers out."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """What the gate knows of a model version. `loss`: nats per token over the whole held-out split."""

    name: str
    version: int
    dataset: str
    loss: float
    parity_passed: bool


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    text: str


@dataclass(frozen=True)
class Verdict:
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def text(self) -> str:
        return f"{'passed' if self.passed else 'not passed'}: " + "; ".join(check.text for check in self.checks)


def gate(challenger: Candidate, champion: Candidate | None, *, min_improvement: float) -> Verdict:
    """Whether `challenger` takes the champion's place: ONNX parity, and a loss lower by `min_improvement` nats
    per token, at equal data. Without a champion parity and a finite loss are enough."""
    return Verdict(
        checks=(_check_parity(challenger), _check_loss(challenger, champion, min_improvement=min_improvement))
    )


def _check_parity(challenger: Candidate) -> Check:
    passed = challenger.parity_passed
    return Check("parity", passed, "ONNX parity within bounds" if passed else "ONNX parity out of bounds")


def _check_loss(challenger: Candidate, champion: Candidate | None, *, min_improvement: float) -> Check:
    loss = f"validation loss {challenger.loss:.4f}"
    if not math.isfinite(challenger.loss):
        return Check("loss", False, f"{loss} is not finite")
    if champion is None:
        return Check("loss", True, f"{loss}, and there is no champion yet")
    rival = f"champion {champion.name}/{champion.version}"
    if challenger.dataset != champion.dataset:
        return Check(
            "loss",
            False,
            f"{loss} cannot be compared with {champion.loss:.4f} of {rival}: other data "
            f"(dataset {challenger.dataset[:12]}, champion's {champion.dataset[:12]}). To put it in place all the "
            f"same: shardline promote {challenger.name} --version {challenger.version} --force",
        )
    if not math.isfinite(champion.loss):
        return Check("loss", True, f"{loss}, and {rival}'s is not finite")
    improvement = champion.loss - challenger.loss
    passed = improvement >= min_improvement if min_improvement else improvement > 0
    needed = f"at least {min_improvement:g} better" if min_improvement else "better"
    return Check(
        "loss",
        passed,
        f"{loss}, {rival} {champion.loss:.4f}: {improvement:+.4f} nats per token, "
        f"{'which is' if passed else 'needed:'} {needed}",
    )
