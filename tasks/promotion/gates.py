"""The gates between challenger and champion: pure functions that turn figures into one check per gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from training.config.promotion import GatesConfig
from training.records.words import counted

PASSED, NOT_PASSED = "passed", "not passed"  # the first word of a verdict


@dataclass(frozen=True)
class Candidate:
    """The figures of a model version for the gates. `loss`: nats per token over the whole held-out split of `dataset`.

    `tokens`: size of that split; 0: not recorded, as in early versions. `scores`: TASK/METRIC -> value. `by_source`:
    the loss on each source of the split. `formats`: what its export has; empty: not recorded.
    """

    name: str
    version: int
    dataset: str
    loss: float
    parity_passed: bool
    tokens: int = 0
    scores: Mapping[str, float] | None = None
    by_source: Mapping[str, float] | None = None
    formats: str = ""


@dataclass(frozen=True)
class Check:
    """One gate's verdict; `gate` is its name in the version's tags."""

    gate: str
    passed: bool
    text: str

    @property
    def verdict(self) -> str:
        return f"{PASSED if self.passed else NOT_PASSED}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def text(self) -> str:
        return f"{PASSED if self.passed else NOT_PASSED}: " + "; ".join(check.text for check in self.checks)


def is_refusal(verdict: str) -> bool:
    """Whether a version's verdict says that a gate refused it."""
    return verdict.startswith(NOT_PASSED)


def gate(challenger: Candidate, champion: Candidate | None, *, gates: GatesConfig) -> Verdict:
    """Check the gates that need only records: the export's parity, loss against the champion's, scores of tasks."""
    checks = [check_parity(challenger), check_loss(challenger, champion, min_improvement=gates.min_improvement)]
    if gates.max_regression is not None:
        checks.append(check_sources(challenger, champion, bound=gates.max_regression))
    if gates.tasks:
        checks.append(check_tasks(challenger.scores or {}, gates.tasks))
    return Verdict(tuple(checks))


def check_parity(challenger: Candidate) -> Check:
    passed, formats = challenger.parity_passed, f": {challenger.formats}" if challenger.formats else ""
    return Check("parity", passed, f"the export is {'within' if passed else 'out of'} its parity bounds{formats}")


def check_loss(challenger: Candidate, champion: Candidate | None, *, min_improvement: float) -> Check:
    """Check that the loss is `min_improvement` nats per token below the champion's on the same tokens, or finite
    without a champion."""
    loss = f"validation loss {challenger.loss:.4f}"
    if not math.isfinite(challenger.loss):
        return Check("loss", False, f"{loss} is not finite")
    if champion is None:
        return Check("loss", True, f"{loss}, and there is no champion yet")
    champion_is = f"champion {champion.name}/{champion.version}"
    if other := _other_data(challenger, champion):
        return Check("loss", False, f"{loss} cannot be compared with {champion.loss:.4f} of {champion_is}: {other}")
    if not math.isfinite(champion.loss):
        return Check("loss", True, f"{loss}, and {champion_is}'s is not finite")
    improvement = champion.loss - challenger.loss
    passed = improvement >= min_improvement if min_improvement else improvement > 0
    least = f"at least {min_improvement:g} below" if min_improvement > 0 else f"at most {-min_improvement:g} above"
    needed = f" (needed: {least if min_improvement else 'below'})" if min_improvement or not passed else ""
    return Check(
        "loss",
        passed,
        f"{loss}, {_against(-improvement)} {champion_is}'s {champion.loss:.4f}{needed}",
    )


def check_sources(challenger: Candidate, champion: Candidate | None, *, bound: float) -> Check:
    """Check for each source of the same held-out text that the loss is at most `bound` above the champion's."""
    if champion is None:
        return Check("sources", True, "there is nothing yet to compare its losses by source with")
    new, old = challenger.by_source or {}, champion.by_source or {}
    if other := _other_data(challenger, champion):
        return Check("sources", False, f"losses by source cannot be compared: {other}")
    if unmeasured := sorted(set(new) - set(old)):
        return Check(
            "sources",
            False,
            f"{unmeasured[0]} was not measured for both: evaluate both versions on a text with this "
            f"source (`shardline evaluate {champion.name}@champion --data TEXT`)",
        )
    changes = {name: new[name] - old[name] for name in new}
    worse = [
        f"{name}: {changes[name]:.2g} nats per token above it (needed: at most {bound:g} above)"
        for name in new
        if not changes[name] <= bound
    ]
    if worse:
        return Check("sources", False, f"worse than champion {champion.name}/{champion.version} on {'; '.join(worse)}")
    worst = max(changes, key=lambda name: changes[name], default="")
    largest = f"; the worst, {worst}, is {_against(changes[worst])} it" if worst else ""
    return Check("sources", True, f"{counted(len(changes), 'source')} compared with the champion's{largest}")


def _against(difference: float) -> str:
    """`0.1259 nats per token below`, or `equal to` where the difference would show as 0.0000."""
    if abs(difference) < 5e-5:
        return "equal to"
    return f"{abs(difference):.4f} nats per token {'below' if difference < 0 else 'above'}"


def _other_data(challenger: Candidate, champion: Candidate) -> str:
    """Return why the two losses cannot be compared, with the cure; empty if they are of the same tokens."""
    if challenger.dataset != champion.dataset:
        why = f"other data (dataset {challenger.dataset[:12]}, champion's {champion.dataset[:12]})"
    elif challenger.tokens and champion.tokens and challenger.tokens != champion.tokens:
        why = f"other tokens ({challenger.tokens:,} held-out tokens, champion's {champion.tokens:,})"
    else:
        return ""
    name = challenger.name
    return (
        f"{why}. Measure both on one text: `shardline evaluate {name}@champion --data TEXT` and `shardline evaluate "
        f"{name}/{challenger.version} --data TEXT`, then promote again; or skip the gates: "
        f"shardline promote {name} --version {challenger.version} --force"
    )


def check_tasks(scores: Mapping[str, float], floors: Mapping[str, float]) -> Check:
    """Check that every task of gates.tasks was evaluated and reaches its score."""
    texts = []
    passed = True
    floors = {name if "/" in name else f"{name}/acc": floor for name, floor in floors.items()}
    for key, floor in floors.items():
        score = scores.get(key)
        reached = score is not None and score >= floor
        passed &= reached
        value = "not evaluated" if score is None else f"{score:.4f}"
        texts.append(f"{key} {value}, {'at least' if reached else 'needed: at least'} {floor:g}")
    asks = f" (evaluated: {', '.join(sorted(scores)) or 'no task'}; evaluation.tasks asks for more)"
    known = "" if floors.keys() <= scores.keys() else asks
    return Check("tasks", passed, ", ".join(texts) + known)


def check_latency(p95_ms: float | None, *, budget_ms: float) -> Check:
    """Check that the smoke test's latency in a fresh server is within the budget; None: it was not measured."""
    if p95_ms is None:
        return Check(
            "latency",
            False,
            f"no p95 to compare with {budget_ms:g} ms: the model is not served; set gates.max_p95_ms=0",
        )
    passed = p95_ms <= budget_ms
    return Check(
        "latency", passed, f"p95 {p95_ms:.1f} ms, {'at most' if passed else 'needed: at most'} {budget_ms:g} ms"
    )
