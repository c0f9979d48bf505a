"""What can be told of running things without asking a daemon."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.containers import Found, State
from infra.hosts import DockerHost
from tasks.operations.ps import (
    OnHost,
    ago,
    each_once,
    last_logged_step,
    launcher_of,
    watch_leases,
)
from tasks.operations.stop import reap
from tasks.workspace.locks import is_owned, owned
from tasks.workspace.processes import process_key
from training.config.launch import LaunchConfig
from training.records.record import write_atomically


def test_each_daemon_is_asked_once_under_a_name_of_its_own() -> None:
    hosts = [
        DockerHost(name="gpu1", url="ssh://me@gpu1"),
        DockerHost(name="first", url="ssh://me@gpu1"),
        DockerHost(name="gpu1", url="tcp://10.0.0.2:2376"),
    ]
    assert [host.name for host in each_once(hosts)] == ["gpu1", "gpu1 (tcp://10.0.0.2:2376)"]


def test_the_newest_step_is_that_of_the_last_whole_row(tmp_path: Path) -> None:
    assert last_logged_step(tmp_path) is None
    rows = "".join(json.dumps({"step": step, "loss": 1.0, "note": "x" * 100}) + "\n" for step in range(1, 2001))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 20')
    assert last_logged_step(tmp_path) == 2000


@pytest.mark.parametrize(("seconds", "words"), [(30, "30 s"), (130, "2 min"), (7300, "2 h"), (260_000, "3 days")])
def test_ages_are_for_people(seconds: int, words: str) -> None:
    began = datetime.now(UTC) - timedelta(seconds=seconds)
    assert ago(f"{began:%Y-%m-%dT%H:%M:%S.%f}789Z") == words


LEASE_S = 0.4
ELSEWHERE = "elsewhere/7/1/another-kernel"


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lease of a run whose launcher is on another machine; it counts as gone after LEASE_S."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    quick = LaunchConfig().model_copy(update={"lease_s": LEASE_S})
    monkeypatch.setattr("tasks.operations.ps.launch_of", lambda run_dir: quick)
    path = tmp_path / "run" / "attempts" / "1" / "lease"
    write_atomically(path, "0\n")
    return path


@contextmanager
def renewing(lease: Path, *, modified: Callable[[int], float]) -> Iterator[None]:
    """Renew the lease as its launcher does, on a storage whose clock gives the file these times."""
    over = threading.Event()

    def renew() -> None:
        for count in itertools.count(1):
            lease.write_text(f"{count}\n")
            os.utime(lease, (modified(count),) * 2)
            if over.wait(LEASE_S / 10):
                return

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def reaped(*found: OnHost) -> tuple[bool, str]:
    """Whether `reap` would remove the containers, and the reason why not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.operations.stop.ask", lambda hosts: ({"host0": list(found)}, {}))
        done = reap([], dry_run=True)
    return bool(done.removed), "".join(done.kept.values())


CLOCKS: dict[str, Callable[[int], float]] = {
    "right": lambda count: time.time(),
    "hours ahead": lambda count: time.time() + 7200,
    "hours behind": lambda count: time.time() - 7200,
    "stands still": lambda count: 1.0,
    "steps forward": lambda count: time.time() + 3600 * (count > 3),
    "steps back": lambda count: time.time() - 3600 * (count > 3),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_launcher_elsewhere_lives_while_its_lease_changes_whatever_the_clocks_say(lease: Path, clock: str) -> None:
    with renewing(lease, modified=CLOCKS[clock]):
        assert reaped(container(launcher=ELSEWHERE)) == (False, "alive on elsewhere")


@pytest.mark.parametrize("age_s", [0, -3, -7200, 3, 1e9])
def test_a_launcher_elsewhere_is_gone_once_its_lease_has_not_changed_while_it_was_watched(
    lease: Path, age_s: float
) -> None:
    os.utime(lease, (time.time() - age_s,) * 2)
    began = time.monotonic()
    assert reaped(*[container(launcher=ELSEWHERE)] * 50) == (True, "")
    assert LEASE_S <= time.monotonic() - began < 25 * LEASE_S, "all leases are watched together"


def test_a_launcher_elsewhere_is_gone_once_it_withdraws_its_lease(lease: Path) -> None:
    timer = threading.Timer(LEASE_S / 3, lease.unlink)
    timer.start()
    assert reaped(container(launcher=ELSEWHERE)) == (True, "")
    timer.join()


def test_a_listing_waits_for_a_lease_only_briefly_and_says_so(lease: Path) -> None:
    found = container(launcher=ELSEWHERE)
    assert watch_leases([[found]], at_most_s=0.1) == set()
    assert launcher_of(found, (), for_s=0.1) == (
        True,
        "on elsewhere, has not renewed its lease for 0.1 s: after 0.4 s it counts as gone",
    )
    with renewing(lease, modified=CLOCKS["stands still"]):
        assert launcher_of(found, watch_leases([[found]]), for_s=0.1) == (True, "alive on elsewhere")


def test_a_launcher_of_an_equal_name_on_another_machine_is_judged_by_its_lease(lease: Path) -> None:
    ours = process_key(os.getpid())
    dead = ours.replace(f"/{os.getpid()}/", "/4194304/")
    assert launcher_of(container(launcher=ours), ())[0]
    assert not launcher_of(container(launcher=dead), {lease})[0]
    assert launcher_of(container(launcher=f"{dead}-cloned"), {lease})[0], "a pid that only the clone could look for"
    assert not launcher_of(container(launcher=f"{dead}-cloned"), ())[0]


def test_a_launcher_whose_record_is_damaged_may_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    dead = process_key(os.getpid()).replace(f"/{os.getpid()}/", "/4194304/")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "owner.json").touch()
    kept, words = launcher_of(container(launcher=dead), ())
    assert kept, "or reap would remove the ranks of a run that goes on"
    assert f"{tmp_path}/run/owner.json is empty" in words


def container(*, launcher: str) -> OnHost:
    found = Found(id="1", name="node", run="run", attempt="1", host="host0", launcher=launcher, status="running")
    began = "2026-01-01T00:00:00Z"
    return OnHost(found, State("running", 0, oom_killed=False, health="", error="", started_at=began, finished_at=""))


def test_a_run_is_owned_while_a_process_holds_it(tmp_path: Path) -> None:
    assert not is_owned(tmp_path)
    with owned(tmp_path):
        assert is_owned(tmp_path)
    assert not is_owned(tmp_path)
