"""How often fsdp gathers weights and reduces gradients in a step, on torch's fake process group: nothing is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.configs import inventory, tiny_config
from training.data.batch import Batch, Share
from training.models.language_model import unfilled_model
from training.planner.plan import make_plan
from training.runtime.mesh import build_mesh
from training.strategies import parallelize

LAYERS, MICRO_BATCHES = 2, 4
GATHER, REDUCE = torch.ops.c10d._allgather_base_, torch.ops.c10d._reduce_scatter_base_


class Calls(TorchDispatchMode):
    """Counts torch's operators as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def first_of_two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other, for such small tensors
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("reshard", "reduce", "gathers", "reductions"),
    [
        # layers twice in each micro-batch, embedding and head once: its lookup needs no weights in backward
        ("on", "each", MICRO_BATCHES * (2 * LAYERS + 2), MICRO_BATCHES * (LAYERS + 2)),
        ("on", "last", MICRO_BATCHES * (2 * LAYERS + 2), LAYERS + 2),
        ("off", "each", LAYERS + 2, MICRO_BATCHES * (LAYERS + 2)),
        ("off", "last", LAYERS + 2, LAYERS + 2),
    ],
)
def test_weights_and_gradients_travel_as_often_as_the_plan_says(
    reshard: str, reduce: str, gathers: int, reductions: int, first_of_two_ranks: None
) -> None:
    config = tiny_config(
        parallel__strategy="fsdp",
        parallel__reshard_after_forward=reshard,
        parallel__reduce_gradients=reduce,
        model__tie_embeddings=False,
        train__micro_batch=1,
    )
    plan = make_plan(config, inventory(2))
    assert (plan.shape.layers, plan.accumulation) == (LAYERS, MICRO_BATCHES)
    model, weights = unfilled_model(plan)
    strategy = parallelize(plan, build_mesh(plan), model, weights=weights, device=torch.device("cpu"))
    freed = list[bool]()

    def look_at_embedding(head: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        freed.append(isinstance(model.hf.get_input_embeddings().weight, DTensor))

    model.hf.get_submodule("model.norm").register_forward_pre_hook(look_at_embedding)
    ids = torch.zeros(1, plan.config.train.context, dtype=torch.int64)
    share = Share([Batch(ids, ids)] * MICRO_BATCHES, num_targets=2 * MICRO_BATCHES * ids.numel())
    for _ in range(2):  # the first step makes what later ones use again
        with Calls() as calls:
            strategy.step(share, learning_rate=1e-3)
        assert (calls.counted[GATHER], calls.counted[REDUCE]) == (gathers, reductions)
    assert set(freed) == {reshard == "on"}, "the embedding, while the head computes"
