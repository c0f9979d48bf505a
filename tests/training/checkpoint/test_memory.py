"""Copies in the memory of hosts: a run goes on from them to the bit, from the neighbour's where a host is lost."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import nccl_like
from tests.support.layouts import LAYOUTS
from tests.support.ranks import BACKEND, Ranks, losses, result, weight_hashes
from tests.support.tiny_shards import MakeRun
from training.records.checkpoint import finished_checkpoints
from training.records.memory_checkpoint import MEMORY_RECORD, MemoryRecord, RankShare, newest_step
from training.records.plan import RunPlan
from training.tracking.rows import read_rows

pytestmark = pytest.mark.slow

STEPS, EVERY, ON_DISK = 40, 4, 15
DEADLINE_S = 100
OWN = {"topk": (2, {"parallel__strategy": "ddp", "parallel__compression": "topk"})}


@pytest.fixture(scope="module")
def memory_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shardline-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(
    scope="module",
    params=[
        "ddp 4",
        pytest.param("fsdp", marks=pytest.mark.long),
        pytest.param("zero1", marks=pytest.mark.long),
        pytest.param("zero3", marks=pytest.mark.long),
        pytest.param("topk", marks=pytest.mark.long),
        pytest.param("tp x pp", marks=pytest.mark.long),
        pytest.param("hsdp 4", marks=pytest.mark.long),
        pytest.param("unlike", marks=pytest.mark.long),
    ],
)
def make(request: pytest.FixtureRequest, make_run: MakeRun, memory_dir: Path) -> Callable[..., tuple[Path, list[str]]]:
    """make("name") -> a plan, and each rank's host: half of the ranks, or one more, are on a, the others on b."""
    ranks, layout = (LAYOUTS | OWN)[request.param]

    def make_named(name: str, **overrides: object) -> tuple[Path, list[str]]:
        settings = {
            "model__layers": 4 if "parallel__stages" in layout else 2,
            "train__steps": STEPS,
            "train__micro_batch": 2 if layout.get("parallel__pp", 1) == 1 else 1,
            "checkpoint__every_steps": ON_DISK,
            "checkpoint__memory_every_steps": EVERY,
            "checkpoint__memory_dir": str(memory_dir),
        }
        plan_path = make_run(f"{request.param} {name}".replace(" ", "-"), ranks=ranks, **settings | layout | overrides)
        return plan_path, ["a"] * (ranks - ranks // 2) + ["b"] * (ranks // 2)

    return make_named


@pytest.fixture(scope="module")
def undisturbed(make: Callable[..., tuple[Path, list[str]]]) -> Path:
    plan_path, _ = make("undisturbed", checkpoint__memory_every_steps=0)
    Ranks(plan_path).finish()
    return plan_path


def kill(plan_path: Path, hosts: list[str], *, at_step: int) -> MemoryRecord:
    """Train, and kill all ranks once `at_step` is logged: the copy that is to be used then."""
    ranks = train_until(plan_path, hosts, at_step=at_step)
    ranks.signal(signal.SIGKILL)
    assert set(ranks.wait()) == {-signal.SIGKILL}
    record = MemoryRecord.read(plan_path.parent / MEMORY_RECORD)
    assert newest_on_disk(plan_path) < record.step == newest_step(plan_path.parent)
    assert max(losses(plan_path)) - record.step <= EVERY
    return record


def train_until(plan_path: Path, hosts: list[str], *, at_step: int) -> Ranks:
    """Ranks that have just logged this step, in this attempt."""
    metrics, began_ms, deadline = plan_path.parent / "metrics.jsonl", time.time() * 1000, time.monotonic() + DEADLINE_S
    ranks = Ranks(plan_path, hosts=hosts)
    while not metrics.exists() or not any(
        row["step"] == at_step and row["time_ms"] > began_ms for row in read_rows(metrics)
    ):
        assert time.monotonic() < deadline, ranks.log()
        assert all(process.is_alive() for process in ranks.processes), ranks.log()
        time.sleep(0.002)
    return ranks


def newest_on_disk(plan_path: Path) -> int:
    return max((int(folder.name) for folder in finished_checkpoints(plan_path.parent)), default=0)


def memory_of(plan_path: Path) -> Path:
    plan = RunPlan.read(plan_path)
    return Path(plan.config.checkpoint.memory_dir) / plan.run_id


def go_on(plan_path: Path, hosts: list[str]) -> str:
    """Train to the end; what the ranks log."""
    ranks = Ranks(plan_path, hosts=hosts)
    before = ranks.log_path.stat().st_size if ranks.log_path.exists() else 0
    ranks.finish()
    return ranks.log()[before:]


def assert_equal_to_the_bit(plan_path: Path, undisturbed: Path) -> None:
    assert losses(plan_path) == losses(undisturbed)
    assert weight_hashes(plan_path, STEPS) == weight_hashes(undisturbed, STEPS)
    assert result(plan_path).loss == losses(undisturbed)[STEPS]
    rows = [row["step"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "loss" in row]
    assert rows == sorted(set(rows)), "each step is logged once"


@pytest.mark.parametrize(
    "lost", [pytest.param("none", marks=pytest.mark.long), "a", pytest.param("b", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_from_memory_to_the_bit(
    lost: str, make: Callable[..., tuple[Path, list[str]]], undisturbed: Path
) -> None:
    plan_path, hosts = make(f"lost {lost}")
    copy = kill(plan_path, hosts, at_step=random.choice([*range(8, 14), *range(20, 29)]))
    shutil.rmtree(memory_of(plan_path) / lost, ignore_errors=True)
    log = go_on(plan_path, hosts)
    assert f"continuing after step {copy.step} from the hosts' memory: the newest checkpoint on disk is of step" in log
    assert_equal_to_the_bit(plan_path, undisturbed)
    used = [row for row in read_rows(plan_path.parent / "metrics.jsonl") if "resumed_from_memory" in row]
    assert [(row["step"], row["resumed_from_memory"]) for row in used] == [(copy.step, 1.0)]
    assert not memory_of(plan_path).exists(), "nothing stays in memory when the run is done"
    assert not (plan_path.parent / MEMORY_RECORD).exists()


def lose_both(plan_path: Path, copy: MemoryRecord) -> str:
    shutil.rmtree(memory_of(plan_path))
    return "nothing of it is left on a, b"


def lose_rank(plan_path: Path, copy: MemoryRecord) -> str:
    """The first rank's copies on both hosts: one is gone, the other has another byte."""
    (memory_of(plan_path) / "a" / copy.name / "rank-0.json").unlink()
    folder = memory_of(plan_path) / "b" / copy.name
    name = next(name for name in RankShare.read(folder / "rank-0.json").files if name.startswith("optimizer"))
    with (folder / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    return "the files of ranks 0 are on none of a, b"


@pytest.mark.parametrize("lose", [pytest.param(lose_both, marks=pytest.mark.slow), lose_rank])
def test_without_a_whole_copy_it_goes_on_from_the_disk(
    lose: Callable[[Path, MemoryRecord], str], make: Callable[..., tuple[Path, list[str]]], undisturbed: Path
) -> None:
    plan_path, hosts = make(lose.__name__)
    copy = kill(plan_path, hosts, at_step=26)
    why = lose(plan_path, copy)
    log = go_on(plan_path, hosts)
    expected = f"the copy of step {copy.step} in the hosts' memory is not used ({why}): continuing after step {ON_DISK}"
    assert expected in log
    assert_equal_to_the_bit(plan_path, undisturbed)
    used = [row for row in read_rows(plan_path.parent / "metrics.jsonl") if "resumed_from_memory" in row]
    assert [(row["step"], row["resumed_from_memory"]) for row in used] == [(ON_DISK, 0.0)]


def test_a_copy_that_was_not_whole_when_the_run_died_is_not_used(
    make: Callable[..., tuple[Path, list[str]]], undisturbed: Path
) -> None:
    """Newer files lie there, as ranks leave them that die while they write: the record does not name them."""
    plan_path, hosts = make("half-written")
    copy = kill(plan_path, hosts, at_step=26)
    for host in ("a", "b"):
        folder = memory_of(plan_path) / host
        shutil.copytree(folder / copy.name, folder / f"{copy.step + EVERY:08d}-{copy.name[-8:]}", dirs_exist_ok=True)
    assert f"continuing after step {copy.step} from the hosts' memory" in go_on(plan_path, hosts)
    assert_equal_to_the_bit(plan_path, undisturbed)


def test_copies_of_a_past_that_was_given_up_are_not_used(
    make: Callable[..., tuple[Path, list[str]]], undisturbed: Path
) -> None:
    """Both hosts are lost, the run goes on from the disk and dies early; then they come back with what they had."""
    plan_path, hosts = make("given-up")
    kill(plan_path, hosts, at_step=28)
    memory_of(plan_path).rename(away := memory_of(plan_path).with_name("away"))
    assert kill(plan_path, hosts, at_step=20).step < 24
    shutil.copytree(away, memory_of(plan_path), dirs_exist_ok=True)
    record = MemoryRecord.read(plan_path.parent / MEMORY_RECORD)
    assert f"continuing after step {record.step} from the hosts' memory" in go_on(plan_path, hosts)
    assert_equal_to_the_bit(plan_path, undisturbed)
    shutil.rmtree(away)


def test_fewer_ranks_go_on_from_the_copies_of_more(make_run: MakeRun, memory_dir: Path) -> None:
    """A run of four ranks under fsdp loses a host, and goes on with two ranks under ddp on the other one."""
    settings: dict[str, Any] = {
        "train__steps": STEPS,
        "checkpoint__every_steps": STEPS,
        "checkpoint__memory_every_steps": EVERY,
    }
    settings |= {"checkpoint__memory_dir": str(memory_dir), "model__dropout": 0.0}
    plan_path = make_run("fewer", ranks=4, parallel__strategy="fsdp", **settings)
    copy = kill(plan_path, ["a", "a", "b", "b"], at_step=22)
    expected = {step: loss for step, loss in losses(plan_path).items() if step <= copy.step}
    shutil.rmtree(memory_of(plan_path) / "a")
    kept = RunPlan.read(plan_path)
    other = RunPlan.read(make_run("other", ranks=2, parallel__strategy="ddp", **settings))
    other.model_copy(update={"run_id": kept.run_id, "config": kept.config}).write(plan_path)
    assert f"continuing after step {copy.step} from the hosts' memory" in go_on(plan_path, ["b", "b"])
    after = losses(plan_path)
    assert {step: after[step] for step in expected} == expected
    assert list(after) == list(range(1, STEPS + 1))
    undisturbed = make_run("fewer-undisturbed", ranks=2, parallel__strategy="ddp", **settings)
    Ranks(undisturbed).finish()
    assert after[STEPS] == pytest.approx(losses(undisturbed)[STEPS], abs=1e-4)


def test_a_config_that_changed_makes_the_copies_useless(make: Callable[..., tuple[Path, list[str]]]) -> None:
    plan_path, hosts = make("changed")
    copy = kill(plan_path, hosts, at_step=22)
    plan = RunPlan.read(plan_path)
    train = plan.config.train.model_copy(update={"learning_rate": 1e-3})
    plan.model_copy(update={"config": plan.config.model_copy(update={"train": train})}).write(plan_path)
    why = "the run's config has changed since"
    assert f"the copy of step {copy.step} in the hosts' memory is not used ({why})" in go_on(plan_path, hosts)


@pytest.mark.parametrize("backend", ["", pytest.param(nccl_like.NAME, marks=pytest.mark.slow)])
def test_one_rank_that_dies_leaves_no_other_waiting_for_its_copy(
    backend: str, make: Callable[..., tuple[Path, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND, backend)
    plan_path, hosts = make(f"one-dies {backend}", train__steps=10_000, checkpoint__memory_every_steps=1)
    ranks = train_until(plan_path, hosts, at_step=20)
    os.kill(ranks.processes[-1].pid or 0, signal.SIGKILL)
    began = time.monotonic()
    codes = ranks.wait(end_others=False)
    assert all(codes)
    assert time.monotonic() - began < 20, "the timeout of a collective is 60 s"
    assert MemoryRecord.read(plan_path.parent / MEMORY_RECORD).step >= 19
    shutil.rmtree(memory_of(plan_path))


def test_memory_that_is_too_small_is_told_and_the_run_goes_on(
    make: Callable[..., tuple[Path, list[str]]], undisturbed: Path
) -> None:
    plan_path, hosts = make("full")
    ranks = Ranks(plan_path, program="tests.programs.full_memory", hosts=hosts)
    ranks.finish()
    warnings = re.findall(r"WARNING (no copy of step 4 in .*)", ranks.log())
    assert len(warnings) == 1, ranks.log()
    assert re.fullmatch(
        r"no copy of step 4 in the hosts' memory: b, rank [123]: OSError: \[Errno 28\] No space left on device; "
        r"[\d.]+ GiB are free in \S+; there is no earlier copy",
        warnings[0],
    )
    assert_equal_to_the_bit(plan_path, undisturbed)


def test_a_folder_that_ranks_cannot_write_is_refused_with_the_cure(make: Callable[..., tuple[Path, list[str]]]) -> None:
    plan_path, hosts = make("refused", checkpoint__memory_dir="/proc/sys/shardline")
    ranks = Ranks(plan_path, hosts=hosts)
    assert any(ranks.wait())
    assert "ValueError: checkpoint.memory_dir = /proc/sys/shardline cannot be used on a" in ranks.log()
    assert "or set checkpoint.memory_every_steps=0" in ranks.log()
