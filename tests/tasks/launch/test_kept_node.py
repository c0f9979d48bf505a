"""One process imports for all programs of a run: what its ranks make, and what becomes of the run when it is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tasks.launch import programs
from tasks.launch.local import imports_ahead, kept_node, wait_for_imports
from tasks.launch.recovery import attempts_of
from tests.support.backends import Local, nodes_of, ranks_of
from tests.support.configs import read_plan
from tests.support.launched_runs import causes, curve
from tests.support.ranks import losses, run_ranks
from tests.support.waiting import until
from training.records.results import EvalReport

pytestmark = pytest.mark.slow

SETTINGS = {"train__steps": 4, "checkpoint__every_steps": 2, "evaluation__every_steps": 4, "train__global_batch": 8}


@pytest.fixture
def run_dir(embedded_home: Path, tiny_shards: Path) -> Path:
    return Local(embedded_home, tiny_shards).make("warm", **SETTINGS, export__onnx_up_to_gib=0)


@pytest.fixture
def expected(run_dir: Path) -> dict[int, float]:
    """The losses of plain ranks, each of which has made its own imports."""
    alone = run_dir.with_name("alone")
    alone.mkdir()
    read_plan(run_dir).write(alone / "plan.json")
    run_ranks(alone / "plan.json")
    return losses(alone / "plan.json")


def train(run_dir: Path) -> None:
    programs.train(read_plan(run_dir), run_dir=run_dir, on_row=lambda row: None)


def evaluate(run_dir: Path) -> None:
    programs.evaluate(read_plan(run_dir), run_dir=run_dir)


def export(run_dir: Path) -> None:
    programs.export(read_plan(run_dir), run_dir=run_dir)


def fork_server(run_dir: Path) -> psutil.Process:
    """The process that has imported."""
    family = {process for node in nodes_of(run_dir) for process in (node, *node.children())}
    (server,) = (process for process in family if "training.node.fork_server" in process.cmdline())
    return server


def kill_while_it_waits(run_dir: Path) -> None:
    server = fork_server(run_dir)
    node = server.parent()
    assert node is not None
    server.kill()
    psutil.wait_procs([node], timeout=10)


@contextmanager
def killed_once_it_has_ranks(run_dir: Path) -> Iterator[None]:
    def kill() -> None:
        until(lambda: ranks_of(run_dir), "ranks")
        fork_server(run_dir).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


def test_later_programs_are_forked_from_the_first_ones_imports(run_dir: Path, expected: dict[int, float]) -> None:
    with kept_node(run_dir):
        train(run_dir)
        server = fork_server(run_dir)
        evaluate(run_dir)
        export(run_dir)
        assert fork_server(run_dir) == server
    assert not server.is_running()
    assert not nodes_of(run_dir)
    assert [len(attempt["stood_by"]) for attempt in attempts_of(run_dir)] == [0, 1, 1]
    assert curve(run_dir) == expected
    logs = {path.name: path.read_text() for path in (run_dir / "logs").glob("*.log")}
    assert set(logs) == {"train.log", "evaluate.log", "export.log"}
    assert "exported step 4" in logs["export.log"]
    assert "exported step 4" not in logs["train.log"] + logs["evaluate.log"]


@contextmanager
def imported_ahead(run_dir: Path) -> Iterator[None]:
    plan = read_plan(run_dir)
    task = imports_ahead(
        "training.train",
        plan.config.launch,
        host=plan.hosts[0],
        threads=plan.threads_per_rank,
        device_kind="cpu",
        mlflow_run_id=plan.mlflow_run_id,
    )
    with kept_node(run_dir, task):
        wait_for_imports(run_dir)
        yield


def test_imports_that_began_before_the_plan_are_the_first_programs(run_dir: Path, expected: dict[int, float]) -> None:
    with imported_ahead(run_dir):
        train(run_dir)
    assert [len(attempt["stood_by"]) for attempt in attempts_of(run_dir)] == [1]
    assert curve(run_dir) == expected
    assert not nodes_of(run_dir)


def test_the_run_goes_on_when_the_process_of_the_imports_is_killed(run_dir: Path, expected: dict[int, float]) -> None:
    with kept_node(run_dir):
        for program in (train, evaluate, export):
            with killed_once_it_has_ranks(run_dir):
                program(run_dir)
    assert causes(run_dir) == ["killed", "done"] * 3
    assert curve(run_dir) == expected
    assert EvalReport.read(run_dir / "eval.json").step == 4
    assert not nodes_of(run_dir)


def test_a_process_that_waits_is_not_used_once_killed_or_for_another_environment_and_it_is_said(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    with imported_ahead(run_dir):
        kill_while_it_waits(run_dir)
        train(run_dir)
        kill_while_it_waits(run_dir)
        evaluate(run_dir)
        monkeypatch.setenv("NCCL_DEBUG", "INFO")
        export(run_dir)
    assert causes(run_dir) == ["done"] * 3
    assert [attempt["stood_by"] for attempt in attempts_of(run_dir)] == [[]] * 3
    for program in ("training.train", "training.evaluate"):
        assert f"{program} starts in a new process: the one that waited for it has ended" in caplog.text
    assert "training.export starts in a new process: its environment is another" in caplog.text
