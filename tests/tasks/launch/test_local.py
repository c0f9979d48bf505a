"""What happens to the ranks of this machine happens to a run: its losses are those of one that nothing happened to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.launch import programs
from tasks.launch.programs import run_program
from tasks.launch.recovery import attempts_of
from tasks.runs.errors import RunFailed, RunStopped
from tasks.runs.owner import ranks_launcher
from tests.support.ranks import losses, rank_env, run_ranks
from tests.support.waiting import until
from training.records.plan import RunPlan
from training.records.train_result import TrainResult

pytestmark = pytest.mark.slow

STEPS, STRIKE_AT, EVERY = 120, 12, 5
SETTINGS: dict[str, Any] = {
    "train__steps": STEPS,
    "checkpoint__every_steps": EVERY,
    "evaluation__every_steps": 0,
    "launch__backoff_s": 0.1,
    "launch__lease_s": 600.0,  # so that nothing here ends by a lease that is stale
}
LAUNCHER = """
import sys
from pathlib import Path
from tasks.launch.programs import run_program
from training.records.plan import RunPlan
path = Path(sys.argv[1])
run_program("training.train", plan=RunPlan.read(path), run_dir=path.parent)
"""


@pytest.fixture(autouse=True)
def no_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def undisturbed(make_run: Callable[..., Path]) -> Callable[[int], dict[int, float]]:
    """Losses by step of the run on so many ranks."""
    known: dict[int, dict[int, float]] = {}

    def curve(ranks: int) -> dict[int, float]:
        if ranks not in known:
            path = make_run(f"undisturbed-{ranks}", ranks=ranks, **SETTINGS)
            run_ranks(path)
            known[ranks] = losses(path)
        return known[ranks]

    return curve


@pytest.fixture
def path(make_run: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    """plan.json of a run on two ranks."""
    return make_run(request.node.name, ranks=2, **SETTINGS)


def train(path: Path, strike: Callable[[], object], *, at: int = STRIKE_AT) -> None:
    """Run it, and `strike` once when the step `at` is made."""
    waiting: Iterator[Callable[[], object]] = iter([strike])

    def look(row: dict[str, float]) -> None:
        if row.get("step", 0) >= at:
            for action in waiting:
                action()

    programs.train(RunPlan.read(path), run_dir=path.parent, on_row=look)


def ranks_of(path: Path) -> list[psutil.Process]:
    node = ranks_launcher(path.parent)
    assert node is not None
    named = {process.name(): process for process in node.children(recursive=True)}
    return [named[name] for name in sorted(named) if name.startswith("rank ")]


def endings(path: Path) -> list[str]:
    return [attempt["ending"]["cause"] for attempt in attempts_of(path.parent)]


def assert_nothing_is_left(path: Path) -> None:
    alive = [process for process in psutil.process_iter() if any(str(path.parent) in word for word in _words(process))]
    assert alive == []
    assert not [process for process in psutil.Process().children(recursive=True) if process.name().startswith("rank ")]
    assert not list(path.parent.glob("attempts/*/lease"))


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    path: Path, undisturbed: Callable[[int], dict[int, float]]
) -> None:
    train(path, lambda: ranks_of(path)[1].kill())
    first, second = attempts_of(path.parent)
    assert (first["ending"]["cause"], first["ending"]["detail"]) == ("killed", "rank 1 was killed (SIGKILL)")
    assert second["from_step"] > 0
    assert second["from_step"] % EVERY == 0
    assert losses(path) == undisturbed(2)
    assert_nothing_is_left(path)


@pytest.mark.parametrize("victim", ["rank", "node"])
def test_a_standby_takes_over_with_the_same_losses(
    make_run: Callable[..., Path], undisturbed: Callable[[int], dict[int, float]], victim: str
) -> None:
    path = make_run(f"standby-{victim}", ranks=2, **SETTINGS, launch__standby_after_s=0.0)

    def strike() -> None:
        until((path.parent / "attempts" / "standby" / f"{RunPlan.read(path).hosts[0]}.ready").exists, "the standby")
        node = ranks_launcher(path.parent)
        assert node is not None
        (ranks_of(path)[1] if victim == "rank" else node).kill()

    train(path, strike)
    first, second = attempts_of(path.parent)
    assert (first["ending"]["cause"], first["stood_by"]) == ("killed", [])
    assert (second["ending"]["cause"], second["stood_by"]) == ("done", [*second["hosts"]])
    assert losses(path) == undisturbed(2)
    assert_nothing_is_left(path)


def test_one_rank_alone_is_started_again_too(
    make_run: Callable[..., Path], undisturbed: Callable[[int], dict[int, float]]
) -> None:
    path = make_run("alone", ranks=1, **SETTINGS)
    train(path, lambda: ranks_of(path)[0].kill())
    assert endings(path) == ["killed", "done"]
    assert losses(path) == undisturbed(1)
    assert_nothing_is_left(path)


def test_a_rank_that_hangs_is_found_by_the_others_patience(
    make_run: Callable[..., Path], undisturbed: Callable[[int], dict[int, float]]
) -> None:
    path = make_run("hangs", ranks=2, **SETTINGS, parallel__timeout_s=10)
    train(path, lambda: ranks_of(path)[1].suspend())
    assert endings(path)[0] == "timeout"
    assert endings(path)[-1] == "done"
    assert losses(path) == undisturbed(2)
    assert_nothing_is_left(path)


def test_ranks_whose_node_was_killed_are_ended_before_the_next_attempt(
    path: Path, undisturbed: Callable[[int], dict[int, float]]
) -> None:
    def strike() -> None:
        node = ranks_launcher(path.parent)
        assert node is not None
        node.kill()

    train(path, strike)
    assert endings(path) == ["killed", "done"]
    assert losses(path) == undisturbed(2)
    assert_nothing_is_left(path)


def test_attempts_without_a_new_checkpoint_come_to_an_end(make_run: Callable[..., Path]) -> None:
    path = make_run("limit", ranks=2, **SETTINGS | {"checkpoint__every_steps": 1000}, launch__attempts=1)
    with pytest.raises(RunFailed, match=r"killed \(.*rank 1 was killed.*1 attempts without a new checkpoint") as failed:
        train(path, lambda: ranks_of(path)[1].kill())
    assert failed.value.cause == "killed"
    assert endings(path) == ["killed"]
    assert_nothing_is_left(path)


def test_what_another_attempt_would_not_mend_is_not_tried_again(make_run: Callable[..., Path]) -> None:
    path = make_run("no-shards", ranks=2, **SETTINGS)
    plan = RunPlan.read(path).model_copy(update={"shards_dir": str(path.parent / "none")})
    plan.write(path)
    with pytest.raises(RunFailed, match="another attempt would end the same way") as failed:
        train(path, lambda: None)
    assert "none" in str(failed.value), "the file that is missing"
    assert endings(path) == [failed.value.cause]


def test_an_interruption_leaves_a_checkpoint_and_a_second_start_goes_on(
    path: Path, undisturbed: Callable[[int], dict[int, float]]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(RunStopped, match=r"interrupted: `shardline resume .*` goes on"):
        train(path, interrupt)
    assert_nothing_is_left(path)
    assert TrainResult.read(path.parent / "result.json").step >= STRIKE_AT
    train(path, lambda: None)
    assert losses(path) == undisturbed(2)
    assert endings(path) == ["stopped", "done"]


def test_a_signal_to_the_ranks_is_the_users_order_to_stop(path: Path) -> None:
    with pytest.raises(RunStopped, match="training was stopped at step"):
        train(path, lambda: [rank.send_signal(signal.SIGTERM) for rank in ranks_of(path)])
    assert_nothing_is_left(path)


def test_ranks_end_with_their_launcher_and_the_next_start_goes_on(
    path: Path, undisturbed: Callable[[int], dict[int, float]]
) -> None:
    """Though the lease would hold for ten minutes yet."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(path)], env=rank_env() | dict(os.environ))
    until(lambda: STRIKE_AT in losses(path), "the step at which it is killed")
    launcher.kill()
    launcher.wait()
    end = path.parent / "attempts" / "1" / f"{RunPlan.read(path).hosts[0]}.end.json"
    until(end.exists, "the end of its node")
    assert '"launcher ended"' in end.read_text()
    run_program("training.train", plan=RunPlan.read(path), run_dir=path.parent)
    assert losses(path) == undisturbed(2)
    assert_nothing_is_left(path)
