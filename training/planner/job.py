"""The planner's inputs: a question, the job of one step that follows from it, and a layout, one way to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from training.config.parallel import Precision, Stages, StrategyName
from training.config.run import RunConfig
from training.facts.families import masked_types
from training.facts.muon import newton_schulz_flops
from training.records.correction import Measurement
from training.records.inventory import Host, Inventory
from training.records.model_sizes import Part
from training.records.plan import ModelShape, describe_stages, layer_numbers

Offload = Literal["none", "optimizer", "parameters"]
Recompute = Literal["none", "selective", "full"]
WORDS_MULTIPLE = 128  # products of odd sizes are slower, on GPUs and by a fifth on CPUs (benchmarks/loss_head.py)
CHUNK_BYTES = 8192  # of each word: the loss makes logits for this many tokens at a time


@dataclass(frozen=True)
class Question:
    """A run to plan on an inventory. `measurements`: of earlier runs, which correct the prices."""

    config: RunConfig
    shape: ModelShape
    inventory: Inventory
    measurements: Sequence[Measurement] = ()

    def on(self, hosts: Sequence[Host]) -> Question:
        """Return the same run on these hosts alone."""
        return replace(self, inventory=Inventory(hosts=tuple(hosts)))

    def compiled(self, compiled: bool) -> Question:
        return self.changed("train", compile=compiled)

    def changed(self, section: str, **fields: object) -> Question:
        """Return the question with other values of some fields of a section of the config."""
        values = getattr(self.config, section).model_copy(update=fields)
        return replace(self, config=self.config.model_copy(update={section: values}))


@dataclass(frozen=True)
class Job:
    """The model and the batch of one optimizer step."""

    shape: ModelShape
    context: int
    global_batch: int
    precision: Precision
    dropout: float = 0.0

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
    def cost_models(self) -> dict[tuple[object, ...], Any]:
        """Return those of the training programs that were priced so far (pricing.py)."""
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

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has three matrices, as Llama's has, rather than two, as those of GPT-2 and BERT have."""
        return self.shape.architecture not in {"gpt2", "bert"}

    @cached_property
    def is_causal(self) -> bool:
        return self.shape.architecture not in masked_types()


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

    def tokens(self, job: Job) -> float:
        """A rank's tokens of a micro-batch."""
        return self.micro_batch * job.context / self.cp

    @property
    def own_layers(self) -> int:
        """The layers of the rank that is priced."""
        assert self.at is not None, "stages of given sizes are priced one by one"
        return self.stages[self.at[0]][self.at[1]]

    def priced_at(self, replica: int, stage: int) -> Layout:
        """The layout as the ranks of this stage see it: a pipeline as long as theirs."""
        return replace(self, pp=len(self.stages[replica]), at=(replica, stage))

    @property
    def is_undivided(self) -> bool:
        """Whether each rank has all layers, all of each, and whole sequences."""
        return self.tp == self.pp == self.cp == 1

    def __str__(self) -> str:
        sizes = [
            f"{axis} {size}"
            for axis, size in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("dp", self.dp))
            if size > 1
        ]
        if self.sequence_parallel:
            sizes.append("sequence parallel")
        if self.stages_per_rank > 1:
            sizes.append(f"{self.stages_per_rank} stages a rank")
        sizes += [describe_stages(self.stages).strip()] if self.stages else []
        words = [" ".join([self.strategy, *sizes]), f"micro-batch {self.micro_batch}", *self.how_shards_travel()]
        words += [f"{self.recompute} activation checkpointing"] if self.recompute != "none" else []
        words += [f"{self.offload} offloaded"] if self.offload != "none" else []
        return ", ".join(words)

    def how_shards_travel(self) -> list[str]:
        """Say in words which of weights and gradients travel once a step; [] if neither does."""
        words = ["weights kept gathered"] if self.keeps_weights else []
        return words + (["gradients reduced once a step"] if self.reduces_last else [])


def padding_words(num_words: int, multiple: int = WORDS_MULTIPLE) -> int:
    """Return the words that are added to the output layer's products: up to the multiple, if that is less than 1%."""
    more = -num_words % multiple
    return more if 100 * more < num_words else 0


def chunk_tokens(width_bytes: int) -> int:
    """The number of tokens for which the loss makes logits at one time: 2,048 in fp32, 4,096 in 16 bits."""
    return CHUNK_BYTES // width_bytes
