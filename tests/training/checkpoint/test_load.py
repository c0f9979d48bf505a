"""What is in a checkpoint; only whole ones are loaded, a damaged one is passed over for the one before it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.configs import read_plan
from tests.support.ranks import Ranks, losses, run_ranks
from tests.support.tiny_shards import MakeRun
from training.checkpoint.load import weights_for
from training.checkpoint.safetensors_files import TensorFiles
from training.models.language_model import build_model
from training.records.checkpoint import (
    CheckpointManifest,
    checkpoint_folder,
    damage,
    finished_checkpoints,
    newest_intact,
)
from training.records.plan import RunPlan
from training.records.record import sha256_config
from training.tracking.rows import read_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(make_run: MakeRun) -> Path:
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


def test_each_rank_writes_its_share_and_transformers_loads_the_whole(make_run: MakeRun) -> None:
    from transformers import AutoModelForCausalLM

    plan_path = make_run("two-ranks", ranks=2, train__steps=2, parallel__strategy="fsdp")
    run_ranks(plan_path)
    folder = checkpoint_folder(plan_path.parent, 2)
    manifest = CheckpointManifest.read(folder / "manifest.json")
    assert (manifest.step, manifest.strategy, manifest.world_size) == (2, "fsdp", 2)
    assert manifest.mesh == {"pp": 1, "dp": 2, "tp": 1}
    assert manifest.config_sha256 == sha256_config(RunPlan.read(plan_path).config)
    shards = [f"{kind}-0000{n}-of-00002.safetensors" for kind in ("model", "optimizer") for n in (1, 2)]
    others = ["rng-0.safetensors", "rng-1.safetensors", "config.json"]
    assert set(manifest.files) == {*shards, *others, *(f"{k}.safetensors.index.json" for k in ("model", "optimizer"))}
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "manifest.json"}
    shares = [sum(manifest.files[name].size_bytes for name in shards[rank::2]) for rank in (0, 1)]
    assert max(shares) < 1.2 * min(shares)
    weights, moments = TensorFiles(folder, "model"), TensorFiles(folder, "optimizer")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {name for name, _ in model.named_parameters()} == set(weights)
    for name, parameter in model.named_parameters():
        assert (parameter == weights[name]).all()
        assert moments[f"{name}.exp_avg"].shape == moments[f"{name}.exp_avg_sq"].shape == parameter.shape
    assert moments["step"] == 2
    assert moments.get("of a parameter that was frozen") is None


def test_the_manifest_has_the_loss_of_the_newest_validation(run_dir: Path) -> None:
    rows = read_rows(run_dir / "metrics.jsonl")
    measured = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    assert list(measured) == [4, 8]
    folders = [checkpoint_folder(run_dir, step) for step in (6, 8)]
    recorded = [CheckpointManifest.read(folder / "manifest.json").val_loss for folder in folders]
    assert recorded == [measured[4], measured[8]]


def test_another_models_checkpoint_is_refused_with_the_weights_name(run_dir: Path) -> None:
    plan = read_plan(run_dir)
    wider = plan.shape.model_copy(update={"mlp_width": 2 * plan.shape.mlp_width})
    with pytest.raises(ValueError, match=r"checkpoint .*mlp.gate_proj.weight is \[128, 32\] instead of \[256, 32\]"):
        weights_for(build_model(plan.model_copy(update={"shape": wider})), run_dir / "checkpoints" / "00000008")


def cut(path: Path) -> None:
    path.write_bytes((content := path.read_bytes())[: len(content) // 2])


def put(path: Path, before: bytes, after: bytes) -> None:
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a file cut short": lambda folder: cut(folder / "optimizer.safetensors"),
    "a bit flipped": lambda folder: (folder / "model.safetensors").write_bytes(
        (content := (folder / "model.safetensors").read_bytes())[:-1] + bytes([content[-1] ^ 1])
    ),
    "a file lost": lambda folder: (folder / "rng-0.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: cut(folder / "manifest.json"),
    "another step in the manifest": lambda folder: put(folder / "manifest.json", b'"step": 8', b'"step": 9'),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    kind: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run_dir / "checkpoints" / "00000008"
    DAMAGES[kind](newest)
    assert damage(newest) is not None
    found = newest_intact(finished_checkpoints(run_dir))
    assert found is not None
    assert found.name == "00000006"
    assert f"{newest} is not whole" in caplog.text


def test_ranks_share_the_hashing_and_all_pass_over_what_one_of_them_finds(make_run: MakeRun) -> None:
    plan_path = make_run("shared", ranks=2, train__steps=4, checkpoint__every_steps=2, parallel__strategy="fsdp")
    run_ranks(plan_path)
    newest, expected = checkpoint_folder(plan_path.parent, 4), losses(plan_path)
    damaged = newest / "model-00002-of-00002.safetensors"
    damaged.write_bytes((content := damaged.read_bytes())[:-1] + bytes([content[-1] ^ 1]))
    found = [damage(newest, part=part, of_parts=2) for part in (0, 1)]
    assert sorted(fault or "" for fault in found) == ["", f"{damaged.name} has another sha256 than its manifest says"]
    resumed = Ranks(plan_path)
    resumed.finish()
    assert resumed.log().count(f"checkpoint {newest} is not whole ({damaged.name}") == 1
    assert losses(plan_path) == expected
    assert damage(newest) is None


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_start_at_step_0(run_dir: Path) -> None:
    for folder in (run_dir / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(RuntimeError, match=r"none of the 2 checkpoints .* is whole: restore one, or delete"):
        newest_intact(finished_checkpoints(run_dir))
    shutil.rmtree(run_dir / "checkpoints")
    assert newest_intact(finished_checkpoints(run_dir)) is None


def test_training_resumes_from_the_checkpoint_before_a_damaged_one_and_ends_the_same(run_dir: Path) -> None:
    expected = losses(run_dir / "plan.json")
    cut(run_dir / "checkpoints" / "00000008" / "model.safetensors")
    (run_dir / "checkpoints" / ".00000009.part").mkdir()
    run_ranks(run_dir / "plan.json")
    assert losses(run_dir / "plan.json") == expected
    assert damage(run_dir / "checkpoints" / "00000008") is None
