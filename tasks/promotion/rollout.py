"""A move of the champion: alias, then servers, then the watch; and back, when it must. Each step can be run again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tasks.promotion.journal import Move, begin_move, end_move, history, note_stage, read_move, unfinished
from tasks.promotion.judge import note_verdict, set_champion
from tasks.promotion.lock import Turn, TurnLost, turn
from tasks.promotion.server_stats import Counts, OutOfBounds, Watch, baseline, wait_for_switch
from tasks.promotion.servers import following
from tasks.registry.models import aliases_of, find_version, replaced_by
from tasks.registry.tags import CHAMPION, REPLACES
from tasks.tracking.client import registry_client
from training.config.promotion import RolloutConfig

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
ASK_S = 2.0  # between two questions to MLflow while servers are waited for or watched
LOOKS, LOOK_S = 100, 5.0  # a watch looks so many times, but not less often than every 5 s
PATIENCE_S, RETRY_S = 900.0, 5.0  # for an MLflow that is away when a version must be taken back


def switch(client: MlflowClient, mine: Turn, move: Move) -> Watch:
    """Alias, then servers. Raises OutOfBounds if a server does not come along."""
    name, number = move.model, move.version
    servers = following(name, urls=move.rollout.servers)
    before: dict[str, Counts] = {}
    for server in servers:
        try:
            before |= baseline([server], version=number)
        except ValueError:
            logger.warning("%s does not answer: it counts from nothing", server.url)
    mine.check()
    # What a version replaced when it was promoted is kept: a second rollback goes one further back.
    known = move.kind == "rollback" and REPLACES in client.get_model_version(name, str(number)).tags
    set_champion(client, name, number, replaces=number if known else move.replaces)
    if move.kind == "promotion":
        note_verdict(client, name, number, move.why, by=move.who)
    wait_for_switch(name, version=number, rollout=move.rollout, alive=_questions(client, mine, move))
    note_stage(client, move, "watching")
    return Watch(name, number, move.rollout, before)


def watch(client: MlflowClient, mine: Turn, move: Move, watch: Watch, *, show: Callable[[str], None]) -> None:
    """For as long as the config says. Raises OutOfBounds as soon as it is, Superseded if somebody moved the alias."""
    seconds = 60 * move.rollout.watch_minutes
    servers = following(move.model, urls=move.rollout.servers)
    if not servers or not seconds:
        told = "no server follows it" if not servers else "rollout.watch_minutes = 0"
        end_move(client, move, outcome=f"promoted; not watched: {told}", well=True)
        return
    logger.info("watching %s/%d on %d servers for %g s", move.model, move.version, len(servers), seconds)
    alive, began = _questions(client, mine, move), time.monotonic()
    counts, step = Counts(), 0
    while time.monotonic() < began + seconds:
        alive()
        known = {server.url for server in servers}
        servers += [server for server in following(move.model) if server.url not in known]
        counts, step = watch.look(servers), step + 1
        told = in_words(counts)
        show(told)
        _log_counts(client, move, counts, step=step)
        time.sleep(max(0.0, min(LOOK_S, seconds / LOOKS, began + seconds - time.monotonic())))
    few = counts.requests < move.rollout.min_requests
    told = in_words(counts) + (f"; under {move.rollout.min_requests} say little" if few else "")
    end_move(client, move, outcome=f"promoted; watched for {seconds:g} s: {told}", well=True)


def in_words(counts: Counts) -> str:
    return f"{counts.requests:.0f} requests, {counts.failed:.0f} failed, p95 {counts.p95_ms:.0f} ms"


class Superseded(Exception):
    """Somebody else moved the alias, by hand as in MLflow's pages: that is respected."""


def _questions(client: MlflowClient, mine: Turn, move: Move) -> Callable[[], None]:
    """Is the turn still ours, and the alias where we put it? An MLflow that is away is asked again later."""
    asked_at, complained = 0.0, False

    def ask() -> None:
        nonlocal asked_at, complained
        if time.monotonic() < asked_at + ASK_S:
            return
        try:
            mine.check()
            champion = aliases_of(client, move.model).get(CHAMPION)
            complained = False
        except TurnLost:
            raise
        except Exception as error:
            if not complained:
                logger.warning("MLflow does not answer (%s): servers are watched on", type(error).__name__)
            complained, champion = True, move.version
        asked_at = time.monotonic()
        if champion != move.version:
            raise Superseded(f"somebody moved {move.model}@{CHAMPION} to version {champion} meanwhile")

    return ask


def _log_counts(client: MlflowClient, move: Move, counts: Counts, *, step: int) -> None:
    from mlflow.entities import Metric

    figures = {
        "watch/requests": counts.requests,
        "watch/failed": counts.failed,
        "watch/error_rate": counts.error_rate,
        "watch/p95_ms": counts.p95_ms,
    }
    now = int(time.time() * 1000)
    try:
        client.log_batch(move.move_id, metrics=[Metric(name, value, now, step) for name, value in figures.items()])
    except Exception as error:
        logger.debug("figures of the watch are lost (%s)", error)


def take_back(client: MlflowClient, mine: Turn, move: Move, why: str) -> None:
    """The version before reigns again, on the servers too. MLflow is waited for: they follow its alias."""
    name, number, before = move.model, move.version, move.replaces
    if before is None:
        text = f"kept, though {why}: there is no version to go back to"
        logger.warning("%s/%d is %s", name, number, text)
        _patiently(lambda: end_move(client, move, outcome=text, well=False))
        return
    logger.warning("%s/%d is taken back, to version %d: %s", name, number, before, why)
    text = f"rolled back to version {before}: {why}"
    _patiently(lambda: note_stage(client, move, "taking back"))
    _patiently(mine.check)
    _patiently(lambda: set_champion(client, name, before, replaces=before))
    _patiently(lambda: note_verdict(client, name, number, text, by=move.who))
    try:
        wait_for_switch(name, version=before, rollout=move.rollout, alive=lambda: None)
    except OutOfBounds as trouble:
        logger.warning("%s", trouble)
        text += f"; {trouble}"
    _patiently(lambda: end_move(client, move, outcome=text, well=False))


def _patiently(call: Callable[[], T]) -> T:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except TurnLost:
            raise
        except Exception as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("MLflow does not answer (%s): asked again in %g s", type(error).__name__, RETRY_S)
            time.sleep(RETRY_S)


def carry_out(client: MlflowClient, mine: Turn, move: Move, *, show: Callable[[str], None]) -> None:
    """A move from wherever it is to its end: made and watched, or taken back."""
    try:
        if move.stage == "taking back":
            raise OutOfBounds("its promotion was interrupted while it was taken back")
        watched = switch(client, mine, move)
        if move.kind == "promotion":
            watch(client, mine, move, watched, show=show)
        else:
            end_move(client, move, outcome=f"version {move.version} is champion", well=True)
    except OutOfBounds as why:
        if move.kind == "promotion":
            take_back(client, mine, move, str(why))
        else:
            end_move(client, move, outcome=f"version {move.version} is champion, but {why}", well=False)
    except Superseded as other:
        logger.warning("%s", other)
        end_move(client, move, outcome=str(other), well=False)


def settle(
    client: MlflowClient,
    mine: Turn,
    model: str,
    *,
    changed: Callable[[RolloutConfig], RolloutConfig] = lambda rollout: rollout,
    show: Callable[[str], None],
) -> Move | None:
    """What an interrupted move left is finished, or taken back; the move, if there was one.

    By the rollout that it began with, `changed` by who finishes it.
    """
    move = unfinished(client, model)
    if move is None:
        return None
    move = move.model_copy(update={"rollout": changed(move.rollout)})
    logger.warning("%s of %s/%d was interrupted while %s: going on", move.kind, model, move.version, move.stage)
    champion = aliases_of(client, model).get(CHAMPION)
    if champion not in (move.version, move.replaces):
        end_move(client, move, outcome=f"interrupted, and somebody moved champion to version {champion}", well=False)
    else:
        carry_out(client, mine, move, show=show)
    return move


def roll_back(model: str, *, to: int | None = None, why: str, tracking_uri: str) -> Move:
    """Put version `to` (default: the one that the champion replaced) in the champion's place, past all gates.

    A promotion that waits for servers or watches gives way. Returns the move, ended.
    Raises ValueError if there is no such version.
    """
    client = registry_client(tracking_uri)
    find_version(client, f"{model}/{to}" if to is not None else f"{model}@{CHAMPION}")
    with turn(client, model, what=f"rolls {model} back ({why})", urgent=True) as mine:
        move = _begin_rollback(client, mine, model, to=to, why=why)
        if move.stage != "done":
            carry_out(client, mine, move, show=logger.debug)
    return read_move(client, move.move_id)


def _begin_rollback(client: MlflowClient, mine: Turn, model: str, *, to: int | None, why: str) -> Move:
    reigning = aliases_of(client, model).get(CHAMPION)
    if begun := unfinished(client, model):
        end_move(client, begun, outcome=f"ended by {mine.who}: {why}", well=False)
        note_verdict(client, model, begun.version, f"rolled back by {mine.who}: {why}", by=mine.who)
        if to is None and begun.kind == "promotion" and reigning == begun.replaces:
            return read_move(client, begun.move_id)  # it had not come to move anything
    target = replaced_by(client, model, reigning) if to is None and reigning is not None else to
    if target is None:
        raise ValueError(f"no record of what {model}'s champion (version {reigning}) replaced: say --to VERSION")
    if target == reigning:
        raise ValueError(f"{model}/{target} is the champion already")
    moves = history(client, model)
    move = begin_move(
        client,
        model,
        version=target,
        replaces=reigning,
        kind="rollback",
        who=mine.who,
        why=why,
        rollout=moves[0].rollout if moves else RolloutConfig(),
    )
    if reigning is not None:
        note_verdict(client, model, reigning, f"rolled back to version {target} by {mine.who}: {why}", by=mine.who)
    return move
