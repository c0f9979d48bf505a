"""Parameters that the forward pass does not use: ddp refuses them before its first update, the others leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.layouts import LAYOUTS
from tests.support.ranks import Ranks, losses, run_ranks
from tests.support.tiny_shards import VOCAB, MakeRun
from tests.training.strategies.test_strategies import COMMON, SMALL, assert_equal_training

CROSS = '["transformer.h.*.crossattention.*", "transformer.h.*.ln_cross_attn.*"]'


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a GPT-2 with cross-attention, which nothing feeds."""
    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
    AutoConfig.for_model("gpt2", **sizes, add_cross_attention=True).save_pretrained(folder)
    return COMMON | SMALL | {"model__architecture": "path", "model__path": str(folder)}


@pytest.fixture(scope="module")
def alone(gpt2: dict[str, Any], make_run: MakeRun) -> Path:
    plan_path = make_run("unused", **gpt2, parallel__strategy="single")
    run_ranks(plan_path)
    return plan_path


SLOW = ("hsdp", "tp", "zero1 x tp", "zero1 x pp")


@pytest.mark.parametrize("layout", ["fsdp", "pp", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_others_leave_them_as_they_were_and_say_so(
    layout: str, gpt2: dict[str, Any], alone: Path, make_run: MakeRun
) -> None:
    ranks, parallel = LAYOUTS[layout]
    plan_path = make_run(f"unused {layout}", ranks=ranks, **gpt2, **parallel)
    run_ranks(plan_path)
    assert_equal_training(alone, plan_path)
    log = (plan_path.parent / "training.train.log").read_text()
    assert log.count(f"freeze them with train.freeze='{CROSS}', or leave them") == (2 if "pp" in layout else 1)


@pytest.mark.parametrize("layout", ["ddp", "local-sgd", "zero1", "zero2", "zero3"])
def test_strategies_that_need_every_gradient_are_refused_when_the_run_is_planned(
    layout: str, gpt2: dict[str, Any], make_run: MakeRun
) -> None:
    ranks, parallel = LAYOUTS[layout]
    with pytest.raises(ValueError, match=r"add_cross_attention=true: .* set|with train.freeze='\[\"\*cross\*\"\]'"):
        make_run(f"refused {layout}", ranks=ranks, **gpt2, **parallel)


@pytest.mark.parametrize(
    "layout", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp 4", "zero2", "zero3"))]
)
def test_frozen_they_train_as_one_process_does(
    layout: str, gpt2: dict[str, Any], alone: Path, make_run: MakeRun
) -> None:
    ranks, parallel = LAYOUTS[layout]
    plan_path = make_run(f"frozen {layout}", ranks=ranks, **gpt2, **parallel, train__freeze=["*cross*"])
    run_ranks(plan_path)
    assert_equal_training(alone, plan_path)


@pytest.mark.parametrize(
    "layout", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp 4", "zero2", "zero3"))]
)
def test_what_the_config_does_not_show_is_named_before_the_first_update(
    layout: str, gpt2: dict[str, Any], make_run: MakeRun
) -> None:
    ranks, parallel = LAYOUTS[layout]
    plan_path = make_run(f"named {layout}", ranks=ranks, **gpt2, **parallel, train__freeze=["*ln_cross*"])
    run = Ranks(plan_path)
    with pytest.raises(AssertionError):
        run.finish()
    assert "24 parameters get no gradient from the loss" in run.log()
    assert """freeze them with train.freeze='["transformer.h.*.crossattention.*"]'""" in run.log()
    assert not losses(plan_path)
