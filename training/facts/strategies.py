"""The strategies, one row each: what their ranks share, what they go with, and who runs them.

The config refuses what does not go together, the plan chooses and prices among the rest, and ranks do it: all three
read these rows. A new strategy is one file in training/strategies, its line there, and one row here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "local-sgd", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Strategy:
    """A strategy's row: what its data-parallel ranks share, and what it goes with.

    `stage`: ZeRO's (Rajbhandari et al. 2020, section 5): 1 shards the optimizer's state, 2 also gradients, 3 also
    weights. Weights travel for each pass under 3, and once they are updated under 1 and 2; gradients after each
    micro-batch under 2 and 3, else once a step. `engine`: who shards; DeepSpeed only without tp, pp and Muon
    (training/strategies/zero.py).
    `in_groups`: ranks share within their group only; groups add up gradients or, if they `drift`, agree on weights now
    and then. `mixes_precisions`: unlike ranks may compute in unlike precisions, as they sum whole fp32 gradients.
    `interleaves`: stages of a pipeline are interleaved by themselves. `sizes_stages`: they may be of given sizes.
    `is_tried`: chosen by itself. `cannot_compile`: why its layers are not compiled.
    """

    stage: int = 0
    engine: Literal["", "ddp", "fsdp", "deepspeed"] = ""
    in_groups: bool = False
    drifts: bool = False
    tp: bool = False
    pp: bool = False
    cp: bool = False
    interleaves: bool = False
    sizes_stages: bool = False
    mixes_precisions: bool = False
    offloads: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ()
    is_tried: bool = True
    cannot_compile: str = ""

    @property
    def by_fsdp(self) -> bool:
        return self.engine == "fsdp"

    @property
    def by_deepspeed(self) -> bool:
        return self.engine == "deepspeed"

    @property
    def orthogonalizes(self) -> bool:
        """Whether its ranks can hold matrices whole, for Muon: DeepSpeed cuts gradients into flat pieces."""
        return not (self.by_deepspeed and self.stage >= 2)


# In the order of their simplicity. DeepSpeed 0.19 with overlap_comm on GPUs: stage 1 reduces beside the last backward,
# stage 2 beside each one, and stage 3 prefetches. Beside tp or pp zero1 is training/strategies/sharded_optimizer.py,
# which runs nothing in a layer's forward pass, and reduces in line after the last micro-batch.
STRATEGIES: dict[StrategyName, Strategy] = {
    "single": Strategy(),
    "ddp": Strategy(
        engine="ddp",
        tp=True,
        pp=True,
        cp=True,
        interleaves=True,
        sizes_stages=True,
        mixes_precisions=True,
        compressions=("bf16", "topk", "powersgd"),
    ),
    "fsdp": Strategy(3, "fsdp", tp=True, pp=True, cp=True, interleaves=True, offloads=("parameters",)),
    "hsdp": Strategy(3, "fsdp", in_groups=True, tp=True, offloads=("parameters",)),
    "local-sgd": Strategy(
        engine="ddp", in_groups=True, drifts=True, mixes_precisions=True, compressions=("bf16",), is_tried=False
    ),
    "zero1": Strategy(1, "deepspeed", tp=True, pp=True, offloads=("optimizer",)),
    "zero2": Strategy(2, "deepspeed", offloads=("optimizer",)),
    "zero3": Strategy(
        3,
        "deepspeed",
        offloads=("optimizer", "parameters"),
        cannot_compile="gathers weights inside each layer",
    ),
}


def having(field: str) -> tuple[StrategyName, ...]:
    """Return the strategies whose rows have this."""
    return tuple(name for name, row in STRATEGIES.items() if getattr(row, field))


IN_SHARDS = having("by_fsdp")  # these choose when weights are gathered and gradients reduced, without a pipeline


def offloads(strategy: StrategyName, *, tp: int, pp: int) -> tuple[str, ...]:
    """Return what a strategy can keep in host memory.

    A pipeline keeps its state on devices, and so does zero1 beside tp, which is not DeepSpeed's.
    """
    row = STRATEGIES[strategy]
    return () if pp > 1 or (row.by_deepspeed and tp > 1) else row.offloads
