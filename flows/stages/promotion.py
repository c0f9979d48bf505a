"""The stages of a promotion as Prefect tasks: each calls plain functions of tasks/ and shows what they found."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from pydantic import Field

from flows.prefect_ui.artifacts import show_markdown, show_table
from flows.prefect_ui.events import report_refusal, report_taken_back
from flows.prefect_ui.tell import outermost_flow_run
from flows.presets import parse_override
from flows.servers.embedded import is_embedded
from flows.stages.stage import stage
from tasks.display.markdown import escape_markdown
from tasks.promotion import promote, rollout
from tasks.promotion.gates import Check, is_refusal
from tasks.promotion.journal import Move, read_move
from tasks.promotion.judge import Terms, registered_model
from tasks.promotion.lock import PromotionLock, current_user, promotion_lock
from tasks.promotion.promote import Case, Request, gate_rows
from tasks.registry.models import aliases_of, require_model
from tasks.registry.tags import CHALLENGER, CHAMPION
from tasks.tracking.client import registry_client
from tasks.workspace.paths import tracking_uri
from training.config.promotion import RolloutConfig
from training.records.results import RegisteredModel

logger = logging.getLogger(__name__)


def read_request(model: str, *, version: int | None, force: bool, overrides: Sequence[str], by: str) -> Request:
    """Read and check a request. Raises ValueError for a wrong override, or for a model that is not registered."""
    run_id = str(flow_run.id or "")
    request = Request(
        model=model,
        who=by or current_user(),
        version=version,
        force=force,
        overrides=dict(map(parse_override, overrides)),
        prefect_run=run_id if is_embedded() else str(flow_run.ui_url or run_id),
    )
    promote.overridden(Terms(), request.overrides or {})
    require_model(registry_client(tracking_uri()), model)
    return request


@contextmanager
def locked(request: Request) -> Iterator[PromotionLock]:
    """Hold the lock on the model's aliases. It is not held while the promotion waits for approval."""
    version = "the challenger" if request.version is None else f"version {request.version}"
    what = f"promotes {request.model}, {version}"
    with promotion_lock(registry_client(tracking_uri()), request.model, what=what, by=request.who) as lock:
        yield lock


@stage("Finish an interrupted promotion")
def finish_interrupted(request: Request, lock: PromotionLock) -> RegisteredModel | None:
    """Finish an interrupted promotion; return its version if the request asks for nothing else."""
    client, overrides = registry_client(tracking_uri()), request.overrides or {}

    def changed(config: RolloutConfig) -> RolloutConfig:
        return promote.overridden(Terms(rollout=config), overrides).rollout

    move = rollout.finish_interrupted(client, lock, request.model, changed=changed, show=logger.debug)
    if move is None:
        return None
    _report_if_taken_back(move)
    nothing_else = request.version is None and CHALLENGER not in aliases_of(client, request.model)
    if not (nothing_else or (request.version == move.version and not request.force)):
        return None
    return registered_model(client, request.model, move.version)


@stage("Gates and smoke test")
def judge(request: Request) -> Case:
    case = promote.judge(registry_client(tracking_uri()), request, tracking_uri=tracking_uri())
    _show(case)
    return case


class Approval(RunInput):
    """The form of a paused promotion in Prefect."""

    name: str = Field(min_length=1, description="Your name: it is recorded with the version.")
    approved: bool = Field(True, description="Whether it may become champion.")
    why: str = Field("", description="Recorded, too.")


def approve(request: Request, case: Case) -> Case:
    """Wait until a person approves or refuses: in the form of this flow run, or by a tag of the version."""
    if case.terms.gates.approval == "tag":
        check = promote.approved_by_tag(registry_client(tracking_uri()), case)
    else:
        check = _approved_in_prefect(case)
    case = replace(case, checks=(*case.checks, check))
    _show(case)
    return case


def _approved_in_prefect(case: Case) -> Check:
    if is_embedded():
        raise ValueError(
            "gates.approval = prefect needs a Prefect server, in whose pages a person resumes the run: `shardline up` "
            "starts one, PREFECT_API_URL names another; or choose gates.approval=tag"
        )
    timeout_s = case.terms.gates.approval_timeout_s
    logger.info("%s/%d waits for approval: resume this flow run in Prefect", case.model, case.version)
    try:
        answer = pause_flow_run(wait_for_input=Approval, timeout=max(1, round(timeout_s)), poll_interval=2)
    except FlowPauseTimeout:
        return Check("approval", False, f"nobody resumed the flow run within {timeout_s:g} s")
    by = f"by {answer.name} in Prefect{f': {answer.why}' if answer.why else ''}"
    return Check("approval", answer.approved, f"{'approved' if answer.approved else 'refused'} {by}")


@stage("Switch and watch")
def roll_out(request: Request, case: Case, lock: PromotionLock) -> RegisteredModel:
    """Make the version champion if it passed; record the verdict with it in either case."""
    client = registry_client(tracking_uri())
    if case.decided:
        return registered_model(client, case.model, case.version, verdict=case.decided)
    move = promote.begin(client, lock, request, case) if case.passed else promote.refuse(client, request, case)
    if isinstance(move, RegisteredModel):
        if is_refusal(move.verdict):
            report_refusal(move, flow_run_id=outermost_flow_run())
        return move
    rollout.carry_out(client, lock, move, show=logger.debug)
    _report_if_taken_back(move)
    model = registered_model(client, case.model, case.version)
    show_markdown(
        f"**{model.name}**: champion was version {move.replaces or 'none'}, asked by {escape_markdown(move.who)}. "
        f"Version {model.version} is {model.alias or 'no alias'} now: {escape_markdown(model.verdict)}",
        key="promotion",
        description="What moved",
    )
    return model


def _report_if_taken_back(move: Move) -> None:
    """Emit an event if a promotion that has ended left the earlier version as champion."""
    client = registry_client(tracking_uri())
    champion = aliases_of(client, move.model).get(CHAMPION)
    if move.kind == "promotion" and champion is not None and champion == move.replaces:
        why = read_move(client, move.move_id).outcome
        of = outermost_flow_run()
        report_taken_back(move.model, version=move.version, now=champion, why=why, flow_run_id=of)


def _show(case: Case) -> None:
    if case.checks:
        about = f"{case.model}/{case.version} against {case.champion or 'no champion'}"
        show_table(gate_rows(case.checks), key="gates", description=about)
