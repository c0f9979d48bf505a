"""Moves of a champion without servers: whose turn it is, what an interruption leaves, and the way back."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tasks.promotion import rollout
from tasks.promotion.gates import Check
from tasks.promotion.journal import Move, begin_move, history, note_stage
from tasks.promotion.judge import Terms, judge_records
from tasks.promotion.lock import PREFIX, LockLost, LockTag, promotion_lock
from tasks.promotion.promote import Case, Request, approved_by_tag, begin, judge, overridden, refuse
from tasks.promotion.rollout import finish_interrupted, record_replaced, roll_back, set_champion
from tasks.promotion.servers import Counts, RolloutFailed, Server, Watch, read_counts, wait_for_switch
from tasks.registry.models import aliases_of, replaced_by
from tasks.registry.tags import TAG, note_evaluation
from tasks.serving.metrics import ServerMetrics
from tasks.workspace.processes import process_key
from training.config.promotion import GatesConfig, RolloutConfig
from training.facts.formats import FORMATS


@pytest.fixture
def client(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A registry with versions 1 to 4 of `tiny`, of which 1 is champion, and a SHARDLINE_HOME without servers."""
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    client.create_registered_model("tiny")
    for loss in (3.0, 2.5, 2.75, 2.0):
        tags = {
            "val_loss": repr(loss),
            "dataset_fingerprint": "a" * 64,
            "parity_passed": "true",
            "val_tokens": "399",
            "formats": "Hugging Face",
        }
        tags["format"] = str(FORMATS["exports"].number)
        client.create_model_version(
            "tiny", source="file:///nowhere", tags={f"{TAG}{key}": value for key, value in tags.items()}
        )
    promoted(client, 1, replaces=None)
    return client


def promoted(client: MlflowClient, version: int, *, replaces: int | None) -> None:
    record_replaced(client, "tiny", version, replaces=replaces)
    set_champion(client, "tiny", version)


def champion(client: MlflowClient) -> int | None:
    return aliases_of(client, "tiny").get("champion")


def begun(client: MlflowClient, version: int) -> Move:
    """A promotion whose process was killed right after it wrote down what it would do."""
    return begin_move(
        client,
        "tiny",
        version=version,
        replaces=champion(client),
        kind="promotion",
        who="ada",
        why="passed: a test",
        rollout=RolloutConfig(),
    )


def finish(client: MlflowClient) -> Move:
    with promotion_lock(client, "tiny", what="a test") as lock:
        finish_interrupted(client, lock, "tiny", show=print)
    return history(client, "tiny")[0]


def test_one_contender_at_a_time_holds_the_lock(client: MlflowClient) -> None:
    inside, most = 0, 0

    def work(number: int) -> None:
        nonlocal inside, most
        with promotion_lock(client, "tiny", what=f"work {number}") as lock:
            inside += 1
            most = max(most, inside)
            lock.check()
            inside -= 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert most == 1
    assert not [key for key in client.get_registered_model("tiny").tags if key.startswith(PREFIX)]


def test_the_lock_of_a_killed_holder_is_removed(client: MlflowClient) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        key = process_key(process.pid)
        process.kill()
    dead = LockTag(state="holding", who="ada", what="promotes", process=key, urgent=False, heartbeat=3)
    client.set_registered_model_tag("tiny", f"{PREFIX}dead", dead.content().decode())
    with promotion_lock(client, "tiny", what="a test"):
        assert f"{PREFIX}dead" not in client.get_registered_model("tiny").tags


def test_a_rollback_takes_the_lock_from_a_promotion_that_watches(client: MlflowClient) -> None:
    promoted(client, 2, replaces=1)
    holding, lock_lost, deadline = threading.Event(), "", time.monotonic() + 20

    def watches() -> None:
        nonlocal lock_lost
        with promotion_lock(client, "tiny", what="promotes tiny/2") as lock:
            holding.set()
            try:
                while time.monotonic() < deadline:
                    lock.check()
            except LockLost as lost:
                lock_lost = str(lost)

    thread = threading.Thread(target=watches)
    thread.start()
    holding.wait(20)
    move = roll_back("tiny", why="it swears", tracking_uri=client.tracking_uri)
    thread.join(20)
    assert "rolls tiny back (it swears)" in lock_lost
    assert (move.version, move.replaces, move.why, move.outcome) == (1, 2, "it swears", "version 1 is champion")
    assert champion(client) == 1


def test_rollbacks_go_back_along_what_each_version_replaced(client: MlflowClient) -> None:
    for version, before in ((2, 1), (4, 2)):
        promoted(client, version, replaces=before)
    uri = client.tracking_uri
    assert [roll_back("tiny", why="bad", tracking_uri=uri).version for _ in range(2)] == [2, 1]
    with pytest.raises(ValueError, match=r"no record of what tiny's champion \(version 1\) replaced: say --to VERSION"):
        roll_back("tiny", why="bad", tracking_uri=uri)
    assert roll_back("tiny", to=3, why="try it", tracking_uri=uri).outcome == "version 3 is champion"
    assert replaced_by(client, "tiny", 3) == 1
    with pytest.raises(ValueError, match="tiny/3 is the champion already"):
        roll_back("tiny", to=3, why="again", tracking_uri=uri)
    with pytest.raises(ValueError, match="no tiny/9"):
        roll_back("tiny", to=9, why="again", tracking_uri=uri)
    moves = [(move.replaces, move.version, move.why) for move in history(client, "tiny")]
    assert moves == [(1, 3, "try it"), (2, 1, "bad"), (4, 2, "bad")]
    verdict = client.get_model_version("tiny", "4").tags[f"{TAG}verdict"]
    assert verdict.startswith("rolled back to version 2 by ")


@pytest.mark.parametrize("moved", [False, True], ids=["before the alias moved", "after it moved"])
def test_an_interrupted_move_is_finished_by_the_next(client: MlflowClient, moved: bool) -> None:
    begun(client, 2)
    if moved:
        promoted(client, 2, replaces=1)
    done = finish(client)
    assert (champion(client), replaced_by(client, "tiny", 2)) == (2, 1)
    assert (done.stage, done.outcome) == ("done", "promoted; not watched: no server follows it")
    assert client.get_model_version("tiny", "2").tags[f"{TAG}verdict"] == "passed: a test"
    assert finish(client) == done


def test_an_interrupted_way_back_is_gone_to_its_end(client: MlflowClient) -> None:
    move = begun(client, 2)
    promoted(client, 2, replaces=1)
    note_stage(client, move, "taking back")
    assert finish(client).outcome.startswith("rolled back to version 1: its process ended")
    assert champion(client) == 1


def test_an_alias_that_somebody_moved_meanwhile_is_left_where_it_is(client: MlflowClient) -> None:
    begun(client, 2)
    client.set_registered_model_alias("tiny", "champion", "3")
    assert finish(client).outcome == "interrupted, and somebody moved champion to version 3"
    assert champion(client) == 3


def test_a_rollback_of_a_promotion_that_had_moved_nothing_moves_nothing(client: MlflowClient) -> None:
    promoted(client, 2, replaces=1)
    begun(client, 4)
    assert roll_back("tiny", why="no", tracking_uri=client.tracking_uri).version == 4
    assert champion(client) == 2
    assert finish(client).stage == "done"


def test_a_champion_that_changed_since_the_judgement_is_judged_against(client: MlflowClient) -> None:
    """Version 3 (loss 2.75) passed against version 1 (3.0); by the time it is approved version 2 (2.5) reigns."""
    case = Case("tiny", 3, Terms(), 1, (Check("loss", True, "better"), Check("approval", True, "by ada")))
    promoted(client, 2, replaces=1)
    with promotion_lock(client, "tiny", what="a test") as lock:
        refused = begin(client, lock, Request("tiny", "ada"), case)
    assert not isinstance(refused, Move)
    assert "0.2500 nats per token above champion tiny/2's 2.5000" in refused.verdict
    tags = client.get_model_version("tiny", "3").tags
    assert tags[f"{TAG}gate.loss"].startswith("not passed: validation loss 2.7500")
    assert tags[f"{TAG}gate.approval"] == "passed: by ada"
    assert tags[f"{TAG}judged"].endswith(" by ada")
    assert champion(client) == 2


def test_a_champion_measured_on_the_challengers_data_is_compared_there(client: MlflowClient) -> None:
    """Version 4 (loss 2.0) is of other data than champion 1, whose loss there is 1.5."""
    client.set_model_version_tag("tiny", "4", f"{TAG}dataset_fingerprint", "b" * 64)
    version = client.get_model_version("tiny", "4")
    assert "other data" in judge_records(client, version, terms=Terms(), champion=1).text
    note_evaluation(client, "tiny", 1, dataset="b" * 64, loss=1.5, tokens=399)
    assert (
        "0.5000 nats per token above champion tiny/1's 1.5000"
        in judge_records(client, version, terms=Terms(), champion=1).text
    )
    for number, loss in ((1, 1.75), (4, 1.25)):  # both, on a text that neither was registered with
        note_evaluation(client, "tiny", number, dataset="c" * 64, loss=loss, tokens=5000)
    version = client.get_model_version("tiny", "4")
    assert (
        "0.5000 nats per token below champion tiny/1's 1.7500"
        in judge_records(client, version, terms=Terms(), champion=1).text
    )


def test_where_no_version_waits_a_promotion_says_how_to_name_one(client: MlflowClient) -> None:
    with pytest.raises(ValueError, match=r"no version of tiny waits for its promotion, .* name one with --version"):
        judge(client, Request("tiny", "ada"), tracking_uri="")


def test_approval_by_a_tag_is_waited_for_and_names_who_gave_it(client: MlflowClient) -> None:
    case = Case("tiny", 2, Terms(gates=GatesConfig(approval="tag", approval_timeout_s=0.05)))
    missed = approved_by_tag(client, case)
    assert (missed.passed, "nobody set the tag shardline.approved within 0.05 s" in missed.text) == (False, True)
    assert refuse(client, Request("tiny", "ada"), Case("tiny", 2, Terms(), checks=(missed,))).alias == ""
    client.set_model_version_tag("tiny", "2", "shardline.approved", "grace")
    assert approved_by_tag(client, case).verdict == "passed: approved by grace (tag shardline.approved)"


def test_overrides_name_what_there_is() -> None:
    changed = overridden(Terms(), {"gates.max_p95_ms": 50, "rollout.watch_minutes": 1})
    assert (changed.gates.max_p95_ms, changed.rollout.watch_minutes) == (50, 1)
    with pytest.raises(ValueError, match=r"train\.steps cannot be changed by a promotion; these can: gates\."):
        overridden(Terms(), {"train.steps": 3})
    with pytest.raises(ValueError, match=r"watch_minutes = -1: Input should be greater"):
        overridden(Terms(), {"rollout.watch_minutes": -1})


def test_error_rate_and_p95_are_read_of_the_version_that_is_watched() -> None:
    metrics = ServerMetrics()
    for version, codes, seconds in (("3", ["500"] * 50, 9.0), ("4", ["200"] * 95 + ["503"] * 5, 0.02)):
        for code in codes:
            metrics.requests.labels("tiny", version, code).inc()
            metrics.text_seconds.labels("tiny", version).observe(seconds)
    before = read_counts(metrics.page().decode(), version=4)
    for code, seconds in (("200", 0.04), ("200", 0.04), ("400", 0.04), ("500", 0.2)):
        metrics.requests.labels("tiny", "4", code).inc()
        metrics.text_seconds.labels("tiny", "4").observe(seconds)
        metrics.seconds.labels("tiny", "4").observe(99)  # of a client that read slowly, or had to wait
    for version, code in (("4", "499"), ("", "429"), ("", "503")):  # clients that left, and a server that was busy
        metrics.requests.labels("tiny", version, code).inc(50)
    since = read_counts(metrics.page().decode(), version=4).since(before)
    assert (since.requests, since.failed) == (3, 1), "neither clients' mistakes nor a busy server are the version's"
    assert since.error_rate == pytest.approx(1 / 3)
    assert 100 < since.p95_ms < 250  # within its bucket
    assert since.since(Counts(requests=1000)) == since  # a server that began anew
    watch = Watch("tiny", 4, RolloutConfig(min_requests=3), before={})
    with pytest.raises(RolloutFailed, match=r"1 of 3 requests since the switch failed: 33\.3%, at most 1\.0%"):
        watch.judge(since)
    slow = Watch("tiny", 4, RolloutConfig(min_requests=3, max_error_rate=1, max_p95_ms=90), before={})
    with pytest.raises(RolloutFailed, match=r"p95 \d+ ms of 3 requests since the switch, at most 90 ms"):
        slow.judge(since)
    Watch("tiny", 4, RolloutConfig(min_requests=4, max_p95_ms=1), before={}).judge(since)  # too few to say


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ({4: "no answer", 1: ""}, "neither does a fresh one of version 4 (no answer), but one of version 1"),
        ({4: "", 1: ""}, ""),  # a client, or the network, keeps the server from answering
        ({4: "no answer", 1: "no answer"}, ""),  # the machine does
        ({4: "", 1: "no answer"}, ""),
    ],
    ids=["the version's own", "the server's", "the machine's", "the other's"],
)
def test_a_silent_server_counts_only_if_the_version_before_answers(
    errors: dict[int, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_fresh_error", lambda client, move, number: errors[number])
    monkeypatch.setattr("tasks.promotion.servers.SILENT_S", -1.0)
    move: Any = SimpleNamespace(model="tiny", version=4, replaces=1, rollout=RolloutConfig(switch_timeout_s=0.01))
    client: Any = None
    assert rollout.own_silence(client, move) == reason
    move.replaces = None
    assert rollout.own_silence(client, move) == "", "there is nothing to go back to"
    move.replaces = 1
    silence = partial(rollout.own_silence, client, move)
    with socket.create_server(("127.0.0.1", 0)) as free:
        silent = Server(f"http://127.0.0.1:{free.getsockname()[1]}")
    watch = Watch("tiny", 4, move.rollout, {}, silence)
    monkeypatch.setattr("tasks.promotion.servers.servers_of_champion", lambda name, urls: [silent])
    switch = partial(wait_for_switch, "tiny", version=4, rollout=move.rollout, check=lambda: None)
    if reason:
        with pytest.raises(RolloutFailed, match=r"has not answered for .*version 1"):
            watch.sample([silent])
        with pytest.raises(RolloutFailed, match="not all servers served version 4"):
            switch(own_silence=silence)
    else:
        assert watch.sample([silent]) == Counts()
        switch(own_silence=silence)
    with pytest.raises(RolloutFailed, match="no answer"):
        switch()
