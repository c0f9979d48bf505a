"""A promotion up to its rollout: finds the version, checks its gates, and waits for approval.

A process that changes an alias holds the lock (lock.py), and writes the change to the journal (journal.py) first, so
that another run can see how far an interrupted one came.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tasks.promotion.gates import Check, Verdict, check_latency
from tasks.promotion.journal import Move, begin_move
from tasks.promotion.judge import Terms, judge_records, note_checks, note_verdict, registered_model, terms_of
from tasks.promotion.lock import PromotionLock
from tasks.promotion.servers import baseline, servers_of_champion
from tasks.promotion.smoke_test import smoke_test
from tasks.registry.models import aliases_of, find_version
from tasks.registry.tags import APPROVED, CHALLENGER, CHAMPION, VERDICT
from tasks.workspace.wait import until
from training.config.credentials import without_url_credentials
from training.config.promotion import GatesConfig, RolloutConfig
from training.records.results import RegisteredModel

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

POLL_S = 2.0  # between two reads of the approval tag


@dataclass(frozen=True)
class Request:
    """A user's request to promote a model. `who`: the user. `version` None: the challenger. `overrides`: gates.x or
    rollout.x -> value.
    """

    model: str
    who: str
    version: int | None = None
    force: bool = False
    overrides: Mapping[str, object] | None = None
    prefect_run: str = ""

    @property
    def judge_again(self) -> bool:
        """Whether a version that has a verdict is judged again: only if the request names it or changes a setting."""
        return self.version is not None or self.force or bool(self.overrides)


@dataclass(frozen=True)
class Case:
    """A version before its gates. `champion`: the version that it was compared with. `decided`: the verdict of a
    version that needs no further step; otherwise empty.
    """

    model: str
    version: int
    terms: Terms
    champion: int | None = None
    checks: tuple[Check, ...] = ()
    decided: str = ""

    @property
    def passed(self) -> bool:
        return not self.decided and all(check.passed for check in self.checks)

    @property
    def text(self) -> str:
        if self.checks and self.checks[0].gate == "forced":
            return self.checks[0].text
        return Verdict(self.checks).text


def judge(client: MlflowClient, request: Request, *, tracking_uri: str) -> Case:
    """Check the gates that need only records first; a version that passes them is tested in a fresh server."""
    version = _requested_version(client, request)
    name, number = version.name, int(version.version)
    champion = aliases_of(client, name).get(CHAMPION)
    verdict = version.tags.get(VERDICT, "")
    if champion == number:
        return Case(name, number, Terms(), champion, decided=verdict or "passed: it is the champion already")
    if verdict and not request.judge_again:
        logger.info(
            "%s/%d was judged already; `shardline promote %s --version %d` judges it again", name, number, name, number
        )
        return Case(name, number, Terms(), champion, decided=verdict)
    if request.force:
        terms = overridden(Terms(), request.overrides or {})
        place = f"took the place of {name}/{champion}" if champion else "no champion yet"
        return Case(name, number, terms, champion, (Check("forced", True, f"forced: {place}"),))
    terms = overridden(terms_of(version, tracking_uri=tracking_uri), request.overrides or {})
    checks = judge_records(client, version, terms=terms, champion=champion).checks
    if all(check.passed for check in checks):
        checks += check_in_a_fresh_server(name, number, terms=terms)
    note_checks(client, version, checks)
    return Case(name, number, terms, champion, checks)


def _requested_version(client: MlflowClient, request: Request) -> ModelVersion:
    if request.version is None:
        if CHALLENGER not in aliases_of(client, request.model):
            raise ValueError(
                f"no version of {request.model} waits for its promotion, as none has the alias {CHALLENGER}: name one "
                f"with --version (`shardline history {request.model}` has those that were champion)"
            )
        return find_version(client, f"{request.model}@{CHALLENGER}")
    return find_version(client, f"{request.model}/{request.version}")


def overridden(terms: Terms, overrides: Mapping[str, object]) -> Terms:
    """Return `terms` with gates.x and rollout.x replaced. Raises ValueError for a field that does not exist."""
    sections: dict[str, dict[str, object]] = {
        "gates": terms.gates.model_dump(),
        "rollout": terms.rollout.model_dump(),
    }
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if section not in sections or name not in sections[section]:
            fields = ", ".join(f"{each}.{name}" for each, content in sections.items() for name in content)
            raise ValueError(f"{key} cannot be changed by a promotion; these can: {fields}")
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
        value = without_url_credentials(repr(problem["input"]))
        raise ValueError(f"{'.'.join(map(str, problem['loc']))} = {value}: {problem['msg']}") from None


def check_in_a_fresh_server(name: str, number: int, *, terms: Terms) -> tuple[Check, ...]:
    """Run the smoke test, and compare its latency with the budget if there is one."""
    budget = terms.gates.max_p95_ms
    if terms.masked:
        checks = (Check("smoke", True, "a masked model makes no text, so it is not served"),)
        return checks + ((check_latency(None, budget_ms=budget),) if budget else ())
    logger.info("smoke test of %s/%d in a fresh server", name, number)
    smoke = smoke_test(name, number, prompts=terms.prompts, timeout_s=terms.rollout.switch_timeout_s)
    if smoke.error:
        return (Check("smoke", False, f"in a fresh server: {smoke.error}"),)
    text = (
        f"{smoke.requests} requests answered by a fresh server, p95 {smoke.p95_ms:.1f} ms, ready in {smoke.ready_s} s"
    )
    checks = (Check("smoke", True, text),)
    return checks + ((check_latency(smoke.p95_ms, budget_ms=budget),) if budget else ())


def approved_by_tag(client: MlflowClient, case: Case) -> Check:
    """Wait until a person sets the version's tag to their name."""
    name, number, timeout_s = case.model, case.version, case.terms.gates.approval_timeout_s
    logger.info("%s/%d waits for its tag %s, up to %g s", name, number, APPROVED, timeout_s)

    def approver() -> str:
        return client.get_model_version(name, str(number)).tags.get(APPROVED, "").strip()

    if who := until(approver, timeout_s=timeout_s, every_s=POLL_S):
        return Check("approval", True, f"approved by {who} (tag {APPROVED})")
    return Check("approval", False, f"nobody set the tag {APPROVED} within {timeout_s:g} s")


def refuse(client: MlflowClient, request: Request, case: Case) -> RegisteredModel:
    """Record the reason why the version does not become champion."""
    note_checks(client, client.get_model_version(case.model, str(case.version)), case.checks)
    note_verdict(client, case.model, case.version, case.text, by=request.who)
    return registered_model(client, case.model, case.version)


def begin(client: MlflowClient, lock: PromotionLock, request: Request, case: Case) -> Move | RegisteredModel:
    """Write the change to the journal, or return the version unchanged if it may no longer become champion.

    Since it was judged, another version may have become champion, or another process may have judged it.
    """
    version = client.get_model_version(case.model, str(case.version))
    if VERDICT in version.tags and not request.judge_again:
        return registered_model(client, case.model, case.version)
    champion = aliases_of(client, case.model).get(CHAMPION)
    if champion != case.champion and not request.force:
        verdict = judge_records(client, version, terms=case.terms, champion=champion)
        changed = {check.gate: check for check in verdict.checks}
        checks = tuple(changed.get(check.gate, check) for check in case.checks)
        case = replace(case, champion=champion, checks=checks)
        if not case.passed:
            return refuse(client, request, case)
    baseline(servers_of_champion(case.model, urls=case.terms.rollout.servers), version=case.version)  # all must answer
    note_checks(client, version, case.checks)
    lock.check()
    return begin_move(
        client,
        case.model,
        version=case.version,
        replaces=champion,
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
