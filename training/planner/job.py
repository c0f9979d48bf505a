"""The job of one optimizer step, and a layout, one way to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from training.config.parallel import Precision, Stages
from training.config.run import RunConfig
from training.facts.families import masked_types
from training.facts.muon import newton_schulz_flops
from training.facts.strategies import STRATEGIES, Strategy, StrategyName
from training.records.model_sizes import Part
from training.records.plan import ModelShape, describe_stages, layer_numbers

Offload = Literal["none", "optimizer", "parameters"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Job:
    """The model and the batch of one optimizer step."""

    shape: ModelShape
    context: int
    global_batch: int
    precision: Precision
    dropout: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape, precision: Precision) -> Job:
        train = config.train
        return cls(shape, train.context, train.global_batch, precision, config.model.dropout)

    @property
    def width_bytes(self) -> int:
        """Bytes of each number in a matrix product's operands."""
        return 4 if self.precision == "fp32" else 2

    # What follows from the counted sizes is asked for hundreds of times in a plan, so it is computed once.

    @cached_property
    def attention_share(self) -> float:
        """The share of the layers that have attention. The widths below are means over all layers."""
        sizes = self.shape.sizes
        return sizes.attention_layers / sizes.num_layers

    @cached_property
    def q_width(self) -> float:
        return self.attention_share * self.shape.heads * self.shape.head_dim

    @cached_property
    def kv_width(self) -> float:
        return self.attention_share * self.shape.kv_heads * self.shape.head_dim

    @cached_property
    def mlp_width(self) -> float:
        """The width of an MLP that takes what a token is multiplied with outside attention, such as some experts."""
        sizes = self.shape.sizes
        rest = sum(layer.count * (layer.multiplied - layer.attention) for layer in sizes.layers) / sizes.num_layers
        return rest / ((3 if self.is_gated else 2) * self.shape.width)

    @cached_property
    def attention_parameters(self) -> float:
        """Parameters of one layer's attention that a token is multiplied with."""
        sizes = self.shape.sizes
        return sum(layer.count * layer.attention for layer in sizes.layers) / sizes.num_layers

    @cached_property
    def outside(self) -> Part:
        """The parameters outside of layers."""
        return self.shape.sizes.outside

    def of_rank(self, layers: Sequence[int], stages: range, *, tp: int) -> float:
        """Return the parameters of a rank that has these stages of a pipeline with so many layers a stage.

        A tied embedding lies on the first and the last stage.
        """
        key = (tuple(layers), stages, tp)
        if key not in self._of_ranks:
            self._of_ranks[key] = self._count_rank(*key)
        return self._of_ranks[key]

    @cached_property
    def cost_models(self) -> dict[tuple[object, ...], tuple[RunConfig, Any]]:
        """Return those of the programs that were priced so far (price/pricing.py)."""
        return {}

    @cached_property
    def _of_ranks(self) -> dict[tuple[tuple[int, ...], range, int], float]:
        return {}

    def _count_rank(self, layers: tuple[int, ...], stages: range, tp: int) -> float:
        sizes, last = self.shape.sizes, len(layers) - 1
        numbers = layer_numbers(layers)
        parts = [sizes.of_layers(numbers[stage]) for stage in stages]
        parts += [sizes.before] if 0 in stages else []
        parts += [sizes.after] if last in stages else []
        copied = sizes.tied and last in stages and 0 not in stages
        return sum(part.of_rank(tp) for part in parts) + copied * self.shape.vocab_size * sizes.before.per_word / tp

    def hidden_of_rank(self, layers: Sequence[int], stages: range, *, tp: int) -> float:
        """Return those of these parameters that are in layers: hidden matrices, and norms and biases, under 1%."""
        numbers = layer_numbers(tuple(layers))
        return sum(self.shape.sizes.of_layers(numbers[stage]).of_rank(tp) for stage in stages)

    @cached_property
    def orthogonalizing_flops(self) -> float:
        """FLOPs of Muon's products for a layer, the mean of all: attention's matrices, and those of MLP or experts."""
        sizes, width, heads = self.shape.sizes, self.shape.width, self.shape.heads * self.shape.head_dim
        rest = sum(layer.count * (layer.parameters - layer.attention) for layer in sizes.layers) / sizes.num_layers
        parts = ((self.attention_parameters, heads), (rest, self.shape.mlp_width))
        return sum(number * newton_schulz_flops(width, other) / (width * other) for number, other in parts if other)

    @cached_property
    def is_gated(self) -> bool:
        """Whether the MLP has three matrices, as Llama's has, rather than two, as those of GPT-2 and BERT have.

        Counted in layers with attention and without experts that a token is not sent to; all others count as gated.
        """
        square = self.shape.width * self.shape.mlp_width
        dense = [layer for layer in self.shape.sizes.layers if layer.attention and layer.used == layer.parameters]
        return not 0 < max((layer.multiplied - layer.attention for layer in dense), default=0) < 2.5 * square

    @cached_property
    def is_causal(self) -> bool:
        return self.shape.architecture not in masked_types()


@dataclass(frozen=True)
class Mesh:
    """The part of a layout that decides on which hosts its ranks are.

    `stages`: as in a Layout. `recompute`: what these stages were cut for; None: all that is open.
    """

    strategy: StrategyName
    tp: int
    pp: int
    cp: int = 1
    stages_per_rank: int = 1
    stages: Stages = ()
    recompute: Recompute | None = None

    @property
    def model_ranks(self) -> int:
        """Ranks that take the same sequences: they hold one replica of the model together, or share tokens."""
        return self.tp * self.pp * self.cp

    @property
    def axes(self) -> str:
        return "tp*pp*cp" if self.cp > 1 else "tp*pp"


@dataclass(frozen=True)
class Layout:
    """One way to run a job. Each replica makes `accumulation` micro-batches of `micro_batch` sequences in a step.

    `stages`: the layers of each pipeline stage, by replica, where replicas are of unlike shape or stages unequal; such
    a layout is priced rank by rank. `at`: the replica and the stage of the rank that is priced. `sequence_parallel`:
    tp ranks have pieces of each sequence between blocks. `cp`: ranks that share the tokens of each sequence.
    `counts_ends`: whether embedding and output layer count as a layer each where like stages are cut (not ours).
    `keeps_weights`, `reduces_last`: of ranks that shard weights, whether these stay gathered throughout a step, and
    gradients whole until its last micro-batch.
    """

    strategy: StrategyName
    tp: int
    pp: int
    dp: int
    micro_batch: int
    accumulation: int
    recompute: Recompute = "none"
    offload: Offload = "none"
    stages_per_rank: int = 1
    stages: Stages = ()
    at: tuple[int, int] | None = None
    sequence_parallel: bool = False
    cp: int = 1
    keeps_weights: bool = False
    reduces_last: bool = False
    counts_ends: bool = False

    @property
    def row(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def gathers_once(self) -> bool:
        """Whether sharded weights travel once a step; in a pipeline they always do."""
        return self.keeps_weights or self.pp > 1

    @property
    def reduces_once(self) -> bool:
        """Whether gradients travel once a step, where weights are sharded; in a pipeline they always do."""
        return self.reduces_last or self.pp > 1

    @property
    def world_size(self) -> int:
        return self.tp * (sum(map(len, self.stages)) if self.stages else self.pp * self.gradient_ranks)

    @property
    def gradient_ranks(self) -> int:
        """Ranks that hold the same of the model, or shards of it, and sum its gradients."""
        return self.dp * self.cp

    @property
    def own_layers(self) -> int:
        """The layers of the rank that is priced."""
        assert self.at is not None, "stages of given sizes are priced one by one"
        return self.stages[self.at[0]][self.at[1]]

    def priced_at(self, replica: int, stage: int) -> Layout:
        """The layout as the ranks of this stage see it: a pipeline as long as theirs."""
        return replace(self, pp=len(self.stages[replica]), at=(replica, stage))

    @property
    def num_kinds_of_communication(self) -> int:
        """How many of the mesh's axes have several ranks."""
        return sum(ranks > 1 for ranks in (self.tp, self.pp, self.cp, self.dp))

    @property
    def is_undivided(self) -> bool:
        """Whether each rank has all layers, all of each, and whole sequences."""
        return self.tp == self.pp == self.cp == 1

    def axes(self, *names: str) -> str:
        """`fsdp tp 2`: the strategy, and those of its axes that have several ranks."""
        return " ".join(
            [self.strategy, *(f"{axis} {getattr(self, axis)}" for axis in names if getattr(self, axis) > 1)]
        )

    def how_stages_lie(self) -> list[str]:
        words = [f"{self.stages_per_rank} stages a rank"] if self.stages_per_rank > 1 else []
        return words + ([describe_stages(self.stages).strip()] if self.stages else [])

    def how_memory_is_saved(self) -> list[str]:
        words = [f"{self.recompute} activation checkpointing"] if self.recompute != "none" else []
        return words + ([f"{self.offload} offloaded"] if self.offload != "none" else [])

    def __str__(self) -> str:
        split = ["sequence parallel"] if self.sequence_parallel else []
        first = " ".join([self.axes("tp", "pp", "cp", "dp"), *split, *self.how_stages_lie()])
        words = [first, f"micro-batch {self.micro_batch}", *self.how_shards_travel(), *self.how_memory_is_saved()]
        return ", ".join(words)

    def how_shards_travel(self) -> list[str]:
        """Say in words which of weights and gradients travel once a step; [] if neither does."""
        words = ["weights kept gathered"] if self.keeps_weights else []
        return words + (["gradients reduced once a step"] if self.reduces_last else [])
