"""Stage 3, the plan: which ranks run which program, and what the arithmetic predicts of it.

RunPlan is Shardline's own training, planned by training/planner; RankPlan is the part of it that an evaluation has too
(training/records/evaluation_plan.py); CustomProgramPlan is a training program of the user's.
Launching needs the same of both: where their ranks are, the command that each of them runs, and its environment.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from pydantic import Field

from training.config.device_names import key_for
from training.config.parallel import Precision, Stages
from training.config.run import RunConfig
from training.config.train import Batches, BatchPhase
from training.facts.strategies import IN_SHARDS, StrategyName
from training.records.correction import Correction, Priced
from training.records.model_sizes import ModelSizes
from training.records.record import Record
from training.records.text_encoding import TextEncoding

TRAINER_PLAN = "trainer.json"  # in the run folder, where the user's program trains
RUN_DIR = "{run_dir}"  # in trainer.args
Reduce = Literal["each", "last"]  # the micro-batches after which gradients are reduced
COPIES_IN_MEMORY = "copies in memory"  # files on tmpfs: the host's memory, and no process's
NOT_ALLOCATED = ("process", "fragmentation")  # parts of a GPU's memory that torch's allocator does not count


class ModelShape(Record):
    """The sizes of a model, from which its memory and speed follow.

    `head_dim`: numbers of a head's queries; where its keys and values differ, the mean of both. `mlp_width`: of a dense
    layer's MLP, the widest. `sizes`: its parameters, counted.
    """

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    context: int
    tied: bool
    some_kv_heads: tuple[int, ...] = ()  # of layers whose number has a field of its own
    adds_loss: bool = False  # its class adds to cross-entropy, as its config.json asks
    sizes: ModelSizes = ModelSizes()

    @property
    def parameters(self) -> int:
        """The number of parameters; 0 if they are not counted."""
        return self.sizes.parameters


class Prediction(Record):
    """The plan's predictions, to be compared with what the run measures.

    `memory_gib`: memory of one rank, by component. `step_s`: seconds of one step, by component; each of them adds up.
    `step_range_ms`: likely, by what was measured before (training/planner/price/pricing.py).
    `exposed_communication_s` is already included in `step_s`. `mfu`: fraction of the
    datasheets' dense peak in the plan's precision (None: a device is in no catalogue); `matmul_share`: of the measured
    rate of matrix products (None: not measured). `correction`: the factors, from earlier runs, that all of it has.
    """

    memory_gib: dict[str, float]
    step_s: dict[str, float]
    step_range_ms: tuple[float, float]
    exposed_communication_s: float
    flops_per_token: float
    peak_tflops: float  # measured for matrix products in the plan's precision, mean over ranks
    datasheet_tflops: float | None = None  # dense peak in that precision, mean over ranks
    matmul_share: float | None = None
    mfu: float | None = None
    tokens_per_s: float
    train_s: float
    checkpoint_gib: float
    correction: Correction = Correction()

    @property
    def step_ms(self) -> float:
        return 1000 * sum(self.step_s.values())

    def peak_gib(self, device_kind: str) -> float:
        """Predicts TrainResult.peak_memory_gib: on a CPU all resident memory, on a GPU what torch allocates."""
        unseen = unmeasured_parts(device_kind)
        return sum(gib for part, gib in self.memory_gib.items() if part not in unseen)


def unmeasured_parts(device_kind: str) -> tuple[str, ...]:
    """Parts of a rank's memory that are in no run's peak."""
    return NOT_ALLOCATED if device_kind == "cuda" else (COPIES_IN_MEMORY,)


class PlannedSource(Record):
    """A source of the text: the sequences and tokens of one epoch of it, and the epochs that the run sees.

    `documents` in one epoch, and those of them longer than the context, which are cut: 0 in packings that cut the
    stream wherever a sequence ends.
    """

    name: str
    sequences: int
    tokens: int
    epochs: float
    documents: int = 0
    cut_documents: int = 0


class MixturePhase(Record):
    """The share of the sequences that each source has, from this step (counted from 0) to the next phase."""

    first_step: int
    shares: tuple[float, ...]


class RankedLayout(Record):
    """One way to run the job with its predictions. If it does not fit, `why_not` says so and times are None."""

    strategy: StrategyName
    tp: int
    pp: int
    dp: int
    cp: int = 1
    stages: Stages = ()
    stages_per_rank: int = 1
    sequence_parallel: bool = False
    reshard_after_forward: bool = True
    reduce_gradients: Reduce = "each"
    micro_batch: int
    accumulation: int
    activation_checkpointing: Literal["none", "selective", "full"]
    offload: Literal["none", "optimizer", "parameters"]
    memory_gib: float
    usable_gib: float
    step_s: float | None
    tokens_per_s: float | None
    matmul_share: float | None = None
    exposed_communication_s: float | None
    why_not: str

    def as_asked(self) -> dict[str, Any]:
        """Return the fields of the config's section `parallel` that ask for this layout."""
        fields = {name: getattr(self, name) for name in ("strategy", "tp", "pp", "cp", "offload")}
        fields |= {"pp_stages_per_rank": self.stages_per_rank, "stages": self.stages or "even"}
        fields |= {"sequence_parallel": "on" if self.sequence_parallel else "off"}
        if self.strategy not in IN_SHARDS or self.pp > 1:
            return fields
        reshard = "on" if self.reshard_after_forward else "off"
        return fields | {"reshard_after_forward": reshard, "reduce_gradients": self.reduce_gradients}


class DeviceShare(Record):
    """The share of a kind of device in a plan for unlike ones: its ranks, the micro-batch and memory of the fullest."""

    device: str
    ranks: int
    precision: Precision
    micro_batch: int
    memory_gib: float
    usable_gib: float


class Place(NamedTuple):
    """A rank's place: its data-parallel replica, its pipeline stage, its parts of matrices and of each sequence."""

    dp: int
    pp: int
    tp: int
    cp: int = 0


class Command(TypedDict):
    """The command of every rank: a Python module, or else a script, with these arguments."""

    module: str
    script: str
    args: tuple[str, ...]


def places_of(mesh: Mapping[str, int], stages: Stages) -> list[Place]:
    """The places of a plan's ranks, in their order."""
    pp, dp, cp, tp = (range(mesh.get(axis, 1)) for axis in ("pp", "dp", "cp", "tp"))
    if stages:
        return [Place(replica, stage, t) for replica in dp for stage in range(len(stages[replica])) for t in tp]
    return [Place(replica, stage, t, c) for stage in pp for replica in dp for c in cp for t in tp]


@functools.lru_cache(maxsize=10_000)
def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """So many stages of as equal numbers of layers as there can be."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def layer_numbers(sizes: Sequence[int]) -> list[range]:
    """The numbers of the layers of stages of these sizes."""
    return [range(end - size, end) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


def describe_stages(stages: Stages) -> str:
    """` of 24 | 10 + 14 layers`: replicas and the layers of their stages; nothing for equal stages."""
    return f" of {' | '.join(' + '.join(map(str, sizes)) for sizes in stages)} layers" if stages else ""


def torch_environment(device_kind: str) -> dict[str, str]:
    """Return the variables that torch reads before any of our code runs.

    Segments that grow waste less memory where sizes vary (pytorch.org/docs/stable/notes/cuda.html).
    """
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if device_kind == "cuda" else {}


class RankPlan(Record):
    """A plan's part that ranks read, to train or to evaluate: the model's text, its shape, and how they share both.

    `config` is what was asked for and the rest what was chosen; ranks follow the latter.
    `mesh`: sizes of the axes pp, dp and tp, outermost first; ranks that share a layer's matrices are neighbours. Where
    ranks share each sequence there is an axis cp besides, between dp and tp.
    `stages_per_rank`: pipeline stages of equal layers on each rank; more than 1 are interleaved.
    `stages`: the number of layers of each pipeline stage, by data-parallel replica, where replicas are of unlike shape
    or their stages unequal: ((24,), (10, 14)) is one rank with 24 layers, and a pipeline of two. Then ranks count
    replica by replica, and pp is the longest pipeline. Empty: equal stages of a whole mesh.
    `sequence_parallel`: between the blocks that tp ranks share, each has a piece of every sequence.
    `reshard_after_forward`, `reduce_gradients`: of fsdp and hsdp, as in the config; beside pp always False and last.
    `micro_batches`: sequences per forward pass, by data-parallel replica; all make `accumulation` of them a step.
    `rebalance` lets the micro-batches change while training goes on. `compiled`: whether layers are compiled.
    `local_copies`: of models that are named by URLs.
    `text_encoding`: how text becomes tokens, in the shards and everywhere else.
    `generation_config`: what generation_config.json of a pretrained model says; `more_ends`: the tokens that end a text
    of it beside the end token of documents.
    `precision`: of matrix products; `precisions`: by replica, where they differ, and then the former is the weakest.
    """

    run_id: str  # the name of the plan's folder
    config: RunConfig
    shards_dir: str
    shards_fingerprint: str
    vocab_size: int
    end_id: int
    mask_id: int | None
    text_encoding: TextEncoding
    shape: ModelShape
    device_kind: Literal["cpu", "cuda"]
    strategy: StrategyName
    offload: Literal["none", "optimizer", "parameters"]
    activation_checkpointing: Literal["none", "selective", "full"]
    mesh: dict[str, int]
    stages_per_rank: int = 1
    stages: Stages = ()
    sequence_parallel: bool = False
    reshard_after_forward: bool = True
    reduce_gradients: Reduce = "each"
    group_ranks: int = 0  # data-parallel ranks in a group, for hsdp and local-sgd
    ranks_per_host: tuple[int, ...]
    threads_per_rank: int
    micro_batches: tuple[int, ...]
    accumulation: int
    rebalance: bool
    compiled: bool = False
    precision: Precision
    precisions: tuple[Precision, ...] = ()
    local_copies: dict[str, str] = Field(default_factory=dict)
    generation_config: dict[str, Any] = Field(default_factory=dict)
    more_ends: tuple[int, ...] = ()

    def local(self, path: str) -> str:
        """A path of the config as ranks open it."""
        return self.local_copies.get(path, path)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a generated text; the first one ends documents."""
        return (self.end_id, *self.more_ends)

    @property
    def world_size(self) -> int:
        return sum(self.ranks_per_host)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, on all ranks alike, since their gradients are added up: some rank has fp16."""
        return "fp16" in (self.precision, *self.precisions)

    @property
    def describe_precision(self) -> str:
        """`bf16`, or `bf16 + fp16`."""
        return " + ".join(dict.fromkeys(self.precisions)) or self.precision

    @property
    def dp(self) -> int:
        """Data-parallel ranks: each holds (with its tp and pp peers) the whole model and takes its share of a batch."""
        return self.mesh["dp"]

    @property
    def cp(self) -> int:
        """Ranks that share the tokens of each sequence."""
        return self.mesh.get("cp", 1)

    @property
    def gradient_ranks(self) -> int:
        """Ranks that hold the same of the model, or shards of it, and sum its gradients: dp x cp."""
        return self.dp * self.cp

    @property
    def micro_batch(self) -> int:
        """The largest of the replicas' micro-batches."""
        return max(self.micro_batches)

    @property
    def places(self) -> list[Place]:
        """The place of each rank."""
        return places_of(self.mesh, self.stages)

    def replica_layers(self, replica: int) -> list[range]:
        """The numbers of the layers of each of a replica's pipeline stages; of equal ones the first have one more."""
        number = self.mesh["pp"] * self.stages_per_rank
        return layer_numbers(self.stages[replica] if self.stages else even_stages(self.shape.layers, number))

    def command(self, module: str, *, run_dir: Path) -> Command:
        """`python -m MODULE RUN_DIR/plan.json`; `module` is one of Shardline's programs, such as training.train."""
        return {"module": module, "script": "", "args": (str(run_dir / "plan.json"),)}

    def environment(self) -> dict[str, str]:
        """Return the variables that ranks need besides."""
        return torch_environment(self.device_kind)

    def working_dir(self, run_dir: Path) -> str:
        return "/"


class RunPlan(RankPlan):
    """runs/ID/plan.json: everything that a rank needs to train, written once by the head node.

    `hosts`: their names in the order of ranks. `idle_hosts`: those that were there, and which the plan does without.
    `precision_by_device`: the precisions of devices by their names, where they differ.
    `largest_micro_batches`: how far rebalancing may raise each micro-batch. `largest_stages`: to how many layers it may
    lengthen each of `stages`; empty where there are none.
    `by_device`: what each kind of device has, where they are unlike.
    `ranking`: the possible layouts, the chosen one first; at the end some that do not fit.
    `steps_in_time`: how many of them train.target_minutes has time for, as the run's first plan predicted; 0: no limit.
    `sequences`: in all steps; fewer than steps x global batch if max_epochs ends within the last batch.
    `batch_phases`: the sequences of each step, by train.batch_schedule; empty where all have train.global_batch.
    `sources`: those of data.sources, or the corpus as one; empty without shards. `mixture`: by phase, empty where there
    is one source.
    `price_per_hour`: of all its devices together, in prices.currency; None if a device has no price.
    `priced`: what the prices are of, by which the run's measurements correct later plans; None where they must not.
    """

    hosts: tuple[str, ...]
    idle_hosts: tuple[str, ...] = ()
    precision_by_device: dict[str, Precision] = Field(default_factory=dict)
    largest_micro_batches: tuple[int, ...]
    largest_stages: Stages = ()
    by_device: tuple[DeviceShare, ...] = ()
    steps: int
    steps_in_time: int = 0
    sequences: int
    batch_phases: tuple[BatchPhase, ...] = ()
    sources: tuple[PlannedSource, ...] = ()
    mixture: tuple[MixturePhase, ...] = ()
    predicted: Prediction
    priced: Priced | None = None
    ranking: tuple[RankedLayout, ...]
    reasons: tuple[str, ...]
    price_per_hour: float | None = None
    mlflow_run_id: str = ""

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """Config fields by section that make the planner choose the same again on the same machines."""
        parallel = {
            "strategy": self.strategy,
            "tp": self.mesh["tp"],
            "pp": self.mesh["pp"],
            "cp": self.cp,
            "sequence_parallel": "on" if self.sequence_parallel else "off",
            **self._chosen_for_shards(),
            "stages": self.stages or "even",
            "pp_stages_per_rank": self.stages_per_rank,
            "group_ranks": self.group_ranks,
            "offload": self.offload,
            "ranks": self.world_size,
            "precision": self.pinned_precision,
            "shares": self.micro_batches if self.is_unequal else "equal",
            "rebalance": "on" if self.rebalance else "off",
        }
        train = {
            "micro_batch": 0 if self.is_unequal else self.micro_batch,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compiled,
        }
        return {"parallel": parallel, "train": train}

    def _chosen_for_shards(self) -> dict[str, str]:
        if self.strategy not in IN_SHARDS or self.mesh["pp"] > 1:
            return {"reshard_after_forward": "auto", "reduce_gradients": "auto"}
        reshard = "on" if self.reshard_after_forward else "off"
        return {"reshard_after_forward": reshard, "reduce_gradients": self.reduce_gradients}

    @property
    def pinned_precision(self) -> Precision | dict[str, Precision]:
        """The value of parallel.precision that means the same on these devices; on others, what these all support."""
        own = {key_for(name): precision for name, precision in self.precision_by_device.items()}
        return own | {self.device_kind: self.precision} if own else self.precision

    @property
    def is_unequal(self) -> bool:
        """Whether replicas have micro-batches of different sizes."""
        return len(set(self.micro_batches)) > 1

    @property
    def device_hours(self) -> float:
        """Predicted hours of all devices together in training, without validations and checkpoints."""
        return self.world_size * self.predicted.train_s / 3600

    @property
    def cost(self) -> float | None:
        """Predicted cost of these device hours."""
        return None if self.price_per_hour is None else self.price_per_hour * self.predicted.train_s / 3600

    @property
    def batches(self) -> Batches:
        """The sequences of each step."""
        return Batches(self.batch_phases or (BatchPhase(0, self.config.train.global_batch),))

    @property
    def batch_tokens(self) -> int:
        """Tokens of the first optimizer step, over all ranks."""
        return self.config.train.global_batch * self.config.train.context

    @property
    def tokens(self) -> int:
        """Tokens of all steps, over all ranks, without padding where the plan knows the text."""
        if not self.sources:
            return self.batches.sequences_before(self.steps) * self.config.train.context
        return round(sum(source.epochs * source.tokens for source in self.sources))


class CustomProgramPlan(Record):
    """runs/ID/trainer.json: on which ranks the user's program runs, and where it logs. Made anew at each start.

    `price_per_hour`: as in RunPlan.
    """

    run_id: str
    config: RunConfig
    hosts: tuple[str, ...]
    ranks_per_host: tuple[int, ...]
    threads_per_rank: int
    mlflow_run_id: str
    mlflow_experiment_id: str
    mlflow_experiment_name: str
    device_kind: str = "cpu"
    price_per_hour: float | None = None

    @property
    def world_size(self) -> int:
        return sum(self.ranks_per_host)

    @property
    def program(self) -> str:
        """The user's module or script, as the config names it."""
        return self.config.trainer.module or self.config.trainer.script

    def command(self, module: str, *, run_dir: Path) -> Command:
        """The user's program, whatever `module` of ours would run; `{run_dir}` in its arguments is the run's folder."""
        trainer = self.config.trainer
        args = tuple(arg.replace(RUN_DIR, str(run_dir)) for arg in trainer.args)
        return {"module": trainer.module, "script": trainer.script, "args": args}

    def environment(self) -> dict[str, str]:
        """Names the experiment beside MLFLOW_RUN_ID: Accelerate asks for it, and would make one of its own."""
        return {
            "MLFLOW_EXPERIMENT_ID": self.mlflow_experiment_id,
            "MLFLOW_EXPERIMENT_NAME": self.mlflow_experiment_name,
        }

    def working_dir(self, run_dir: Path) -> str:
        """The run's folder: a program that writes to relative paths may write nowhere else in a container."""
        return str(run_dir)


AnyPlan = RunPlan | CustomProgramPlan
