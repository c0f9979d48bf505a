"""Muon makes torch.optim.Muon's update, and every layout of ranks makes that of one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.layouts import LAYOUTS, Layout
from tests.support.ranks import Ranks, losses, run_ranks
from tests.support.tiny_shards import VOCAB, MakeRun
from tests.training.strategies.test_strategies import COMMON, SMALL, assert_equal_training
from training.checkpoint.safetensors_files import TensorFiles
from training.config.train import TrainConfig
from training.models.hidden_matrices import HiddenMatrix, hidden_matrices
from training.models.split_outputs import Split
from training.records.checkpoint import checkpoint_folder
from training.runtime.tensor_cut import whole_on_each
from training.strategies.muon import Held, Muon
from training.strategies.optim import build_adamw

MUON: dict[str, Any] = {"train__optimizer": "muon"}
REFUSED = {"zero2", "zero3", "zero2 offload", "zero3 offload", "zero2 4", "zero3 4"}
LONG = set(LAYOUTS) - {"ddp", "fsdp", "tp", "pp", "hsdp 4", "fsdp x tp", "zero1", "unlike", "local-sgd"}
EXPERTS = {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
CHAIN = ("ddp", "hsdp", "fsdp", "cp", "tp", "local-sgd", "pp interleaved", "sp", "pp", "zero1", "single")
SINGLE: Layout = (1, {"parallel__strategy": "single"})
# A sum of gradients in another order moves some numbers to the next bf16, 0.4% away, before the products. Measured over
# all layouts: losses by 8e-6, and each weight by 0.5% of its norm at most.
LOSS_BOUND, WEIGHT_BOUND = 2e-5, 0.02


def assert_equal_within_bf16(expected: Path, got: Path) -> None:
    assert_equal_training(expected, got, bound=WEIGHT_BOUND, loss_bound=LOSS_BOUND, of_norm=True)


def tiny_hf_config(model_type: str, **more: Any) -> Any:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
    return AutoConfig.for_model(model_type, **sizes, **more)


def tiny(model_type: str, **more: Any) -> Any:
    """A model of a type, of two layers, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_hf_config(model_type, **more))


MATRICES = {
    "one": ((24, 40), HiddenMatrix()),
    "fused": ((32, 48), HiddenMatrix(1, Split((24, 24)))),
    "experts": ((3, 16, 24), HiddenMatrix(1)),
    "falcon": ((96, 64), HiddenMatrix(0, Split((64, 16, 16)))),
    "qwen3_next": ((256, 64), HiddenMatrix(0, Split((8, 8, 24, 24), 4))),
    "gpt_oss": ((3, 32, 48), HiddenMatrix(2, Split((1, 1), 24))),
    "gpt2": ((64, 192), HiddenMatrix(1, Split((64, 64, 64)))),
}


@pytest.mark.parametrize("products", ["bf16", "fp32"])
def test_the_update_is_that_of_torch(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix, and of those in one tensor: to the bit, or within the rounding of bf16.

    AdamW updates what is no hidden matrix.
    """
    monkeypatch.setattr("training.strategies.muon.cpu_has_bf16", lambda: products == "bf16")
    torch.manual_seed(0)
    shapes = {name: shape for name, (shape, _) in MATRICES.items()} | {"norm": (24,), "embedding": (64, 24)}
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    rest = {name: nn.Parameter(ours[name].detach().clone()) for name in ("norm", "embedding")}

    def apart(name: str, whole: Tensor) -> list[Tensor]:
        return [each.clone() for part in MATRICES[name][1].apart(whole.detach()) for each in part]

    theirs = {name: [each.requires_grad_() for each in apart(name, ours[name])] for name in MATRICES}
    first = {name: apart(name, ours[name]) for name in MATRICES}
    held = {
        ours[name]: Held(name, matrix=matrix, parts=whole_on_each(ours[name].detach(), [0]), cut=None)
        for name, (_, matrix) in MATRICES.items()
    }
    train = TrainConfig(optimizer="muon", learning_rate=0.01)
    build = functools.partial(Muon, held=held, peers=(0,), group=None, tp=1)
    optimizer = build_adamw(nn.ParameterDict(ours), train, fused=True, build=build)
    adamw = build_adamw(nn.ParameterDict(rest), train, fused=True)
    all_theirs = [matrix for matrices in theirs.values() for matrix in matrices]
    decay = train.weight_decay
    torchs = torch.optim.Muon(all_theirs, lr=0.01, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    for matrix in held:
        optimizer.state[matrix] = {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(matrix)}
    for _ in range(3):
        for name, parameter in ours.items():
            parameter.grad = torch.randn(shapes[name])
            if name in rest:
                rest[name].grad = parameter.grad.clone()
                continue
            for matrix, grad in zip(theirs[name], apart(name, parameter.grad), strict=True):
                matrix.grad = grad
        for each in (optimizer, torchs, adamw):
            each.step()
    exact = {"one", "fused", "experts"} if products == "bf16" else set()  # others are multiplied in other groups
    for name, matrices in theirs.items():
        for got, expected, before in zip(apart(name, ours[name]), matrices, first[name], strict=True):
            updated = (expected - before).norm()
            same = torch.equal(got, expected) if name in exact else (got - expected).norm() < 0.01 * updated
            assert same, name
    for name, parameter in rest.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-6, atol=1e-7)


def test_hidden_matrices_are_found_by_their_place_and_shape() -> None:
    gpt2 = hidden_matrices(tiny("gpt2"))
    assert not [name for name in gpt2 if "wte" in name or "wpe" in name or "ln_" in name or name.endswith("bias")]
    assert len(gpt2) == 2 * 4
    mixtral = hidden_matrices(tiny("mixtral", **EXPERTS))
    experts = [name for name, matrix in mixtral.items() if "experts" in name]
    assert len(experts) == 2 * 2, "gate and up in one tensor, and down, of all experts"
    assert "lm_head.weight" not in mixtral


@pytest.fixture(scope="module")
def alone(make_run: MakeRun) -> Path:
    plan_path = make_run("muon alone", **COMMON, **MUON, parallel__strategy="single", train__micro_batch=8)
    run_ranks(plan_path)
    return plan_path


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.long] * (name in LONG)])
        for name in LAYOUTS
        if name not in REFUSED
    ],
)
def test_every_layout_makes_the_update_of_one_process(layout: str, alone: Path, make_run: MakeRun) -> None:
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(f"muon {layout}", ranks=ranks, **COMMON, **SMALL, **MUON, **overrides)
    run_ranks(plan_path)
    assert_equal_within_bf16(alone, plan_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "layout", "sizes"),
    [("gpt2", "tp", {}), pytest.param("mixtral", "fsdp", EXPERTS, marks=pytest.mark.long)],
)
def test_matrices_of_one_tensor_are_orthogonalized_one_by_one_on_ranks_too(
    model_type: str, layout: str, sizes: dict[str, int], make_run: MakeRun, tmp_path: Path
) -> None:
    tiny_hf_config(model_type, **sizes).save_pretrained(tmp_path)
    model = {"model__architecture": "path", "model__path": str(tmp_path), "evaluation__every_steps": 0}
    plans = [
        make_run(f"muon {model_type} {name}", ranks=ranks, **(COMMON | SMALL | MUON | model | overrides))
        for name, (ranks, overrides) in {"alone": SINGLE, layout: LAYOUTS[layout]}.items()
    ]
    for plan_path in plans:
        run_ranks(plan_path)
    assert_equal_within_bf16(*plans)


@pytest.mark.slow
def test_a_run_that_changes_its_layout_is_the_run_of_one_process(make_run: MakeRun) -> None:
    common = {**COMMON, **SMALL, **MUON, "train__decay_steps": len(CHAIN), "evaluation__every_steps": 0}

    def leg(name: str, layout: Layout, *, until: int) -> Path:
        return make_run(f"muon {name}", ranks=layout[0], **(common | {"train__steps": until}), **layout[1])

    whole, moving = leg("whole", SINGLE, until=len(CHAIN)), leg("moving", SINGLE, until=1)
    run_ranks(whole)
    for number, name in enumerate(CHAIN, start=1):
        leg(f"leg {number}", LAYOUTS.get(name, SINGLE), until=number).rename(moving)
        run_ranks(moving)
    assert losses(moving).keys() == losses(whole).keys()
    assert max(abs(loss - losses(moving)[step]) for step, loss in losses(whole).items()) < LOSS_BOUND * losses(whole)[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp x tp", marks=pytest.mark.long)])
def test_a_resumed_run_has_the_same_bits(layout: str, make_run: MakeRun) -> None:
    ranks, overrides = LAYOUTS[layout]
    common = {**COMMON, **SMALL, **MUON, "model__layers": 2, "evaluation__every_steps": 0, "train__decay_steps": 4}
    plans = [
        make_run(f"bits {name} {layout}", ranks=ranks, **(common | {"train__steps": steps}), **overrides)
        for name, steps in {"whole": 4, "stopped": 2, "resumed": 4}.items()
    ]
    whole, stopped, resumed = plans
    for plan_path in (whole, stopped):
        run_ranks(plan_path)
    resumed.rename(stopped)
    run_ranks(stopped)
    for kind in ("model", "optimizer"):
        one, two = (TensorFiles(checkpoint_folder(each.parent, 4), kind) for each in (whole, stopped))
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_moments_of_the_other_optimizer_are_left_and_it_is_said(make_run: MakeRun) -> None:
    common = {**COMMON, **SMALL, "model__layers": 1, "evaluation__every_steps": 0, **SINGLE[1]}
    plan_path = make_run("from adamw", **(common | {"train__steps": 2}))
    run_ranks(plan_path)
    make_run("to muon", **(common | MUON | {"train__steps": 3})).rename(plan_path)
    ranks = Ranks(plan_path)
    ranks.finish()
    assert "has the moments of train.optimizer=adamw, which muon does not take" in ranks.log()
    moments = TensorFiles(checkpoint_folder(plan_path.parent, 3), "optimizer")
    assert moments["step"] == 1
    assert "model.layers.0.mlp.up_proj.weight.momentum_buffer" in moments
    assert "model.layers.0.mlp.up_proj.weight.exp_avg" not in moments

    of_muon = str(checkpoint_folder(plan_path.parent, 3))
    begins = {"model__init": "pretrained", "model__path": of_muon, "train__optimizer_path": of_muon}
    ranks = Ranks(make_run("back to adamw", **(common | begins | {"train__steps": 1})))
    ranks.finish()
    assert "has the moments of train.optimizer=muon, which adamw does not take" in ranks.log()
