"""fp8: its products beside exact ones, and runs in it beside bf16, on CPUs as torch emulates it there."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.support import families
from tests.support.configs import gpus, inventory, reasons, tiny_config
from tests.support.ranks import losses, run_ranks
from tests.support.tiny_shards import MakeRun
from training.models.family import layers_of
from training.models.sizes import count_model
from training.planner.plan import make_plan
from training.planner.reasons.refusals import fp8_refusal
from training.records.plan import RunPlan
from training.strategies.float8 import linear, use_float8, use_torchao

# Sizes that fp8 products take; micro-batches of 2 in every layout, so that every scale is the same.
SMALL: dict[str, Any] = {
    "model__kv_heads": 4,
    "model__dropout": 0.0,
    "train__steps": 6,
    "train__micro_batch": 2,
    "checkpoint__every_steps": 100,
    "evaluation__every_steps": 6,
}


def test_products_and_gradients_are_those_of_a_linear_layer_to_8_bits() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 16, 64) * 30, torch.randn(48, 64) / 50, torch.randn(48)
    results = []
    for product in (F.linear, linear):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = product(*leaves)
        (y.float() * torch.linspace(-1, 1, 48)).sum().backward()
        results.append([y.detach().float(), *(leaf.grad for leaf in leaves)])
    for exact, eighths, bound in zip(*results, (0.04, 0.06, 0.06, 0.01), strict=True):
        assert eighths is not None
        assert eighths.dtype == torch.float32
        assert (exact - eighths).abs().mean() < bound * exact.abs().mean()
        assert not torch.equal(exact, eighths) or bound == 0.01, "computed in 8 bits"


def test_any_number_of_tokens_is_multiplied() -> None:
    """As some layers compress a sequence, and cp ranks have pieces of it."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 32), torch.randn(48, 32, requires_grad=True)
    y = linear(x, weight)
    y.float().sum().backward()
    assert y.shape == (5, 48)
    assert weight.grad is not None
    padded = weight.detach().clone().requires_grad_()
    linear(F.pad(x, (0, 0, 0, 11)), padded)[:5].float().sum().backward()
    assert padded.grad is not None
    assert torch.equal(weight.grad, padded.grad)


def test_a_family_is_planned_with_what_fp8_can_multiply() -> None:
    """Experts and routers stay in bf16, and the plan says how much; a class without such layers is refused."""
    settings = {name: families.tiny_config(name) for name in ("qwen3", "qwen3_moe")}
    shapes = {name: count_model(each, objective="causal") for name, each in settings.items()}
    assert shapes["qwen3"].sizes.fp8_share == 1
    assert 0.2 < shapes["qwen3_moe"].sizes.fp8_share < 0.8
    model = AutoModelForCausalLM.from_config(settings["qwen3_moe"])
    use_float8(layers_of(model))
    ours = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert {name.rpartition(".")[2] for name in ours} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),  # of its dense layer
    }
    assert not any("experts" in name or name.endswith("gate") for name in ours)
    sizes = shapes["qwen3"].sizes
    without = tuple(layer.model_copy(update={"for_fp8": 0}) for layer in sizes.layers)
    bare = shapes["qwen3"].model_copy(update={"sizes": sizes.model_copy(update={"layers": without})})
    assert "layers of this qwen3 have none" in str(fp8_refusal(bare, tp=1))


def test_scales_keep_what_a_cast_alone_would_lose() -> None:
    tiny, huge = torch.full((16, 16), 2e-6), torch.full((16, 16), 3e6)
    for tensor in (tiny, huge):
        y = linear(tensor.requires_grad_(), torch.eye(16))
        assert torch.allclose(y.float(), tensor, rtol=0.07)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with fp8"
)
def test_a_gpu_computes_what_a_cpu_emulates() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128), torch.randn(256, 128)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight)]
        y = linear(*leaves)
        y.float().square().sum().backward()
        results.append([y.detach().float().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)])
    for here, there in zip(*results, strict=True):
        assert torch.allclose(here, there, rtol=0.02, atol=0.02 * float(here.abs().mean()))


@pytest.fixture(scope="module")
def alone(make_run: MakeRun) -> dict[int, float]:
    """Losses of one process."""
    plan_path = make_run("alone", parallel__strategy="single", parallel__precision="fp8", **SMALL)
    run_ranks(plan_path)
    return losses(plan_path)


def test_a_run_learns_as_in_bf16(alone: dict[int, float], make_run: MakeRun) -> None:
    plan_path = make_run("bf16", parallel__strategy="single", parallel__precision="bf16", **SMALL)
    run_ranks(plan_path)
    half = losses(plan_path)
    assert alone != half
    for step in half:
        assert alone[step] == pytest.approx(half[step], rel=0.01)
    assert alone[6] < 0.99 * alone[1]


@pytest.mark.parametrize(
    "overrides",
    [
        {"parallel__strategy": "ddp"},
        pytest.param({"parallel__strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param({"parallel__strategy": "zero3"}, marks=pytest.mark.long),
        pytest.param({"parallel__strategy": "ddp", "parallel__pp": 2}, marks=pytest.mark.slow),
        pytest.param({"parallel__strategy": "ddp", "parallel__tp": 2}, marks=pytest.mark.long),
        pytest.param({"train__activation_checkpointing": "selective"}, marks=pytest.mark.long),
        pytest.param({"train__compile": True}, marks=pytest.mark.long),
    ],
    ids=lambda overrides: " ".join(key.partition("__")[2] + "=" + str(value) for key, value in overrides.items()),
)
def test_ranks_train_as_one_process_does(overrides: dict[str, Any], alone: dict[int, float], make_run: MakeRun) -> None:
    """Where sums are the same, to the last digits. fsdp rounds to bf16 between layers, compiled graphs elsewhere, tp
    sums rounded parts."""
    name = "-".join(f"{key}={value}" for key, value in overrides.items())
    plan_path = make_run(name, ranks=2, parallel__precision="fp8", **(SMALL | overrides))
    run_ranks(plan_path)
    many = losses(plan_path)
    rounds_elsewhere = {"parallel__tp", "train__compile"} & overrides.keys() or "fsdp" in overrides.values()
    bound = 1e-3 if rounds_elsewhere else 1e-6  # measured: 2e-4 and 3e-8; bf16 differs from fp8 by 2e-4
    assert many.keys() == alone.keys()
    for step in alone:
        assert many[step] == pytest.approx(alone[step], rel=bound)


HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_torchaos_layers_train_as_ours_do(
    strategy: str, ranks: int, alone: dict[int, float], make_run: MakeRun
) -> None:
    """Under fsdp gathered in 8 bits; on a CPU and uncompiled, which the plan refuses, emulated by torchao."""
    config: dict[str, Any] = {"parallel__strategy": strategy, "parallel__precision": "fp8"}
    plan_path = make_run(f"torchao {strategy}", ranks=ranks, **(SMALL | config))
    plan = RunPlan.read(plan_path)
    parallel = plan.config.parallel.model_copy(update={"fp8_by": "torchao"})
    plan.model_copy(update={"config": plan.config.model_copy(update={"parallel": parallel})}).write(plan_path)
    run_ranks(plan_path)
    many = losses(plan_path)
    assert many != alone
    for step in alone:
        assert many[step] == pytest.approx(alone[step], rel=1e-3)  # measured: 3e-4


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_TORCHAO or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no torchao, or no GPU with fp8",
)
def test_torchaos_products_on_a_gpu_are_those_of_a_linear_layer_to_8_bits() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(128, 256, device="cuda"))
    x = torch.randn(64, 128, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        exact = layer(x)
        use_torchao([layer], gathers=False, device=torch.device("cuda"))
        eighths = torch.compile(layer)(x)
    assert not torch.equal(exact, eighths)
    assert (exact - eighths).abs().mean() < 0.06 * exact.abs().mean()


# The plan


TORCHAO: dict[str, Any] = {"parallel__precision": "fp8", "parallel__fp8_by": "torchao", "train__compile": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"train__compile": False}, "has train.compile=False"),
        ({"parallel__precision": "bf16"}, "computes in bf16"),
        ({"model__architecture": "gpt2", "model__kv_heads": 0}, "of type gpt2"),
        ({"parallel__strategy": "ddp", "parallel__tp": 2, "model__kv_heads": 4}, "has parallel.tp = 2"),
    ],
)
def test_torchao_is_refused_where_it_cannot_compute(changes: dict[str, Any], words: str) -> None:
    config = tiny_config(**(TORCHAO | changes))
    if not words:
        assert make_plan(config, gpus("9.0", "9.0")).precision == "fp8"
        return
    with pytest.raises(ValueError, match=f"fp8_by=torchao does not work here.*{words}.*fp8_by=shardline"):
        make_plan(config, gpus("9.0", "9.0"))


def test_torchao_is_refused_on_cpus_and_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="runs on cpu, not on GPUs"):
        make_plan(tiny_config(**TORCHAO), inventory(1))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match=r"torchao cannot be imported.*pip install torchao.*fp8_by=shardline"):
        use_torchao([], gathers=False, device=torch.device("cpu"))


def test_fp8_is_taken_only_when_asked_and_only_where_every_gpu_has_it() -> None:
    assert make_plan(tiny_config(parallel__precision="auto"), gpus("9.0", "8.9")).precision == "bf16"
    plan = make_plan(tiny_config(parallel__precision="fp8"), gpus("9.0", "8.9"))
    assert plan.precision == "fp8"
    assert reasons(plan, "asked for by parallel.precision: the layers' products in fp8")
    with pytest.raises(ValueError, match=r"weakest of 2 devices, device 1 of h \(GPU 8.6\), .* fp8 needs 8.9"):
        make_plan(tiny_config(parallel__precision="fp8"), gpus("9.0", "8.6"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model__width": 40, "model__heads": 4}, "width / tp = 40"),
        ({"train__context": 24}, r"train.context = 24"),
        ({"model__kv_heads": 1}, "width of keys / tp = 8"),
    ],
)
def test_sizes_that_fp8_cannot_multiply_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"multiples of 16, not .*{words}.*parallel.precision=bf16"):
        make_plan(tiny_config(**({"parallel__precision": "fp8"} | overrides)), inventory(1))


def test_a_plan_on_cpus_says_that_fp8_is_emulated(make_run: MakeRun) -> None:
    plan = RunPlan.read(make_run("fp8-reasons", parallel__precision="fp8", **SMALL))
    assert reasons(plan, "CPUs emulate it, slower than bf16")
