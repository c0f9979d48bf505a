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
    """The sizes of a model, from which its memory and speed follow."""

    architecture: str
    """Kind of the model: llama, gpt2 or bert, or the model_type that the config.json at model.path has."""
    layers: int
    """Number of layers, also called blocks."""
    width: int
    """Numbers in a token's hidden state."""
    heads: int
    """Query heads of an attention layer; 1 for architectures without heads."""
    kv_heads: int
    """Key/value heads of an attention layer; fewer than `heads` with grouped-query attention."""
    head_dim: int
    """Numbers in one head's query; where keys and values differ in size, the mean of both."""
    mlp_width: int
    """Numbers in the hidden layer of a dense MLP; where layers differ, the widest."""
    vocab_size: int
    """Rows of the embedding: the tokens of the tokenizer, and those rows that a pretrained model has beyond them."""
    context: int
    """Tokens of a sequence: train.context, or before there is a plan the limit in config.json (0: none)."""
    tied: bool
    """Whether the output layer uses the embedding's matrix."""
    some_kv_heads: tuple[int, ...] = ()
    """Key/value heads of those layers for which config.json has a field of its own; tp must divide them too."""
    adds_loss: bool = False
    """Whether the model's class adds a loss to cross-entropy, such as a router's, as its config.json asks."""
    sizes: ModelSizes = ModelSizes()
    """Parameters by part of the model; zeros where nobody has counted them."""

    @property
    def parameters(self) -> int:
        """The number of parameters; 0 if they are not counted."""
        return self.sizes.parameters


class Prediction(Record):
    """The plan's predictions, to be compared with what the run measures."""

    memory_gib: dict[str, float]
    """GiB of one rank's memory by component, for the rank that needs most; a rank needs their sum."""
    step_s: dict[str, float]
    """Seconds of one step by component, the mean where batches grow; a step takes their sum."""
    step_range_ms: tuple[float, float]
    """Least and most milliseconds that a step is likely to take, by what earlier runs on this machine showed."""
    exposed_communication_s: float
    """Seconds of a step in which ranks only communicate. They are already part of `step_s`."""
    flops_per_token: float
    """Floating-point operations of training on one token, forward and backward pass (PaLM, appendix B)."""
    peak_tflops: float
    """Measured TFLOP/s of matrix products in the plan's precision, mean over ranks; 0 if not measured."""
    datasheet_tflops: float | None = None
    """Dense peak TFLOP/s in the plan's precision by the datasheets, mean over ranks; None: one is not known."""
    matmul_share: float | None = None
    """Share of `peak_tflops` that training reaches; None if no rate of matrix products was measured."""
    mfu: float | None = None
    """Model FLOPs utilization: the share of `datasheet_tflops` that training reaches; None where that is not known."""
    tokens_per_s: float
    """Tokens that all ranks together train on in a second."""
    train_s: float
    """Seconds of all steps of the run, without validations and checkpoints."""
    checkpoint_gib: float
    """GiB on disk of one checkpoint: weights, optimizer state, and what each rank keeps of its own."""
    correction: Correction = Correction()
    """Factors from earlier runs, which all predictions here already contain."""

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
    """A source of the training text, and how much of it the run sees."""

    name: str
    """Name of the source in data.sources, or what the corpus is where it is the only source."""
    sequences: int
    """Training sequences in one epoch of this source."""
    tokens: int
    """Tokens that are predicted in one epoch of this source."""
    epochs: float
    """How often the run sees the source; 0.5 is half of it."""
    documents: int = 0
    """Documents in one epoch; 0 in packings that cut the stream wherever a sequence ends."""
    cut_documents: int = 0
    """Documents in one epoch that are cut since they exceed the context; 0 in packings that do not count documents."""


class MixturePhase(Record):
    """The share of each source in the sequences of a part of the run."""

    first_step: int
    """The phase's first step, counted from 0; it lasts up to the next phase."""
    shares: tuple[float, ...]
    """Share of the sequences that comes from each source, in the order of the plan's `sources`; they sum to 1."""


class RankedLayout(Record):
    """One way to run the job with its predictions, a row of the plan's table."""

    strategy: StrategyName
    """How data-parallel ranks share weights, gradients and optimizer state."""
    tp: int
    """Ranks that split each layer's matrices (tensor parallelism)."""
    pp: int
    """Ranks over which the layers are distributed (pipeline parallelism)."""
    dp: int
    """Data-parallel replicas of the model, each of which takes its share of the batch."""
    cp: int = 1
    """Ranks that share the tokens of each sequence (context parallelism)."""
    stages: Stages = ()
    """Number of layers of each pipeline stage, by replica; empty if all stages are equal."""
    stages_per_rank: int = 1
    """Pipeline stages on each rank; more than 1 are interleaved."""
    sequence_parallel: bool = False
    """Whether tp ranks each have a piece of every sequence between attention and MLP."""
    reshard_after_forward: bool = True
    """For fsdp and hsdp, whether a layer's gathered weights are freed after its forward pass."""
    reduce_gradients: Reduce = "each"
    """For fsdp and hsdp, whether gradients are reduced after each micro-batch or only after the last one of a step."""
    micro_batch: int
    """Sequences of one forward pass of a replica; the largest where replicas differ."""
    accumulation: int
    """Micro-batches that each replica takes in one optimizer step."""
    activation_checkpointing: Literal["none", "selective", "full"]
    """Which activations the backward pass recomputes, instead of keeping them in memory."""
    offload: Literal["none", "optimizer", "parameters"]
    """What lies in host memory instead of GPU memory."""
    memory_gib: float
    """Predicted GiB of the rank that has the least memory to spare."""
    usable_gib: float
    """GiB for training on the device of the rank with the least memory to spare."""
    step_s: float | None
    """Predicted seconds of one step; None if the layout does not fit."""
    tokens_per_s: float | None
    """Predicted tokens per second over all ranks; None if the layout does not fit."""
    matmul_share: float | None = None
    """Predicted share of the measured rate of matrix products; None: it does not fit, or no rate was measured."""
    exposed_communication_s: float | None
    """Predicted seconds of a step in which ranks only communicate, part of `step_s`; None if it does not fit."""
    why_not: str
    """Why the layout does not fit, with the memory that lacks; empty if it fits."""

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
    """The share of a kind of device in a plan for devices of several kinds."""

    device: str
    """Name of the kind of device, such as NVIDIA A100-SXM4-80GB."""
    ranks: int
    """Number of ranks on devices of this kind."""
    precision: Precision
    """Precision of matrix products on devices of this kind."""
    micro_batch: int
    """Sequences of one forward pass, the most that a rank on devices of this kind gets."""
    memory_gib: float
    """Predicted GiB of the rank that needs most among those on devices of this kind."""
    usable_gib: float
    """GiB that one device of this kind has for training."""


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
    """A plan's part that ranks read, to train or to evaluate: the model's text, its shape, and how they share both."""

    run_id: str
    """Name of the plan's folder: the run's ID, or that of an evaluation."""
    config: RunConfig
    """The config as it was asked for; ranks follow the plan's other fields where it leaves a choice."""
    shards_dir: str
    """Folder with the token shards of the text; empty in a dry run."""
    shards_fingerprint: str
    """Hash in the shards' manifest, by which it is checked that the text is the planned one; empty in a dry run."""
    vocab_size: int
    """Rows of the model's embedding, which has one for each token of the tokenizer at least."""
    end_id: int
    """Token that ends a document."""
    mask_id: int | None
    """Token that hides another one from a masked language model; None for causal models."""
    text_encoding: TextEncoding
    """How text becomes tokens, in the shards, in prompts and wherever else the model is used."""
    shape: ModelShape
    """Sizes of the model."""
    device_kind: Literal["cpu", "cuda"]
    """Whether all ranks compute on GPUs (cuda) or on CPUs."""
    strategy: StrategyName
    """How data-parallel ranks share weights, gradients and optimizer state."""
    offload: Literal["none", "optimizer", "parameters"]
    """What lies in host memory instead of GPU memory."""
    activation_checkpointing: Literal["none", "selective", "full"]
    """Which activations the backward pass recomputes, instead of keeping them in memory."""
    mesh: dict[str, int]
    """Ranks along each axis, outermost first: pp, dp, cp (only where ranks share sequences) and tp. Ranks that share a
    layer's matrices are neighbours. With `stages`, pp is the longest pipeline.
    """
    stages_per_rank: int = 1
    """Pipeline stages of equal layers on each rank; more than 1 are interleaved."""
    stages: Stages = ()
    """Number of layers of each pipeline stage, by data-parallel replica, where replicas or stages are unequal: ((24,),
    (10, 14)) is one rank with 24 layers, and a pipeline of two. Ranks then count replica by replica. Empty: equal
    stages of a whole mesh.
    """
    sequence_parallel: bool = False
    """Whether tp ranks each have a piece of every sequence between the blocks that they share."""
    reshard_after_forward: bool = True
    """For fsdp and hsdp, whether a layer's gathered weights are freed after its forward pass; always False with pp."""
    reduce_gradients: Reduce = "each"
    """For fsdp and hsdp, whether gradients are reduced after each micro-batch or once a step; always last with pp."""
    group_ranks: int = 0
    """Data-parallel ranks in a group, for hsdp and local-sgd; 0 for other strategies."""
    ranks_per_host: tuple[int, ...]
    """Number of ranks on each host, in the order of ranks."""
    threads_per_rank: int
    """CPU threads with which each rank computes; the same on all hosts."""
    micro_batches: tuple[int, ...]
    """Sequences of one forward pass of each data-parallel replica."""
    accumulation: int
    """Micro-batches that each replica takes in one optimizer step, where all steps have train.global_batch."""
    rebalance: bool
    """Whether micro-batches and stages may change while training goes on, to follow the measured speed of ranks."""
    compiled: bool = False
    """Whether layers are compiled with torch.compile."""
    precision: Precision
    """Precision of matrix products; where replicas differ, the weakest of theirs."""
    precisions: tuple[Precision, ...] = ()
    """Precision of each replica's matrix products, where they differ; otherwise empty."""
    local_copies: dict[str, str] = Field(default_factory=dict)
    """Local folder by URL, for a model or checkpoint that the config names by its URL."""
    generation_config: dict[str, Any] = Field(default_factory=dict)
    """Content of a pretrained model's generation_config.json; empty without one."""
    more_ends: tuple[int, ...] = ()
    """Tokens that end a generated text, as a pretrained model's files say, apart from `end_id`."""

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
    """runs/ID/plan.json: everything that a rank needs to train, written once by the head node."""

    hosts: tuple[str, ...]
    """Names of the hosts that have ranks, in the order of ranks."""
    idle_hosts: tuple[str, ...] = ()
    """Names of the hosts that were available and that the plan does without."""
    precision_by_device: dict[str, Precision] = Field(default_factory=dict)
    """Precision of matrix products by name of the device, where devices differ in it; otherwise empty."""
    largest_micro_batches: tuple[int, ...]
    """Most sequences of one forward pass of each replica, up to which rebalancing may raise its micro-batch."""
    largest_stages: Stages = ()
    """Most layers of each stage in `stages`, up to which rebalancing may lengthen it; empty without `stages`."""
    by_device: tuple[DeviceShare, ...] = ()
    """What each kind of device has in this plan, where there are several kinds; otherwise empty."""
    steps: int
    """Number of optimizer steps of the run, after which training ends."""
    steps_in_time: int = 0
    """Steps for which train.target_minutes has time, as the run's first plan predicted; 0: no such limit."""
    sequences: int
    """Sequences of all steps; fewer than steps x global batch if train.max_epochs ends within the last batch."""
    batch_phases: tuple[BatchPhase, ...] = ()
    """Sequences of each step where train.batch_schedule changes them; empty where all have train.global_batch."""
    sources: tuple[PlannedSource, ...] = ()
    """The sources in data.sources, or the corpus as the only one; empty where the text is not known yet."""
    mixture: tuple[MixturePhase, ...] = ()
    """Shares of the sources by phase; empty if there is only one source."""
    predicted: Prediction
    """Predicted memory, speed and time of the chosen layout."""
    priced: Priced | None = None
    """Machine and job that were priced, by which this run corrects later plans; None: it must not correct any."""
    ranking: tuple[RankedLayout, ...]
    """Possible layouts: the chosen one, others from the fastest to the slowest, then some that do not fit."""
    reasons: tuple[str, ...]
    """Sentences on what was chosen and why, as the plan shows them to people."""
    price_per_hour: float | None = None
    """Price of an hour of all devices that have ranks, in prices.currency; None if one has no price."""
    mlflow_run_id: str = ""
    """MLflow's ID of the run, to which ranks log; empty in a dry run."""

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
    """runs/ID/trainer.json: on which ranks the user's program runs, and where it logs. Made anew at each start."""

    run_id: str
    """ID of the run, which is the name of its folder."""
    config: RunConfig
    """The run's config, whose section `trainer` names the user's program."""
    hosts: tuple[str, ...]
    """Names of the hosts that have ranks, in the order of ranks."""
    ranks_per_host: tuple[int, ...]
    """Number of ranks on each host, in the order of `hosts`."""
    threads_per_rank: int
    """CPU threads of each rank; the same on all hosts."""
    mlflow_run_id: str
    """MLflow's ID of the run, to which the program logs."""
    mlflow_experiment_id: str
    """MLflow's ID of the experiment that the run belongs to."""
    mlflow_experiment_name: str
    """Name of the experiment in MLflow that the run belongs to."""
    device_kind: str = "cpu"
    """Kind of the first host's devices: cuda for GPUs, otherwise cpu."""
    price_per_hour: float | None = None
    """Price of an hour of all devices that have ranks, in prices.currency; None if one has no price."""

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
