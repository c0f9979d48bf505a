"""Only whole checkpoints are loaded; a damaged one is passed over, with a message, for the one before it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import losses, run_ranks
from training.checkpoint import damage, newest_whole
from training.records import RunPlan


@pytest.fixture(scope="module")
def trained(make_run: Callable[..., Path]) -> Path:
    """A run of 8 steps with checkpoints every 3, of which the last 2 are kept."""
    plan_path = make_run("trained")
    run_ranks(plan_path)
    return plan_path.parent


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_last_two_are_kept_and_nothing_half_written_is_left(run_dir: Path) -> None:
    assert names(run_dir) == ["00000006", "00000008"]


def test_a_checkpoint_is_a_folder_that_transformers_loads(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = run_dir / "checkpoints" / "00000008"
    model = AutoModelForCausalLM.from_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert (parameter == saved[name]).all()


def cut(path: Path) -> None:
    path.write_bytes((content := path.read_bytes())[: len(content) // 2])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a file cut short": lambda folder: cut(folder / "optimizer.safetensors"),
    "a bit flipped": lambda folder: (folder / "model.safetensors").write_bytes(
        (content := (folder / "model.safetensors").read_bytes())[:-1] + bytes([content[-1] ^ 1])
    ),
    "a file lost": lambda folder: (folder / "rng-0.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: cut(folder / "manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    kind: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run_dir / "checkpoints" / "00000008"
    DAMAGES[kind](newest)
    assert damage(newest) is not None
    found = newest_whole(run_dir)
    assert found is not None
    assert found.name == "00000006"
    assert f"{newest} is not whole" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_begin_anew(run_dir: Path) -> None:
    for folder in (run_dir / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(RuntimeError, match=r"none of the 2 checkpoints .* is whole: restore one, or delete"):
        newest_whole(run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    assert newest_whole(run_dir) is None


def test_training_goes_on_from_the_one_before_the_damaged_one_and_ends_the_same(run_dir: Path) -> None:
    expected = losses(run_dir / "plan.json")
    cut(run_dir / "checkpoints" / "00000008" / "model.safetensors")
    (run_dir / "checkpoints" / ".00000009.part").mkdir()
    run_ranks(run_dir / "plan.json")
    assert losses(run_dir / "plan.json") == expected
    assert damage(run_dir / "checkpoints" / "00000008") is None


def test_another_strategy_and_world_size_take_the_checkpoint_over(run_dir: Path) -> None:
    """Saved by one process; loaded by ZeRO-2 on two ranks. Dropout differs, so only the first loss is close."""
    plan = RunPlan.read(run_dir / "plan.json")
    expected = losses(run_dir / "plan.json")
    shutil.rmtree(run_dir / "checkpoints" / "00000008")
    parallel = plan.config.parallel.model_copy(update={"strategy": "zero2", "ranks": 2})
    config = plan.config.model_copy(update={"parallel": parallel})
    two_ranks = {"config": config, "mesh": {"dp": 2}, "ranks_per_host": (2,), "accumulation": 2}
    plan.model_copy(update=two_ranks).write(run_dir / "plan.json")
    run_ranks(run_dir / "plan.json")
    got = losses(run_dir / "plan.json")
    assert got.keys() == expected.keys()
    assert all(got[step] == expected[step] for step in range(1, 7)), "rows up to the checkpoint stay as they were"
    assert abs(got[7] - expected[7]) < 0.05
