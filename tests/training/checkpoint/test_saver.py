"""Training goes on while a checkpoint is written; a disk that fails is reported, tried again, and then fatal."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.programs.full_disk import FULL_AT_BYTES, RoomAfterWarning, set_room
from tests.support.ranks import Ranks, losses, run_ranks
from tests.support.tiny_shards import MakeRun
from training.checkpoint.safetensors_files import TensorFiles
from training.checkpoint.saver import Saver
from training.records.checkpoint import checkpoint_folder, damage, finished_checkpoints, newest_intact
from training.records.plan import RunPlan
from training.runtime.errors import NonFiniteLoss
from training.runtime.process import process_group
from training.strategies.torch_strategy import TorchStrategy
from training.tracking.rows import read_rows
from training.trainer.state import TrainingState, restore


@pytest.fixture
def start(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainingState]]:
    """start("name", train__steps=20): a run in this process, on one rank, at step 0."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # set by `process_group`
        monkeypatch.setenv(name, {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}.get(name, "0"))
    with contextlib.ExitStack() as stack:

        def restored(name: str, **overrides: object) -> TrainingState:
            plan_path = make_run(name, parallel__strategy="single", **overrides)
            plan = RunPlan.read(plan_path)
            rank = stack.enter_context(process_group(plan))
            return restore(plan, rank=rank, run_dir=plan_path.parent)

        yield restored


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 32 KiB; a checkpoint has 300.

    No fixture: pytest writes its dots before those end, to what may be a file as well.
    """
    set_room(FULL_AT_BYTES)
    try:
        yield
    finally:
        set_room(resource.RLIM_INFINITY)


@pytest.fixture
def room_after_warning() -> Iterator[None]:
    handler, log = RoomAfterWarning(), logging.getLogger("training.checkpoint.saver")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


def saver_of(state: TrainingState) -> Saver:
    return Saver(
        state.run_dir,
        plan=state.plan,
        strategy=state.strategy,
        model=state.model,
        rank=state.rank,
        micro_batches=state.micro_batches,
        spikes=state.spikes,
    )


def take_steps(state: TrainingState, numbers: range, *, saver: Saver) -> None:
    for number in numbers:
        state.strategy.step(state.loader.share(number - 1), learning_rate=1e-2)
        saver.advance()


def save_first_step(state: TrainingState, *, then: Exception | None = None) -> None:
    with saver_of(state) as saver:
        take_steps(state, range(1, 2), saver=saver)
        saver.save(1, tokens=128, val_loss=None)
        if then is not None:
            raise then


def weights(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: parts.own.clone() for name, parts in state.strategy.weights()}


def leftovers(run_dir: Path) -> list[str]:
    return [path.name for path in (run_dir / "checkpoints").glob(".*")]


def writing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint-")]


def assert_left(state: TrainingState, number: int) -> None:
    """So many whole checkpoints, no half of one, and no thread that writes."""
    assert [damage(folder) for folder in finished_checkpoints(state.run_dir)] == [None] * number
    assert leftovers(state.run_dir) == []
    assert writing_threads() == []


@full_disk()
def test_training_goes_on_while_the_checkpoint_keeps_the_step_it_was_taken_at(
    start: Callable[..., TrainingState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.checkpoint.writer.RETRY_AFTER_S", 3)  # the disk has room again before the next try
    state = start("goes-on")
    with saver_of(state) as saver:
        take_steps(state, range(1, 4), saver=saver)
        expected = weights(state)
        saver.save(3, tokens=384, val_loss=None)
        take_steps(state, range(4, 9), saver=saver)
        assert finished_checkpoints(state.run_dir) == [], "nothing can have been written while training went on"
        set_room(resource.RLIM_INFINITY)
    folder = checkpoint_folder(state.run_dir, 3)
    assert finished_checkpoints(state.run_dir) == [folder]
    assert damage(folder) is None
    saved, now = TensorFiles(folder, "model"), weights(state)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert not any(torch.equal(saved[name], now[name]) for name in saved if saved[name].dim() > 1)
    assert TensorFiles(folder, "optimizer")["step"] == 3


@pytest.mark.usefixtures("room_after_warning")
@full_disk()
def test_a_failed_write_is_reported_and_tried_again(
    start: Callable[..., TrainingState], caplog: pytest.LogCaptureFixture
) -> None:
    state = start("retried")
    save_first_step(state)
    assert finished_checkpoints(state.run_dir) == [checkpoint_folder(state.run_dir, 1)]
    part = state.run_dir / "checkpoints" / ".00000001.part" / "model.safetensors"
    assert f"checkpoint of step 1: rank 0 could not write {part} (OSError: [Errno 27] File too large" in caplog.text
    assert f"GiB are free in {state.run_dir}), try 1 of 3" in caplog.text
    assert leftovers(state.run_dir) == []


@full_disk()
def test_the_run_fails_after_three_tries_and_cleans_up(start: Callable[..., TrainingState]) -> None:
    state = start("fails")
    with pytest.raises(RuntimeError, match=r"rank 0 could not write .* try 3 of 3: free space or repair the disk"):
        save_first_step(state)
    assert_left(state, 0)


@pytest.mark.usefixtures("room_after_warning")
@full_disk()
def test_the_next_checkpoint_waits_for_the_one_before_it_and_takes_no_more_memory(
    start: Callable[..., TrainingState], caplog: pytest.LogCaptureFixture
) -> None:
    state = start("waits")
    caplog.set_level(logging.INFO)
    with saver_of(state) as saver:
        take_steps(state, range(1, 2), saver=saver)
        saver.save(1, tokens=128, val_loss=None)
        assert saver.writer is not None
        first = {name: tensor.data_ptr() for name, tensor in saver.writer.files["optimizer.safetensors"].items()}
        take_steps(state, range(2, 3), saver=saver)
        stalled_s = saver.save(2, tokens=256, val_loss=None)
        second = {name: tensor.data_ptr() for name, tensor in saver.writer.files["optimizer.safetensors"].items()}
    assert first == second
    assert "step 2: waited " in caplog.text
    assert "for the checkpoint of step 1: its disk is slower than checkpoint.every_steps = 3 steps" in caplog.text
    assert stalled_s > 0.5, "the first was tried again after a second"
    assert [damage(folder) for folder in finished_checkpoints(state.run_dir)] == [None, None]


@full_disk()
def test_an_error_in_the_loop_leaves_no_thread_and_no_half_written_folder(start: Callable[..., TrainingState]) -> None:
    state = start("error")
    with pytest.raises(ZeroDivisionError):
        save_first_step(state, then=ZeroDivisionError())
    assert_left(state, 0)


@pytest.mark.usefixtures("room_after_warning")
@full_disk()
def test_a_lost_loss_still_gets_the_checkpoint_from_before_it(start: Callable[..., TrainingState]) -> None:
    state = start("lost")
    with pytest.raises(NonFiniteLoss):
        save_first_step(state, then=NonFiniteLoss())
    assert_left(state, 1)


def on_full_disk(plan_path: Path, kind: str) -> Ranks:
    (plan_path.parent / "disk").write_text(kind)
    return Ranks(plan_path, program="tests.programs.full_disk")


@pytest.mark.slow
def test_two_ranks_survive_a_disk_that_is_full_for_a_while_on_one_of_them(make_run: MakeRun) -> None:
    plan_path = make_run("two-ranks-for-a-while", ranks=2, train__steps=30, checkpoint__every_steps=10)
    ranks = on_full_disk(plan_path, "until-reported")
    ranks.finish()
    assert ranks.log().count("WARNING checkpoint of step 10: rank 1 could not write") == 2, "each rank says it once"
    assert [damage(folder) for folder in finished_checkpoints(plan_path.parent)] == [None, None]
    assert (plan_path.parent / "result.json").exists()
    stalls = [row for row in read_rows(plan_path.parent / "metrics.jsonl") if "checkpoint_stall_ms" in row]
    assert [row["step"] for row in stalls] == [10, 20, 30]


@pytest.mark.slow
def test_two_ranks_fail_alike_when_the_disk_of_one_stays_full(make_run: MakeRun) -> None:
    plan_path = make_run("two-ranks-for-good", ranks=2)
    ranks = on_full_disk(plan_path, "for-good")
    assert ranks.wait() == [1, 1]
    ends = [line for line in ranks.log().splitlines() if line.startswith("RuntimeError: checkpoint of step 3: rank 1")]
    assert len(ends) == 2
    assert all("try 3 of 3: free space or repair the disk, then start the run again" in line for line in ends)
    assert not (plan_path.parent / "result.json").exists()
    assert leftovers(plan_path.parent) == []


def test_a_rank_killed_in_the_middle_of_a_write_leaves_the_checkpoint_before(
    start: Callable[..., TrainingState], make_run: MakeRun
) -> None:
    state = start("killed")
    with saver_of(state) as saver:
        take_steps(state, range(1, 4), saver=saver)
        saver.save(3, tokens=384, val_loss=None)
    plan_path, before = make_run("killed", ranks=2), checkpoint_folder(state.run_dir, 3)
    assert on_full_disk(plan_path, "dies").wait()[0] == -signal.SIGXFSZ
    half_written = state.run_dir / "checkpoints" / ".00000006.part" / "model-00001-of-00002.safetensors"
    assert half_written.stat().st_size == FULL_AT_BYTES
    assert finished_checkpoints(state.run_dir) == [before]
    assert newest_intact(finished_checkpoints(state.run_dir)) == before
    run_ranks(plan_path)
    assert min(losses(plan_path)) == 4
    assert leftovers(state.run_dir) == []
    assert [folder.name for folder in finished_checkpoints(state.run_dir)] == ["00000006", "00000008"]


def test_a_checkpoint_that_would_lack_a_tensor_is_refused_before_the_first_step(
    start: Callable[..., TrainingState],
) -> None:
    state = start("forgetful")
    assert isinstance(state.strategy, TorchStrategy)
    del state.strategy.parameters_by_name["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ValueError, match=r"a checkpoint of these ranks .* lacks model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        saver_of(state)
