"""From challenger to the beginning of its move: found, judged by its gates, approved.

All that moves is moved by whoever has the turn (lock.py), and stands in the move's MLflow run (journal.py)
before it is done: a run again finds there how far the last one came.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tasks.promotion.gates import Check, Verdict, check_latency
from tasks.promotion.journal import Move, begin_move
from tasks.promotion.judge import Terms, judge_records, note_checks, note_verdict, standing, terms_of
from tasks.promotion.lock import Turn
from tasks.promotion.server_stats import baseline
from tasks.promotion.servers import following
from tasks.promotion.smoke_test import smoke_test
from tasks.registry.models import aliases_of, find_version
from tasks.registry.tags import APPROVED, CHALLENGER, CHAMPION, VERDICT
from training.config.promotion import GatesConfig, RolloutConfig
from training.records.results import RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

ASK_S = 2.0  # between two looks at a tag that is waited for


@dataclass(frozen=True)
class Request:
    """What is asked. `version` None: the challenger. `overrides`: gates.x or rollout.x -> value. `who` asks."""

    model: str
    who: str
    version: int | None = None
    force: bool = False
    overrides: Mapping[str, object] | None = None
    prefect_run: str = ""

    @property
    def again(self) -> bool:
        """A version that has a verdict is judged again only if somebody says so."""
        return self.version is not None or self.force or bool(self.overrides)


@dataclass(frozen=True)
class Case:
    """A version before its gates. `against`: the champion then. `settled`: why there is nothing to do; else empty."""

    model: str
    version: int
    terms: Terms
    against: int | None = None
    checks: tuple[Check, ...] = ()
    settled: str = ""

    @property
    def passed(self) -> bool:
        return not self.settled and all(check.passed for check in self.checks)

    @property
    def text(self) -> str:
        if self.checks and self.checks[0].gate == "forced":
            return self.checks[0].text
        return Verdict(self.checks).text


def judge(client: MlflowClient, request: Request, *, tracking_uri: str) -> Case:
    """The records' gates first, which cost nothing; a fresh server only for what passed them."""
    version = _asked_for(client, request)
    name, number = version.name, int(version.version)
    reigning = aliases_of(client, name).get(CHAMPION)
    verdict = version.tags.get(VERDICT, "")
    if reigning == number:
        return Case(name, number, Terms(), reigning, settled=verdict or "passed: it is the champion already")
    if verdict and not request.again:
        logger.info(
            "%s/%d was judged already; `shardline promote %s --version %d` judges it again", name, number, name, number
        )
        return Case(name, number, Terms(), reigning, settled=verdict)
    if request.force:
        terms = overridden(Terms(), request.overrides or {})
        place = f"took the place of {name}/{reigning}" if reigning else "no champion yet"
        return Case(name, number, terms, reigning, (Check("forced", True, f"forced: {place}"),))
    terms = overridden(terms_of(version, tracking_uri=tracking_uri), request.overrides or {})
    checks = judge_records(client, version, terms=terms, reigning=reigning).checks
    if all(check.passed for check in checks):
        checks += check_in_a_fresh_server(name, number, terms=terms)
    note_checks(client, version, checks)
    return Case(name, number, terms, reigning, checks)


def _asked_for(client: MlflowClient, request: Request) -> ModelVersion:
    if request.version is None:
        return find_version(client, f"{request.model}@{CHALLENGER}")
    return find_version(client, f"{request.model}/{request.version}")


def overridden(terms: Terms, overrides: Mapping[str, object]) -> Terms:
    """Raises ValueError, naming the field, for one that there is not."""
    sections: dict[str, dict[str, object]] = {
        "gates": terms.gates.model_dump(),
        "rollout": terms.rollout.model_dump(),
    }
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if section not in sections or name not in sections[section]:
            fields = ", ".join(f"{each}.{name}" for each, content in sections.items() for name in content)
            raise ValueError(f"{key} is nothing that a promotion can change: {fields}")
        sections[section][name] = value
    try:
        return terms.model_copy(
            update={
                "gates": GatesConfig.model_validate(sections["gates"]),
                "rollout": RolloutConfig.model_validate(sections["rollout"]),
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))} = {problem['input']!r}: {problem['msg']}") from None


def check_in_a_fresh_server(name: str, number: int, *, terms: Terms) -> tuple[Check, ...]:
    """The smoke test, and the latency budget if there is one."""
    budget = terms.gates.max_p95_ms
    if terms.masked:
        checks = (Check("smoke", True, "a masked model makes no text: not served"),)
        return checks + ((check_latency(None, budget_ms=budget),) if budget else ())
    logger.info("smoke test of %s/%d in a fresh server", name, number)
    rollout = terms.rollout
    smoke = smoke_test(
        name, number, prompts=terms.prompts, requests=rollout.smoke_requests, timeout_s=rollout.smoke_timeout_s
    )
    if smoke.error:
        return (Check("smoke", False, f"in a fresh server: {smoke.error}"),)
    told = (
        f"{smoke.requests} requests answered by a fresh server, p95 {smoke.p95_ms:.1f} ms, ready in {smoke.ready_s} s"
    )
    checks = (Check("smoke", True, told),)
    return checks + ((check_latency(smoke.p95_ms, budget_ms=budget),) if budget else ())


def approved_by_tag(client: MlflowClient, case: Case) -> Check:
    """Wait until somebody sets the version's tag to their name."""
    name, number, timeout_s = case.model, case.version, case.terms.gates.approval_timeout_s
    logger.info("%s/%d waits for its tag %s, up to %g s", name, number, APPROVED, timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        if approver := client.get_model_version(name, str(number)).tags.get(APPROVED, "").strip():
            return Check("approval", True, f"approved by {approver} (tag {APPROVED})")
        if time.monotonic() > deadline:
            return Check("approval", False, f"nobody set the tag {APPROVED} within {timeout_s:g} s")
        time.sleep(min(ASK_S, timeout_s / 2))


def refuse(client: MlflowClient, request: Request, case: Case) -> RegisteredModel:
    note_checks(client, client.get_model_version(case.model, str(case.version)), case.checks)
    note_verdict(client, case.model, case.version, case.text, by=request.who)
    return standing(client, case.model, case.version, verdict=case.text)


def begin(client: MlflowClient, mine: Turn, request: Request, case: Case) -> Move | RegisteredModel:
    """The move, recorded and not yet made; or how the version stands if, by now, it must not be made.

    Since it was judged another may have become champion, or it may have been judged by another.
    """
    version = client.get_model_version(case.model, str(case.version))
    if VERDICT in version.tags and not request.again:
        return standing(client, case.model, case.version, verdict=version.tags[VERDICT])
    reigning = aliases_of(client, case.model).get(CHAMPION)
    if reigning != case.against and not request.force:
        verdict = judge_records(client, version, terms=case.terms, reigning=reigning)
        changed = {check.gate: check for check in verdict.checks}
        case = Case(
            case.model,
            case.version,
            case.terms,
            reigning,
            tuple(changed.get(check.gate, check) for check in case.checks),
        )
        if not case.passed:
            return refuse(client, request, case)
    baseline(following(case.model, urls=case.terms.rollout.servers), version=case.version)  # all must answer
    note_checks(client, version, case.checks)
    mine.check()
    return begin_move(
        client,
        case.model,
        version=case.version,
        replaces=reigning,
        kind="promotion",
        who=request.who,
        why=case.text,
        prefect_run=request.prefect_run,
        rollout=case.terms.rollout,
    )


def gate_rows(checks: Sequence[Check]) -> list[dict[str, str]]:
    return [
        {"gate": check.gate, "verdict": "passed" if check.passed else "not passed", "numbers": check.text}
        for check in checks
    ]
