"""torch.compile: the same training, without graph breaks (fullgraph) and without compiling again after the warm-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.tiny_shards import MakeRun
from training.models.document_attention import CPU_CONTEXT

PROGRAM = "tests.programs.no_recompilation"
COMMON: dict[str, Any] = {"train__compile": True, "train__steps": 4}


def losses(plan_path: Path) -> list[float]:
    found: list[float] = json.loads(plan_path.with_name("losses.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "packing"), [("single", "documents"), ("cp", "stream")])
def test_compiled_layers_train_as_eager_ones_do_and_nothing_is_compiled_again_after_the_first_step_and_validation(
    layout: str, packing: str, make_run: MakeRun
) -> None:
    ranks, parallel = LAYOUTS.get(layout, (1, {"parallel__strategy": "single"}))
    config = {
        "model__architecture": "llama",
        "model__kv_heads": 2,
        "model__dropout": 0.0,
        "train__packing": packing,
        "train__context": CPU_CONTEXT,
        "train__activation_checkpointing": "selective",
        **parallel,
    }
    compiled = make_run(f"{layout} compiled", ranks=ranks, **(COMMON | config))
    eager = make_run(f"{layout} eager", ranks=ranks, **(COMMON | config | {"train__compile": False}))
    for plan_path in (compiled, eager):
        run_ranks(plan_path, program=PROGRAM)
    assert losses(compiled) == pytest.approx(losses(eager), rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "architecture", "packing"),
    [
        ("fsdp", "gpt2", "stream"),
        pytest.param("single", "llama", "documents", marks=pytest.mark.long),
        pytest.param("tp", "llama", "padded", marks=pytest.mark.long),
        pytest.param("sp", "gpt2", "stream", marks=pytest.mark.long),
        pytest.param("pp", "bert", "stream", marks=pytest.mark.long),
    ],
)
def test_nothing_is_compiled_again_with_dropout_in_any_layout(
    layout: str, architecture: str, packing: str, make_run: MakeRun
) -> None:
    ranks, parallel = LAYOUTS.get(layout, (1, {"parallel__strategy": "single"}))
    model = {"model__architecture": architecture, "model__kv_heads": 2 if architecture == "llama" else 0}
    config = {"train__packing": packing, "train__micro_batch": 1}
    run_ranks(make_run(f"compiled {layout}", ranks=ranks, **COMMON, **config, **model, **parallel), program=PROGRAM)
