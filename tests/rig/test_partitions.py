"""Cut networks and killed daemons: training goes on while its ranks live, and is fenced and taken up where they do not.

Each time the losses are those of a run that nothing happened to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.launch.docker_hosts import hosts_of, remove_containers
from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunFailed
from tests.support.configs import read_plan
from tests.support.launched_runs import at_step, causes, curve, train
from tests.support.rig.rig import Rig, RigHost
from tests.support.rig.runs import (
    SLOW_STEPS,
    assert_as_expected,
    assert_nothing_is_left,
    kill_containers,
)
from training.config.launch import LaunchConfig

BLIP_S, PARTITION_S, RESTART_S = 8.0, 45.0, 3.0
SlowRun = Callable[..., tuple[Path, dict[int, float]]]


@contextmanager
def outage(seconds: float, begin: Callable[[], object], end: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Yields what begins it; so many seconds later it ends, before the block does at the latest."""
    timers: list[threading.Timer] = []

    def strike() -> None:
        begin()
        timers.append(after(seconds, end))

    yield strike
    timers[0].join()


def after(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def launch_of(run_dir: Path) -> LaunchConfig:
    return read_plan(run_dir).config.launch


def statuses(rig: Rig, host: RigHost) -> list[str]:
    return [container.status for container in rig.containers(host)]


@pytest.mark.long
@pytest.mark.parametrize("what", ["network", "daemon"])
def test_what_comes_back_soon_restarts_nothing(slow_rig: Rig, slow_run: SlowRun, what: str) -> None:
    host = slow_rig.hosts[1]
    # TCP comes back 6 to 10 s after the network, as a rule; once it took more than 22 s.
    patient = {"launch__lost_after_s": LaunchConfig().lost_after_s, "parallel__timeout_s": 120}
    seconds, begin, end = {
        "network": (BLIP_S, slow_rig.partition, slow_rig.heal),
        "daemon": (RESTART_S, slow_rig.kill_daemon, slow_rig.start_daemon),
    }[what]
    run_dir, expected = slow_run("blip", **(patient if what == "network" else {}))
    with outage(seconds, lambda: begin(host), lambda: end(host)) as strike:
        train(run_dir, on_row=at_step(8, strike))
    assert causes(run_dir) == ["done"]
    assert_as_expected(slow_rig, run_dir, expected)


def test_a_partition_is_fenced_and_the_run_taken_up(
    slow_rig: Rig, slow_run: SlowRun, caplog: pytest.LogCaptureFixture
) -> None:
    host = slow_rig.hosts[1]
    run_dir, expected = slow_run("partition")
    before_heal: list[list[str]] = []

    def heal() -> None:
        before_heal.append(statuses(slow_rig, host))
        slow_rig.heal(host)

    def strike() -> None:
        slow_rig.partition(host)
        after(PARTITION_S, heal)

    train(run_dir, on_row=at_step(8, strike))
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], first["ending"]["host"]) == ("lost host", "host1")
    assert second["ending"]["cause"] == "done"
    assert before_heal == [["exited"]], "its ranks saw that their lease was gone, and ended while it was cut off"
    assert "waiting for host1" in caplog.text
    assert "host1: removed 1 containers of an earlier attempt" in caplog.text
    assert_as_expected(slow_rig, run_dir, expected)


@pytest.mark.long
def test_a_host_that_reboots_is_waited_for_though_it_could_be_done_without(slow_rig: Rig, slow_run: SlowRun) -> None:
    host = slow_rig.hosts[1]
    run_dir, expected = slow_run("reboot", launch__min_hosts=1)

    def go_down() -> None:
        kill_containers(slow_rig, host)
        slow_rig.kill_daemon(host)

    with outage(2 * RESTART_S, go_down, lambda: slow_rig.start_daemon(host)) as strike:
        train(run_dir, on_row=at_step(8, strike))
    assert [attempt["hosts"] for attempt in attempts_of(run_dir)] == 2 * [{"host0": 2, "host1": 1}]
    assert_as_expected(slow_rig, run_dir, expected)


@pytest.mark.long
def test_a_daemon_that_stays_away_is_a_lost_host(slow_rig: Rig, slow_run: SlowRun) -> None:
    host = slow_rig.hosts[0]
    impatient = {"launch__lost_after_s": 2.0, "launch__daemon_grace_s": 2.0, "launch__wait_s": 1.0}
    run_dir, expected = slow_run("away", **impatient)
    with pytest.raises(RunFailed, match=r"host0 of 2 hosts cannot take part.* start Docker.*launch\.wait_s") as failed:
        train(run_dir, on_row=at_step(4, lambda: slow_rig.kill_daemon(host)))
    assert failed.value.cause == "lost host"
    assert causes(run_dir) == ["lost host"]
    assert max(curve(run_dir)) < SLOW_STEPS, "its ranks did not go on alone"
    slow_rig.start_daemon(host)
    assert statuses(slow_rig, host) == ["exited"]
    train(run_dir)
    assert causes(run_dir) == ["lost host", "done"]
    assert_as_expected(slow_rig, run_dir, expected)


@pytest.mark.long
def test_a_daemon_that_is_away_when_training_ends_is_not_waited_for(
    slow_rig: Rig, slow_run: SlowRun, caplog: pytest.LogCaptureFixture
) -> None:
    host = slow_rig.hosts[1]
    run_dir, expected = slow_run("end")
    train(run_dir, on_row=at_step(SLOW_STEPS - 8, lambda: slow_rig.kill_daemon(host)))
    assert causes(run_dir) == ["done"]
    assert curve(run_dir) == expected
    assert "may be left on host1: `shardline reap` removes them when the host is back" in caplog.text
    slow_rig.start_daemon(host)
    assert remove_containers(hosts_of(launch_of(run_dir)), run_dir.name, run_dir) == {}
    assert_nothing_is_left(slow_rig)
