"""torch.compile: the same training, without graph breaks (fullgraph) and without compiling again after the warm-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks


@pytest.mark.parametrize(
    ("layout", "architecture", "packing"),
    [
        ("single", "llama", "documents"),
        pytest.param("fsdp", "gpt2", "stream", marks=pytest.mark.slow),
        pytest.param("tp", "llama", "padded", marks=pytest.mark.long),
        pytest.param("pp", "bert", "stream", marks=pytest.mark.long),
    ],
)
def test_nothing_is_compiled_again_after_the_first_step_and_validation(
    layout: str, architecture: str, packing: str, make_run: Callable[..., Path]
) -> None:
    ranks, parallel = LAYOUTS.get(layout, (1, {"parallel__strategy": "single"}))
    model = {"model__architecture": architecture, "model__kv_heads": 2 if architecture == "llama" else 0}
    config = {"train__compile": True, "train__packing": packing, "train__steps": 4, "train__micro_batch": 1}
    run_ranks(
        make_run(f"compiled {layout}", ranks=ranks, **config, **model, **parallel),
        program="tests.programs.no_recompilation",
    )


def test_compiled_layers_train_as_eager_ones_do(make_run: Callable[..., Path]) -> None:
    runs = []
    for compiled in (False, True):
        single = {"parallel__strategy": "single", "model__dropout": 0.0, "train__activation_checkpointing": "selective"}
        runs.append(make_run(f"compile {compiled}", train__compile=compiled, **single))
        run_ranks(runs[-1])
    eager, compiled_losses = map(losses, runs)
    assert max(abs(eager[step] - compiled_losses[step]) for step in eager) < 1e-5
