"""Asynchronous tensor parallelism: our compiled layers have the pairs that torch looks for; elsewhere it is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

from tests.support.configs import inventory, tiny_config
from training.models.family import layers_of
from training.models.language_model import build_model
from training.planner.plan import make_plan
from training.strategies.async_tp import use_async_tp
from training.strategies.tensor import shard_matrices

ASKED: dict[str, Any] = {
    "parallel__strategy": "ddp",
    "parallel__tp": 2,
    "parallel__sequence_parallel": "on",
    "parallel__async_tp": True,
    "train__compile": True,
}


@pytest.mark.slow  # compiles
def test_torch_finds_the_pairs_in_our_compiled_layers(fake_ranks: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a Llama's MLP: torch's own test mode lets its operators stand for what they pair."""
    calls = Counter[str]()

    def counted(name: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return getattr(_symmetric_memory, f"_{name}")(*args, **named)

        return call

    library = torch.library.Library("symm_mem", "FRAGMENT")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, counted(name), "CPU")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)  # what torch asks before it looks for pairs
    model = build_model(make_plan(tiny_config(), inventory(1)))
    shard_matrices(model, fake_ranks, sequence_parallel=True)
    mlp = layers_of(model.hf)[0].mlp
    piece = torch.randn(2, 8, 32, requires_grad=True)
    # No caches: they may have graphs that were made without it.
    settings = torch._inductor.config.patch(_micro_pipeline_tp=True, force_disable_caches=True)
    with _symmetric_memory._test_mode(), settings:
        torch.compile(lambda x: mlp(x), fullgraph=True)(piece).sum().backward()
    assert calls["fused_all_gather_matmul"] >= 2, "what goes into the block, and the gradient of what comes out"
    assert calls["fused_matmul_reduce_scatter"] >= 1
    assert piece.grad is not None
    assert piece.grad.shape == piece.shape


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"train__compile": False}, "train.compile=False"),
        ({"parallel__sequence_parallel": "off"}, "no sequence parallelism"),
        ({"parallel__tp": 1, "parallel__sequence_parallel": "auto"}, "has parallel.tp = 1"),
    ],
)
def test_a_plan_refuses_it_where_there_is_nothing_to_pair(changes: dict[str, Any], words: str) -> None:
    config = tiny_config(**(ASKED | changes))
    if not words:
        make_plan(config, inventory(2, kind="cuda"))
        return
    with pytest.raises(ValueError, match=f"async_tp=true does not work here.*{words}.*parallel.async_tp=false"):
        make_plan(config, inventory(2, kind="cuda"))


def test_a_plan_on_cpus_refuses_it() -> None:
    with pytest.raises(ValueError, match="runs on cpu, not on GPUs"):
        make_plan(tiny_config(**ASKED), inventory(2))


def test_a_rank_that_has_no_symmetric_memory_says_why(fake_ranks: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"compute on cpu, but symmetric memory needs GPUs.*async_tp=false"):
        use_async_tp(fake_ranks.get_group(), torch.device("cpu"))
