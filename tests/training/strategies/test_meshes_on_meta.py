"""What ranks of large meshes hold, on torch's fake process group and the meta device: bytes as the plan predicts them.

Nothing is computed or sent; every rank of 512 builds its part of a model of up to 405B parameters as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PreTrainedConfig

from flows.presets import load_config
from training.models.language_model import LanguageModel, hf_config
from training.models.pretrained import auto_class_of
from training.models.sizes import count_model
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.plan import make_plan
from training.records.plan import RunPlan
from training.runtime.mesh import build_mesh
from training.strategies import parallelize
from training.strategies.torch_strategy import TorchStrategy

# Llama 3's shapes: layers, width, heads, key/value heads, MLP width
SHAPES = {"8B": (32, 4096, 32, 8, 14336), "70B": (80, 8192, 64, 8, 28672), "405B": (126, 16384, 128, 8, 53248)}
MESHES = [
    ("8B", 16, "ddp"),
    ("8B", 16, "ddp tp=2"),
    ("8B", 16, "ddp tp=2 pp=4"),
    ("8B", 16, "ddp pp=4 pp_stages_per_rank=2"),
    ("8B", 16, "local-sgd"),
    ("8B", 64, "fsdp"),
    ("8B", 64, "hsdp"),
    ("8B", 64, "fsdp tp=8"),
    ("8B", 16, "fsdp pp=4 pp_stages_per_rank=2"),
    ("8B", 16, "zero1 tp=4"),
    ("70B", 64, "fsdp pp=8"),
    ("70B", 128, "zero1 tp=8 pp=4"),
    ("70B", 64, "ddp tp=8 pp=8"),
    ("70B", 128, "hsdp tp=2"),
    ("70B", 512, "fsdp"),
    ("405B", 256, "fsdp tp=8"),
    ("405B", 512, "ddp tp=8 pp=16"),
    ("405B", 512, "fsdp tp=8 pp=16"),
    ("405B", 512, "zero1 tp=8 pp=16"),
    ("405B", 512, "fsdp"),
    ("8B", 64, "fsdp cp=8"),
    ("70B", 64, "fsdp tp=8 cp=4"),
    ("Qwen3-8B", 16, "fsdp tp=2 pp=2"),
    ("Qwen3-8B", 64, "fsdp tp=4 pp=4"),
    ("Qwen3-8B", 512, "fsdp tp=8 pp=4"),
    ("Qwen3-32B", 16, "fsdp tp=8 pp=2"),
    ("Qwen3-32B", 64, "fsdp tp=8 pp=4"),
    ("Qwen3-32B", 512, "fsdp tp=8 pp=8"),
]

QWEN3 = {"8B": (36, 4096, 32, 8, 12288), "32B": (64, 5120, 64, 8, 25600)}  # untied, heads of 128, 151,936 words


def qwen3(size: str) -> PreTrainedConfig:
    """The content of the model's config.json, without its defaults."""
    layers, width, heads, kv_heads, mlp_width = QWEN3[size]
    return AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        intermediate_size=mlp_width,
        max_position_embeddings=40960,
        vocab_size=151936,
        tie_word_embeddings=False,
    )


def planned(model: str, ranks: int, mesh: str, *, folder: Path) -> RunPlan:
    strategy, *axes = mesh.split()
    of_path: dict[str, Any] = {}
    if model.startswith("Qwen3"):
        settings = qwen3(model.removeprefix("Qwen3-"))
        settings.save_pretrained(folder)
        sizes = ["model.architecture=path", f"model.path={folder}", "data.tokenizer.vocab_size=151936"]
        of_path = {"hf_config": settings.to_dict(), "hf_shape": count_model(settings, objective="causal")}
    else:
        names = ("layers", "width", "heads", "kv_heads", "mlp_width")
        sizes = [f"model.{name}={size}" for name, size in zip(names, SHAPES[model], strict=True)]
        sizes.append("data.tokenizer.vocab_size=128256")
    config = load_config(
        "llama-1b",
        [
            *sizes,
            f"parallel.strategy={strategy}",
            *(f"parallel.{axis}" for axis in axes),
            "train.global_batch=1024",
            "train.micro_batch=1",
            "train.activation_checkpointing=full",
            "train.compile=false",
        ],
    )
    return make_plan(config, hypothetical_inventory(f"{ranks // 8}x8xB300,8x400Gb"), **of_path)


@pytest.fixture(
    params=[
        pytest.param(mesh, marks=[] if mesh[0] == "8B" or mesh[:2] == ("Qwen3-8B", 16) else pytest.mark.slow)
        for mesh in MESHES
    ],
    ids=lambda each: " ".join(map(str, each)),
)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunPlan]:
    yield planned(*request.param, folder=tmp_path)
    if dist.is_initialized():
        dist.destroy_process_group()


def held_bytes(plan: RunPlan, rank: int) -> dict[str, int]:
    """Bytes of weights, gradients and moments of that rank, after it has built its strategy."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    with torch.device("meta"):
        hf = auto_class_of("causal").from_config(hf_config(plan), dtype=torch.float32)
    model = LanguageModel(hf, precision=plan.precision)
    weights = {name: parameter.detach() for name, parameter in hf.named_parameters()}
    on_cpu = plan.model_copy(update={"device_kind": "cpu"})  # of which the mesh is made; tensors are on meta
    strategy = parallelize(on_cpu, build_mesh(on_cpu), model, weights=weights, device=torch.device("meta"))
    assert isinstance(strategy, TorchStrategy)

    def num_bytes(tensor: torch.Tensor) -> int:
        assert tensor.is_meta
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes

    weights_held = [parameter for parameter in strategy.parameters_by_name.values() if parameter.requires_grad]
    moments = [state[name] for state in strategy.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": sum(map(num_bytes, weights_held)),
        "gradients": sum(map(num_bytes, weights_held)),  # each is made like its parameter
        "optimizer": sum(map(num_bytes, moments)),
    }


def test_ranks_hold_the_bytes_that_the_plan_predicts(plan: RunPlan) -> None:
    ends = {0, plan.world_size - 1}  # first and last stage, which hold most
    found = [held_bytes(plan, rank) for rank in sorted(ends)]
    for part in ("weights", "gradients", "optimizer"):
        assert max(each[part] for each in found) / 2**30 == pytest.approx(plan.predicted.memory_gib[part], rel=1e-4), (
            part
        )
