"""The rollout of a new champion: switches the alias, waits for the servers, watches them; rolls back if they fail.

The alias `champion` changes only here, and always for a change that is in the journal: each step can be repeated by the
process that finishes an interrupted change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tasks.display.progress import time_progress
from tasks.promotion.journal import Move, begin_move, end_move, history, note_stage, read_move, unfinished
from tasks.promotion.judge import note_verdict, terms_of
from tasks.promotion.lock import LockLost, PromotionLock, promotion_lock
from tasks.promotion.servers import Counts, RolloutFailed, Watch, baseline, servers_of_champion, wait_for_switch
from tasks.promotion.smoke_test import smoke_test
from tasks.registry.models import aliases_of, find_version, replaced_by
from tasks.registry.tags import CHALLENGER, CHAMPION, REPLACES
from tasks.tracking.client import registry_client
from training.config.promotion import RolloutConfig
from training.records.words import format_duration

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 2.0  # between two requests to MLflow during the wait for servers and the watch
MAX_SAMPLES, MAX_SAMPLE_INTERVAL_S = 100, 5.0  # number of samples in a watch, but at least one every 5 s
PATIENCE_S, RETRY_S = 900.0, 5.0  # wait for an MLflow that does not answer during a rollback


def record_replaced(client: MlflowClient, name: str, number: int, *, replaces: int | None) -> None:
    """Record which version this one replaces, before it becomes champion; rollbacks follow these records."""
    client.set_model_version_tag(name, str(number), REPLACES, str(replaces or ""))


def set_champion(client: MlflowClient, name: str, number: int) -> None:
    """Change the alias `champion` in one write, so that there is exactly one champion at any time."""
    client.set_registered_model_alias(name, CHAMPION, str(number))
    if aliases_of(client, name).get(CHALLENGER) == number:
        client.delete_registered_model_alias(name, CHALLENGER)


def carry_out(client: MlflowClient, lock: PromotionLock, move: Move, *, show: Callable[[str], None]) -> None:
    """Continue a change from its stage to its end: made and watched, or rolled back."""
    try:
        if move.stage == "taking back":
            raise RolloutFailed("its process ended during the automatic rollback")
        watch = switch(client, lock, move)
        if move.kind == "promotion":
            watch_servers(client, lock, move, watch, show=show)
        else:
            end_move(client, move, outcome=f"version {move.version} is champion", well=True)
    except RolloutFailed as reason:
        if move.kind == "promotion":
            undo_promotion(client, lock, move, str(reason))
        else:
            end_move(client, move, outcome=f"version {move.version} is champion, but {reason}", well=False)
    except Superseded as reason:
        logger.warning("%s", reason)
        end_move(client, move, outcome=str(reason), well=False)


def switch(client: MlflowClient, lock: PromotionLock, move: Move) -> Watch:
    """Change the alias and wait for the servers.

    Raises RolloutFailed if a server does not serve the version in time.
    """
    name, number = move.model, move.version
    before: dict[str, Counts] = {}
    for server in servers_of_champion(name, urls=move.rollout.servers):
        try:
            before |= baseline([server], version=number)
        except ValueError:
            logger.warning("no baseline from %s: its counters start at zero", server.url)
    lock.check()
    # A rollback keeps the record of the version's promotion, so that a second rollback goes one version further back.
    recorded = REPLACES in client.get_model_version(name, str(number)).tags
    if move.replaces != number and (move.kind == "promotion" or not recorded):
        record_replaced(client, name, number, replaces=move.replaces)
    set_champion(client, name, number)
    if move.kind == "promotion":
        note_verdict(client, name, number, move.why, by=move.who)
    silence = partial(own_silence, client, move)
    waiting = f"waiting until all servers serve {name}/{number}, at most {move.rollout.switch_timeout_s:g} s"
    with time_progress(waiting):
        check = _ownership_check(client, lock, move)
        wait_for_switch(name, version=number, rollout=move.rollout, check=check, own_silence=silence)
    note_stage(client, move, "watching")
    return Watch(name, number, move.rollout, before, silence)


def own_silence(client: MlflowClient, move: Move) -> str:
    """Return why it is the version's own fault that a server does not answer; "" if it is not.

    Fresh servers, which no client knows, are asked: of the version, and of the one before it.
    """
    if move.replaces is None or not (error := _fresh_error(client, move, move.version)):
        return ""
    if _fresh_error(client, move, move.replaces):
        return ""
    return f"neither does a fresh one of version {move.version} ({error}), but one of version {move.replaces}"


def _fresh_error(client: MlflowClient, move: Move, number: int) -> str:
    """Return why a fresh server of a version does not answer; "" if it does."""
    try:
        version = find_version(client, f"{move.model}/{number}")
        prompts = terms_of(version, tracking_uri=client.tracking_uri).prompts
    except Exception as error:  # MLflow does not answer
        return str(error)
    return smoke_test(move.model, number, prompts=prompts, timeout_s=move.rollout.switch_timeout_s).error


def watch_servers(
    client: MlflowClient, lock: PromotionLock, move: Move, watch: Watch, *, show: Callable[[str], None]
) -> None:
    """Watch for rollout.watch_minutes. Raises RolloutFailed as Watch does, Superseded if somebody changed the alias."""
    seconds = 60 * move.rollout.watch_minutes
    servers = servers_of_champion(move.model, urls=move.rollout.servers)
    if not servers or not seconds:
        reason = "no server follows it" if not servers else "rollout.watch_minutes = 0"
        end_move(client, move, outcome=f"promoted; not watched: {reason}", well=True)
        return
    logger.info("watching %s/%d on %d servers for %g s", move.model, move.version, len(servers), seconds)
    check, start = _ownership_check(client, lock, move), time.monotonic()
    counts, step = Counts(), 0
    with time_progress("watching the servers") as progress:
        progress.begin(f"watching {move.model}/{move.version}", total=seconds, unit="s")
        while (now := time.monotonic()) < start + seconds:
            progress.done = now - start
            check()
            known = {server.url for server in servers}
            servers += [server for server in servers_of_champion(move.model) if server.url not in known]
            counts, step = watch.sample(servers), step + 1
            show(str(counts))
            _log_counts(client, move, counts, step=step)
            time.sleep(max(0.0, min(MAX_SAMPLE_INTERVAL_S, seconds / MAX_SAMPLES, start + seconds - time.monotonic())))
    required = move.rollout.min_requests
    note = f"; fewer than the {required} requests that a rollback needs" if counts.requests < required else ""
    end_move(client, move, outcome=f"promoted; watched for {format_duration(seconds)}: {counts}{note}", well=True)


class Superseded(Exception):
    """Somebody else changed the alias, for example in MLflow's pages; their choice stays."""


def _ownership_check(client: MlflowClient, lock: PromotionLock, move: Move) -> Callable[[], None]:
    """Return a function that raises unless this process holds the lock and the alias is where it set it. It asks MLflow
    at most every POLL_S, and does not raise while MLflow does not answer.
    """
    asked_at, warned = 0.0, False

    def check() -> None:
        nonlocal asked_at, warned
        if time.monotonic() < asked_at + POLL_S:
            return
        try:
            lock.check()
            champion = aliases_of(client, move.model).get(CHAMPION)
            warned = False
        except LockLost:
            raise
        except Exception as error:
            if not warned:
                logger.warning("MLflow does not answer (%s); the servers are still watched", type(error).__name__)
            warned, champion = True, move.version
        asked_at = time.monotonic()
        if champion != move.version:
            raise Superseded(f"somebody moved {move.model}@{CHAMPION} to version {champion} meanwhile")

    return check


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
        logger.debug("MLflow did not take the counts of the watch (%s)", error)


def undo_promotion(client: MlflowClient, lock: PromotionLock, move: Move, why: str) -> None:
    """Make the earlier version champion again, also on the servers.

    Waits for MLflow, because servers follow its alias.
    """
    name, number, before = move.model, move.version, move.replaces
    if before is None:
        text = f"kept, though {why}: there is no version to go back to"
        logger.warning("%s/%d is %s", name, number, text)
        _retry(lambda: end_move(client, move, outcome=text, well=False))
        return
    logger.warning("rolling %s back from version %d to version %d: %s", name, number, before, why)
    text = f"rolled back to version {before}: {why}"
    _retry(lambda: note_stage(client, move, "taking back"))
    _retry(lock.check)
    _retry(lambda: set_champion(client, name, before))
    _retry(lambda: note_verdict(client, name, number, text, by=move.who))
    try:
        wait_for_switch(name, version=before, rollout=move.rollout, check=lambda: None)
    except RolloutFailed as failure:
        logger.warning("%s", failure)
        text += f"; {failure}"
    _retry(lambda: end_move(client, move, outcome=text, well=False))


def _retry(call: Callable[[], T]) -> T:
    """Repeat `call` until MLflow answers, for up to PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except LockLost:
            raise
        except Exception as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("MLflow does not answer (%s); trying again in %g s", type(error).__name__, RETRY_S)
            time.sleep(RETRY_S)


def finish_interrupted(
    client: MlflowClient,
    lock: PromotionLock,
    model: str,
    *,
    changed: Callable[[RolloutConfig], RolloutConfig] = lambda rollout: rollout,
    show: Callable[[str], None],
) -> Move | None:
    """Finish or undo the model's interrupted change; return it, or None if there was none. `changed` may change the
    rollout settings that the change began with.
    """
    move = unfinished(client, model)
    if move is None:
        return None
    move = move.model_copy(update={"rollout": changed(move.rollout)})
    logger.warning(
        "the %s of %s/%d was interrupted at stage `%s`: finishing it", move.kind, model, move.version, move.stage
    )
    champion = aliases_of(client, model).get(CHAMPION)
    if champion not in (move.version, move.replaces):
        end_move(client, move, outcome=f"interrupted, and somebody moved champion to version {champion}", well=False)
    else:
        carry_out(client, lock, move, show=show)
    return move


def roll_back(model: str, *, to: int | None = None, why: str, tracking_uri: str) -> Move:
    """Make version `to` (default: the one that the champion replaced) champion without checking the gates.

    A promotion that waits for servers or watches them gives up its lock. Returns the ended change. Raises ValueError if
    there is no such version.
    """
    client = registry_client(tracking_uri)
    find_version(client, f"{model}/{to}" if to is not None else f"{model}@{CHAMPION}")
    with promotion_lock(client, model, what=f"rolls {model} back ({why})", urgent=True) as lock:
        move = _begin_rollback(client, lock, model, to=to, why=why)
        if move.stage != "done":
            carry_out(client, lock, move, show=logger.debug)
    return read_move(client, move.move_id)


def _begin_rollback(client: MlflowClient, lock: PromotionLock, model: str, *, to: int | None, why: str) -> Move:
    champion = aliases_of(client, model).get(CHAMPION)
    if interrupted := unfinished(client, model):
        end_move(client, interrupted, outcome=f"ended by {lock.who}: {why}", well=False)
        note_verdict(client, model, interrupted.version, f"rolled back by {lock.who}: {why}", by=lock.who)
        if to is None and interrupted.kind == "promotion" and champion == interrupted.replaces:
            return read_move(client, interrupted.move_id)  # it had not changed the alias yet
    target = replaced_by(client, model, champion) if to is None and champion is not None else to
    if target is None:
        raise ValueError(f"no record of what {model}'s champion (version {champion}) replaced: say --to VERSION")
    if target == champion:
        raise ValueError(f"{model}/{target} is the champion already")
    moves = history(client, model)
    move = begin_move(
        client,
        model,
        version=target,
        replaces=champion,
        kind="rollback",
        who=lock.who,
        why=why,
        rollout=moves[0].rollout if moves else RolloutConfig(),
    )
    if champion is not None:
        note_verdict(client, model, champion, f"rolled back to version {target} by {lock.who}: {why}", by=lock.who)
    return move
