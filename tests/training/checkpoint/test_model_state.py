"""What is saved, resumed, evaluated and exported is the model's whole state: parameters and persistent buffers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.layouts import LAYOUTS
from tests.support.ranks import Ranks, losses, run_ranks
from tests.support.tiny_shards import VOCAB
from training.checkpoint.load import weights_for
from training.checkpoint.safetensors_files import TensorFiles
from training.export import export_run
from training.inference.model_shard import load_whole
from training.models.language_model import LanguageModel
from training.models.state import state_of
from training.records.checkpoint import CheckpointManifest, WrittenFile, checkpoint_folder
from training.records.model_state import check_export, check_state, saved_shapes
from training.records.plan import RunPlan
from training.records.record import sha256_file
from training.records.results import EvalReport, ExportedModel
from training.shards.stream import TokenStream
from training.tracking.rows import read_rows

STEPS = 4
SLOW = ("fsdp", "zero2", "sp", "pp interleaved", "tp x pp", "unlike", "fsdp x pp", "zero1 x pp", "local-sgd")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1},
            **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4},
        },
    ),
    "llama with buffers": ("llama", {}),  # of tests/programs/buffered_llama.py
}
# What a class makes its buffers is not what a trained model has.
BUFFERS: dict[str, Callable[[int], torch.Tensor]] = {
    "layer_scalar": lambda layer: torch.tensor([0.4 + 0.1 * layer]),
    "e_score_correction_bias": lambda layer: torch.tensor([0.9, -0.9, 0.5, -0.5]) * layer,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's model with random weights; made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            kind, changes = FAMILIES[family]
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes))
            model.save_pretrained(root / family)
            path = root / family / "model.safetensors"
            tensors = load_file(path)
            if family == "llama with buffers":
                tensors |= {f"model.layers.{n}.layer_scalar": torch.empty(1) for n in range(4)}
                tensors["model.outside"] = torch.tensor([1.0, 2.0, 3.0])
            for name in tensors:
                if (end := name.rpartition(".")[2]) in BUFFERS:
                    tensors[name] = BUFFERS[end](int(name.split(".")[2]))
            save_file(tensors, path, metadata={"format": "pt"})
        return root / family

    return folder


@pytest.fixture(scope="module")
def trained(make_run: Callable[..., Path], folder_of: Callable[[str], Path]) -> Callable[..., Path]:
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
    plan, model = RunPlan.read(plan_path), load_whole(folder, dtype=torch.float32)
    stream, context, total = TokenStream(Path(plan.shards_dir), "validation"), plan.config.train.context, 0.0
    for start in range(0, len(stream) - 1, context):
        tokens = torch.from_numpy(stream.read(start, min(start + context + 1, len(stream))).astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
    return total / (len(stream) - 1)


def trained_loss(plan_path: Path) -> float:
    """The held-out loss that training measured after its last step."""
    return [row["val_loss"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "val_loss" in row][-1]


def checkpoint(plan_path: Path, step: int = STEPS) -> Path:
    return checkpoint_folder(plan_path.parent, step)


def assert_has_the_buffers_of(source: Path, saved: Path) -> None:
    """Those that training began with, and no other names than the source has, whose experts lie one by one."""
    began, kept = TensorFiles(source, "model"), TensorFiles(saved, "model")
    buffers = [name for name in began if name.rpartition(".")[2] in {*BUFFERS, "outside"}]
    assert len(buffers) >= 3
    assert all(torch.equal(began[name], kept[name]) for name in buffers)
    assert {name for name in began if ".experts." not in name} == {name for name in kept if ".experts." not in name}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gemma4", "single"),
        ("deepseek-v3", "single"),
        ("deepseek-v3", "ddp"),
        ("gemma4", "fsdp"),
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


@pytest.mark.parametrize("layout", ["tp", "pp", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_buffers_are_cut_and_saved_with_their_pipeline_stage(
    layout: str, trained: Callable[..., Path], folder_of: Callable[[str], Path]
) -> None:
    family = "llama with buffers"
    plan_path, alone = trained(family, layout), trained(family)
    assert_has_the_buffers_of(folder_of(family), checkpoint(plan_path))
    assert trained_loss(plan_path) == pytest.approx(trained_loss(alone), rel=1e-5)
    for each in (plan_path, alone):  # these ranks loaded the checkpoint again
        assert EvalReport.read(each.parent / "eval.json").loss == pytest.approx(trained_loss(each), rel=1e-5)
