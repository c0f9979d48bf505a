"""Cost models: which bytes a training program keeps, how often it moves them, and what it does at the same time.

The functions of memory.py and step_time.py know the formulas; a CostModel has the numbers that differ from program to
program. Ours is here; benchmarks/planner_vs_published.py prices the published runs of Megatron and torchtitan by the
same functions with cost models of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from training.config.parallel import ParallelConfig
from training.config.run import RunConfig
from training.facts.families import has_family
from training.planner.job import Job, Layout


@dataclass(frozen=True)
class Kept:
    """Bytes that a layer's forward pass keeps for its backward pass, per token: coefficients of the model's widths.

    `whole` x width is on every tp rank, `split` x the width of queries, `kv` x that of keys and `mlp` x MLP width are
    shared out
    (Korthikanti et al. 2022, section 4.2, where whole = 10, split = 8, mlp = 4 and the MLP is 4 x wide). `scores`:
    bytes kept per head and pair of tokens, their 5as/h; 0 where attention never stores them. `inputs`: of `whole`, what
    goes into attention and MLP; of that, sequence parallelism keeps `gathered` x width on every rank (the paper gathers
    it once more in backward, and keeps none).
    """

    whole: float
    split: float
    kv: float
    mlp: float
    scores: float = 0.0
    inputs: float = 0.0
    gathered: float = 0.0

    def bytes_per_token(self, job: Job, tp: int, *, sequence_parallel: bool) -> float:
        shape = job.shape
        shared = self.split * job.q_width + self.kv * job.kv_width + self.mlp * job.mlp_width
        shared += self.scores * shape.heads * job.context
        if not sequence_parallel or tp == 1:
            return self.whole * shape.width + shared / tp
        return ((self.whole - self.inputs) / tp + self.gathered) * shape.width + shared / tp


# Ours, by architecture and by what carries a layer's numbers: all fp32; fp32 between layers and 16 bits inside them
# (autocast); 16 bits in both (fsdp, train.residual=bf16). Measured with torch's saved_tensors_hooks on transformers
# 5.23's classes, exact for widths from 64 to 192; a GPU keeps gpt2's 16 x mlp under autocast, whose power of 3 is made
# in fp32 there. Other types are priced as llama; those without a gated MLP as gpt2, of which nine kept 0.52 to 1.05
# (gpt_bigcode least, phi most), or as bert if they predict masked words, of which six kept 0.77 to 1.16.
OUR_KEPT: dict[tuple[str, str], Kept] = {
    ("llama", "fp32"): Kept(24, 8, 8, 16, inputs=8, gathered=8),
    ("llama", "autocast"): Kept(26, 4, 4, 8, inputs=10, gathered=4),
    ("llama", "16 bits"): Kept(16, 4, 4, 8, inputs=4, gathered=4),
    ("gpt2", "fp32"): Kept(16, 16, 0, 20, inputs=8, gathered=8),
    ("gpt2", "autocast"): Kept(12, 8, 0, 10, inputs=4, gathered=4),
    ("gpt2", "16 bits"): Kept(8, 8, 0, 10, inputs=4, gathered=4),
    ("bert", "fp32"): Kept(16, 16, 0, 8, inputs=8, gathered=8),
    ("bert", "autocast"): Kept(16, 8, 0, 4, inputs=8, gathered=4),
    ("bert", "16 bits"): Kept(8, 8, 0, 4, inputs=4, gathered=4),
}
DROPOUT_KEPT = {"gpt2": 8.0, "bert": 8.0}  # bytes x width more; llama's is on attention only
CPU_SCORES = 12.0  # bytes per head and pair of tokens: with dropout, attention on a CPU keeps its scores
# transformers' LlamaRMSNorm runs as six kernels: to fp32, squared, averaged, multiplied, to 16 bits, by its weights; 36
# bytes a number where a fused norm moves 4, twice a layer.
EAGER_NORM_BYTES = 64.0
# Of products' rate, in whole steps: the middle of what torch's FSDP programs reach in planner_vs_published, 0.80 to
# 0.97 (Megatron's 1, all rows together 0.95).
SUSTAINED = {"cpu": 1.0, "cuda": 0.89}
# Counted for GPUs. On a CPU what lies between products is bound by arithmetic too: as long as so many passes at the
# rate of a copy, from steps of 43 ms compiled and 50 eager (4 layers of 128), and 480 (6 of 384): docs/benchmarks.md.
PASSES = {("cpu", True): 5.5, ("cpu", False): 6.5, ("cuda", True): 1.6, ("cuda", False): 2.8}
# How long a number takes on a CPU, by what carries a layer's numbers: in 16 bits no less than in fp32. On an AMD EPYC
# with AVX-512 and bf16, 1024 x 384 numbers: products and sums 1.1 to 1.2 of fp32's time, SiLU 1.5, RMSNorm 1.7. Norms
# and sums between layers stay fp32 under autocast.
CPU_NUMBER = {"fp32": 1.0, "autocast": 1.0, "16 bits": 1.3}
OP_S = {"cpu": 12e-6, "cuda": 8e-6}  # of the host, for each of a layer's operations: 20 compiled, 70 eager
TORCH_GIB = {"cpu": 0.42, "cuda": 1.5}  # torch + transformers resident; CUDA context and NCCL buffers
DEEPSPEED_GIB = 0.21  # resident besides
MIN_ROWS = 64  # PowerSGD and others: a matrix of fewer columns is not worth its factors
Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Program:
    """The constants of both memory and time.

    They are the activations of a layer, and the bytes of each number that ranks exchange.
    """

    kept: Kept  # without recomputation
    weight_bytes: float = 4.0  # per parameter
    gather_bytes: float = 4.0  # per weight, where weights are gathered
    reduce_bytes: float = 4.0  # per gradient that data-parallel ranks sum
    boundary_bytes: float = 4.0  # per number that goes from layer to layer
    products_kept: float = 1.0  # share of the matrix products that selective recomputation keeps
    recomputes_scores_only: bool = False  # selective recomputation drops attention's scores, nothing else
    sequence_parallel: bool = False
    chunked_logits: bool = True  # the loss makes its gradient chunk by chunk, in the forward pass
    orthogonalizes: bool = False  # hidden matrices, by Muon
    gathers_embedding: bool = False  # by itself, where weights are sharded, and frees it after the forward pass


@dataclass(frozen=True)
class MemoryCosts:
    """The constants of memory alone; bytes are per parameter unless stated otherwise."""

    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    hidden_optimizer_bytes: float = 8.0  # of parameters in layers
    cast_bytes: float = 0.0  # copies of the weights for matrix products, made in each forward pass
    copy_bytes: float = 0.0  # an optimizer's own copy of what it updates
    frees_before_gradients: bool = False  # a step's gradients grow while its activations are freed
    logit_bytes: float = 10.0  # per logit that exists at one time
    bucket_bytes: float = 0.0  # all buffers that gradients travel in
    process_gib: float = 0.0  # what a process holds before it trains
    fragmentation: float = 0.0  # share of what is allocated and freed in each step


@dataclass(frozen=True)
class TimeCosts:
    """The constants of time alone."""

    sustained: float = 1.0  # share of the measured matmul rate that a long step keeps up: clocks fall
    passes: float = 2.8  # bytes that a forward pass moves per byte it keeps
    score_passes: float = 2.6  # bytes that it moves per byte of attention scores
    norm_bytes: float = 0.0  # that a layer's two norms move per number between layers, beyond what `passes` count
    accumulated_bytes: float = 0.0  # moved per parameter and micro-batch: casts of weights, sums of gradients
    skips_masked: bool = True  # attention computes only what a causal mask leaves
    launching_s: float = 0.0  # of the host, to launch a layer's forward pass
    across_bytes: float = 4.0  # per gradient and step, sent between groups
    hides: float = 0.8  # share of computing that communication can go on beside
    tp_exposed: float = 1.0  # share of tensor parallelism's sums that nothing hides
    scatters_sums: bool = False  # of stage 1: each rank gets only those gradients' sums whose weights it updates
    hides_update: bool = False  # the updated weights travel beside the next step's forward pass
    contention: float = 0.5  # seconds that computing loses per second of communication beside it
    scatters_boundary: bool = False  # tp ranks send a tp-th each from stage to stage (Narayanan et al. 2021, 4.1)
    update_bytes: float = 40.0  # moved per parameter by clipping and AdamW


@dataclass(frozen=True)
class CostModel:
    """The constants from which the memory and time of a training program follow."""

    program: Program
    memory: MemoryCosts
    time: TimeCosts

    def replaced(self, **changes: Any) -> CostModel:
        """The same model with other values of some fields; each field belongs to one of the three parts."""

        def part(now: Any) -> Any:
            return replace(now, **{name: changes.pop(name) for name in list(changes) if hasattr(now, name)})

        replaced = CostModel(part(self.program), part(self.memory), part(self.time))
        assert not changes, f"no part has {', '.join(changes)}"
        return replaced


def our_cost_model(config: RunConfig, job: Job, layout: Layout, kind: Kind) -> CostModel:
    """The cost model of our own training program (training/strategies/) on devices of this kind."""
    row, parallel, train = layout.row, config.parallel, config.train
    compiled, muon = train.compile is True, train.optimizer == "muon"
    # fsdp gathers weights in bf16 and carries bf16 from layer to layer (training/strategies/fsdp.py)
    travels_in_16_bits, low = job.precision in {"bf16", "fp8"} and row.by_fsdp, job.precision != "fp32"
    carried = "fp32" if not low else "16 bits" if travels_in_16_bits or train.residual == "bf16" else "autocast"
    runs_whole = layout.is_undivided and not muon
    by_deepspeed, is_ours = row.by_deepspeed and runs_whole, row.by_deepspeed and not runs_whole
    # DeepSpeed's overlap_comm fills one bucket while another travels
    num_buckets = 3 if kind == "cuda" and row.by_deepspeed and row.stage < 3 and layout.is_undivided else 2
    # between groups; those that drift synchronize only in outer steps
    outer_bytes = (2.0 if parallel.compression == "bf16" else 4.0) / parallel.outer_every_steps
    across_bytes = outer_bytes if row.drifts else 4.0
    family = has_family(job.shape)
    return CostModel(
        Program(
            kept=_our_kept(job, carried, kind=kind, compiled=compiled),
            reduce_bytes=_reduce_bytes(parallel, layout, job.shape.width),
            boundary_bytes=2.0 if carried == "16 bits" else 4.0,
            sequence_parallel=layout.sequence_parallel,
            chunked_logits=family,
            gathers_embedding=family and row.by_fsdp,
            orthogonalizes=muon,
            gather_bytes=2.0 if travels_in_16_bits else 4.0,
        ),
        MemoryCosts(
            hidden_optimizer_bytes=4.0 if muon else 8.0,
            bucket_bytes=num_buckets * parallel.bucket_mib * 2**20,
            cast_bytes=2.0 if low else 0.0,
            copy_bytes=4.0 if by_deepspeed and row.stage < 3 else 0.0,
            frees_before_gradients=not row.engine,
            logit_bytes=job.width_bytes if family else 12 + 2 * job.width_bytes,
            process_gib=TORCH_GIB[kind] + (DEEPSPEED_GIB if kind == "cpu" and by_deepspeed else 0.0),
            fragmentation=0.05 if kind == "cuda" else 0.0,
        ),
        TimeCosts(
            across_bytes=across_bytes,
            sustained=SUSTAINED[kind],
            passes=_passes(job, layout, carried, kind=kind, compiled=compiled),
            norm_bytes=EAGER_NORM_BYTES if kind == "cuda" and not compiled and job.is_gated else 0.0,
            accumulated_bytes=_accumulated_bytes(layout, job) if kind == "cuda" else 0.0,
            launching_s=OP_S[kind] * (20 if compiled else 70),
            skips_masked=kind == "cuda",
            scatters_sums=is_ours,
            hides=0.8 if kind == "cuda" and not is_ours else 0.0,
        ),
    )


def _passes(job: Job, layout: Layout, carried: str, *, kind: Kind, compiled: bool) -> float:
    """Return the bytes that a forward pass moves per byte it keeps; on a CPU those of fp32 numbers."""
    if kind == "cuda":
        return PASSES[kind, compiled]
    fp32, kept = (
        _our_kept(job, each, kind=kind, compiled=compiled).bytes_per_token(job, layout.tp, sequence_parallel=False)
        for each in ("fp32", carried)
    )
    return PASSES[kind, compiled] * CPU_NUMBER[carried] * fp32 / kept


def _reduce_bytes(parallel: ParallelConfig, layout: Layout, width: int) -> float:
    """Bytes per gradient of an all-reduce that takes as long as DDP's compressed one (training/strategies)."""
    if parallel.compression == "bf16" and not layout.row.drifts:
        return 2.0
    if parallel.compression == "topk":  # an index and a value each, to all others
        return min(4.0, parallel.topk_ratio * 8 * layout.gradient_ranks / 2)
    if parallel.compression == "powersgd":
        return min(4.0, 8.0 * parallel.powersgd_rank / max(MIN_ROWS, width))
    return 4.0


def _accumulated_bytes(layout: Layout, job: Job) -> float:
    """Bytes moved per parameter and micro-batch: weights cast for products, gradients cast back and added up in fp32.

    Ranks that shard weights do so for what they gather: what lies between bytes of products and of messages.
    """
    cast = 0.0 if job.precision == "fp32" else 6.0
    return 12.0 if layout.row.stage == 3 else 12.0 + 2 * cast


def _our_kept(job: Job, carried: str, *, kind: Kind, compiled: bool) -> Kept:
    """Return what a layer of ours keeps for the backward pass. `carried`: the precision of the residual stream."""
    architecture = "llama" if job.is_gated else "gpt2" if job.is_causal else "bert"
    kept = OUR_KEPT[architecture, carried]
    if job.dropout:
        more = DROPOUT_KEPT.get(architecture, 0.0)
        kept = replace(kept, whole=kept.whole + more, scores=CPU_SCORES if kind == "cpu" else 0.0)
    if kind == "cuda" and (architecture, carried) == ("gpt2", "autocast"):
        kept = replace(kept, mlp=16)
    return replace(kept, mlp=kept.mlp * 0.8) if compiled else kept
