"""Parts of plan.json: the model as numbers, what is expected of the run, and the ways to run it that there were."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from training.config.parallel import Strategy

NOT_ALLOCATED = ("process", "fragmentation")  # parts of a GPU's memory that torch's allocator does not count


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelShape(Frozen):
    """The numbers that memory and speed follow from."""

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocab_size: int
    context: int
    tied: bool
    parameters: int


class Prediction(Frozen):
    """Per rank; what the plan expects, to be compared with what the run measures.

    `memory_gib` and `step_s` by part, which add up. `mfu`: share of the measured matmul rate (None: not measured).
    """

    memory_gib: dict[str, float]
    step_s: dict[str, float]
    exposed_communication_s: float
    flops_per_token: float
    peak_tflops: float  # measured for matrix products in the plan's precision, mean over ranks
    mfu: float | None
    tokens_per_s: float
    train_s: float
    checkpoint_gib: float

    @property
    def step_ms(self) -> float:
        return 1000 * sum(self.step_s.values())

    def peak_gib(self, device_kind: str) -> float:
        """What TrainResult.peak_memory_gib measures: on a CPU all that is resident, on a GPU what torch allocates."""
        unseen = NOT_ALLOCATED if device_kind == "cuda" else ()
        return sum(gib for part, gib in self.memory_gib.items() if part not in unseen)


class RankedChoice(Frozen):
    """One way to run the job, priced; `why_not`: why it cannot be had. Times are None where it does not fit."""

    strategy: Strategy
    tp: int
    pp: int
    dp: int
    micro_batch: int
    accumulation: int
    activation_checkpointing: Literal["none", "selective", "full"]
    offload: Literal["none", "optimizer", "parameters"]
    memory_gib: float
    usable_gib: float
    step_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    exposed_communication_s: float | None
    why_not: str
