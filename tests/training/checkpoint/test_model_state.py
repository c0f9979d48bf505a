"""What is saved, resumed, evaluated and exported is the model's whole state: parameters and persistent buffers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.buffered_models import buffers_in, save_family
from tests.support.layouts import LAYOUTS
from tests.support.plain_torch import by_hand
from tests.support.ranks import losses, run_ranks
from tests.support.tiny_shards import VOCAB, MakeRun
from training.checkpoint.load import weights_for
from training.checkpoint.safetensors_files import TensorFiles
from training.export import export_run
from training.models.language_model import build_model
from training.models.pretrained import auto_class_of, load_pretrained
from training.records.checkpoint import CheckpointManifest, WrittenFile, checkpoint_folder
from training.records.model_state import listed, saved_shapes
from training.records.plan import RunPlan
from training.records.record import sha256_file
from training.records.results import EvalReport
from training.tracking.rows import read_rows

STEPS = 4
SLOW = ("fsdp", "zero2", "sp", "pp interleaved", "tp x pp", "unlike", "fsdp x pp", "zero1 x pp", "local-sgd")
RESUMED = ("ddp", "fsdp", "zero2", "zero3", "tp", "pp")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's model with random weights; made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        return root / family if (root / family).exists() else save_family(root / family, family, vocab_size=VOCAB)

    return folder


@pytest.fixture(scope="module")
def trained(make_run: MakeRun, folder_of: Callable[[str], Path]) -> Callable[..., Path]:
    """Return the plan of a run that has trained a family under a layout; made once."""
    made: dict[str, Path] = {}

    def run(family: str, layout: str = "single") -> Path:
        name = f"{family} {layout}"
        if name not in made:
            ranks, parallel = LAYOUTS.get(layout, (1, {"parallel__strategy": "single"}))
            made[name] = make_run(
                name,
                ranks=ranks,
                **{"model__architecture": "path", "model__path": str(folder_of(family)), "model__init": "pretrained"},
                **{"model__dropout": 0.0, "train__steps": STEPS, "train__micro_batch": 1, "checkpoint__every_steps": 2},
                **{"evaluation__every_steps": STEPS, "evaluation__quick_sequences": 1000, "export__onnx_up_to_gib": 0},
                **parallel,
            )
            run_ranks(made[name], program=program_of(family))
        return made[name]

    return run


def program_of(family: str) -> str:
    return "tests.programs.buffered_llama" if family == "llama with buffers" else "training.train"


def held_out_loss(plan_path: Path, folder: Path) -> float:
    """The mean loss of the model that a server loads from a folder, by transformers' own logits."""
    model = load_pretrained(auto_class_of("causal"), folder, dtype=torch.float32)
    return float(by_hand(plan_path, model)[0].mean())


def trained_loss(plan_path: Path) -> float:
    """The held-out loss that training measured after its last step."""
    return [row["val_loss"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "val_loss" in row][-1]


def checkpoint(plan_path: Path, step: int = STEPS) -> Path:
    return checkpoint_folder(plan_path.parent, step)


def assert_has_the_buffers_of(source: Path, saved: Path) -> None:
    """Those that training began with, and no other names than the source has, whose experts lie one by one."""
    began, kept = TensorFiles(source, "model"), TensorFiles(saved, "model")
    assert len(buffers_in(began)) >= 3
    assert all(torch.equal(began[name], kept[name]) for name in buffers_in(began))
    assert {name for name in began if ".experts." not in name} == {name for name in kept if ".experts." not in name}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(pytest.param("gemma4", layout, marks=pytest.mark.slow) for layout in ("single", "fsdp")),
        pytest.param("deepseek-v3", "single", marks=pytest.mark.slow),
        ("deepseek-v3", "ddp"),
        *(
            pytest.param(family, layout, marks=pytest.mark.slow)
            for family in ("gemma4", "deepseek-v3")
            for layout in ("zero2", "zero3")
        ),
    ],
)
def test_the_checkpoint_and_the_served_export_have_the_loss_of_the_trained_model(
    family: str, layout: str, trained: Callable[..., Path], folder_of: Callable[[str], Path]
) -> None:
    plan_path = trained(family, layout)
    loss = trained_loss(plan_path)
    assert_has_the_buffers_of(folder_of(family), checkpoint(plan_path))
    assert held_out_loss(plan_path, checkpoint(plan_path)) == pytest.approx(loss, rel=1e-5)
    exported = export_run(plan_path.parent)
    assert exported.tensors == saved_shapes(plan_path.parent / "export") == saved_shapes(checkpoint(plan_path))
    assert held_out_loss(plan_path, plan_path.parent / "export") == pytest.approx(loss, rel=1e-5)
    assert losses(plan_path)[1] == pytest.approx(losses(trained(family))[1], rel=1e-5)


@pytest.mark.parametrize("layout", ["pp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp", *SLOW))])
def test_buffers_are_cut_and_saved_with_their_pipeline_stage(
    layout: str, trained: Callable[..., Path], folder_of: Callable[[str], Path]
) -> None:
    family = "llama with buffers"
    plan_path, alone = trained(family, layout), trained(family)
    assert_has_the_buffers_of(folder_of(family), checkpoint(plan_path))
    assert trained_loss(plan_path) == pytest.approx(trained_loss(alone), rel=1e-5)
    run_ranks(plan_path, program="tests.programs.buffered_llama_evaluated")
    assert EvalReport.read(plan_path.parent / "eval.json").loss == pytest.approx(trained_loss(plan_path), rel=1e-5)


@pytest.mark.parametrize("layout", ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in RESUMED)])
def test_a_run_that_is_resumed_goes_on_with_the_buffers_of_its_checkpoint(
    layout: str, trained: Callable[..., Path], tmp_path: Path
) -> None:
    """The folder that the run began with is away: nothing but the checkpoint has them."""
    family = "llama with buffers" if layout in {"tp", "pp"} else "deepseek-v3"
    plan_path = copy_of(trained(family, layout), tmp_path)
    expected = losses(plan_path), TensorFiles(checkpoint(plan_path), "model")
    began = Path(RunPlan.read(plan_path).config.model.path)
    shutil.copytree(began, tmp_path / "began")
    for tensors in rewritten(tmp_path / "began"):
        tensors |= {name: torch.zeros_like(tensors[name]) for name in buffers_in(tensors)}
    plan_path.write_text(plan_path.read_text().replace(str(began), str(tmp_path / "began")))
    shutil.rmtree(checkpoint(plan_path))
    run_ranks(plan_path, program=program_of(family))
    resumed = TensorFiles(checkpoint(plan_path), "model")
    assert losses(plan_path) == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in resumed.items())


@pytest.mark.parametrize("end", ["layers.1.layer_scalar", "layers.2.mlp.up_proj.weight"])
def test_a_checkpoint_that_lacks_one_tensor_is_refused_by_name(
    end: str, trained: Callable[..., Path], tmp_path: Path
) -> None:
    plan_path = copy_of(trained("gemma4"), tmp_path)
    lose(checkpoint(plan_path), end)
    model = build_model(RunPlan.read(plan_path))
    with pytest.raises(ValueError, match=rf"it lacks model\.{end}: resume with the model section"):
        weights_for(model, checkpoint(plan_path))


def test_many_alike_names_are_one_pattern() -> None:
    mlp = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in range(32) for name in ("up", "down")]
    assert listed(["lm_head.weight", *mlp]) == (
        "lm_head.weight, model.layers.*.mlp.down_proj.weight (32), model.layers.*.mlp.up_proj.weight (32)"
    )
    assert listed(mlp[:2]) == "model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.up_proj.weight"


def copy_of(plan_path: Path, folder: Path) -> Path:
    """A run that a test may change, without its export."""
    copied = shutil.copytree(plan_path.parent, folder / "run", ignore=shutil.ignore_patterns("export"))
    return Path(copied) / plan_path.name


def rewritten(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each of a folder's files, to be changed; then write them."""
    for path in folder.glob("model*.safetensors"):
        tensors = load_file(path)
        yield tensors
        save_file(tensors, path, metadata={"format": "pt"})


def lose(folder: Path, end: str) -> None:
    """Write a checkpoint of one rank again, whole by its manifest, without the tensors whose names end so."""
    for tensors in rewritten(folder):
        for name in [name for name in tensors if name.endswith(end)]:
            del tensors[name]
    manifest, path = CheckpointManifest.read(folder / "manifest.json"), folder / "model.safetensors"
    files = {path.name: WrittenFile(size_bytes=path.stat().st_size, sha256=sha256_file(path))}
    manifest.model_copy(update={"files": manifest.files | files}).write(folder / "manifest.json")
