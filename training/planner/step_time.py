"""How long a step takes, by part: arithmetic of a job, a choice, a recipe (recipe.py) and the machines.

Products at the measured rate plus the bytes they read and write (a roofline whose two sides add up: Williams et al.
2009), attention, what is bound by memory, collectives by ring over the link they cross, what of them computing cannot
hide, the pipeline's bubble (Narayanan et al. 2021, section 2.2), the optimizer, and the bus to the host. Seconds of the
rank that is the last to be done.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.planner.cluster import HOST_ADAM_GB_PER_S, PCIE_GB_PER_S, Cluster
from training.planner.cost_model import SHARING, Recipe
from training.planner.job import CHUNK_TOKENS, Job, Layout
from training.planner.memory import stage_layers, stage_parameters

BUCKET_BYTES = 25 * 2**20
TP_OPS = 20.0  # two sums a layer: each some ten operations' time of the host
SELECTIVE_OPS = 5.0  # selective recomputation sees every operation in Python, on the way forth and back


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch on one rank, forward or backward. `ops`: of host time to launch it all."""

    products: float
    attention: float
    memory: float
    ops: float

    def __mul__(self, factor: float) -> Pass:
        return Pass(self.products * factor, self.attention * factor, self.memory * factor, self.ops * factor)

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.memory + other.memory,
            self.ops + other.ops,
        )

    def computing(self) -> float:
        return self.products + self.attention + self.memory

    def waiting(self, recipe: Recipe) -> float:
        """For the host: all of its time, or what exceeds the device's."""
        return max(0.0, self.ops - self.computing()) if recipe.hides_ops else self.ops

    def seconds(self, recipe: Recipe) -> float:
        return self.computing() + self.waiting(recipe)


def step_s(job: Job, layout: Layout, recipe: Recipe, cluster: Cluster, *, num_shards: int) -> dict[str, float]:
    """Seconds of a step by part; they add up. "… exposed" is communication that nothing hides."""
    forward, again, backward = _passes(job, layout, recipe, cluster)
    one = forward + again + backward
    talk = tp_s(job, layout, recipe, cluster)
    m = layout.accumulation
    parts = {
        "products": m * one.products,
        "attention": m * one.attention,
        "memory-bound": m * one.memory,
        "recomputing": 0.0,
        "launching": m * one.waiting(recipe),
        "tp exposed": m * talk,
    }
    if again.computing():
        parts["recomputing"] = m * again.computing()
        for part, seconds in (
            ("products", again.products),
            ("attention", again.attention),
            ("memory-bound", again.memory),
        ):
            parts[part] -= m * seconds
    micro_batch = one.seconds(recipe) + talk
    if layout.pp > 1:
        parts["pipeline bubble"] = (layout.pp - 1) / layout.stages_per_rank * micro_batch
        parts["pp exposed"] = pp_s(job, layout, recipe, cluster)
    parts["dp exposed"] = dp_s(
        job, layout, recipe, cluster, num_shards=num_shards, forward=forward, backward=again + backward
    )
    parts |= _update_s(job, layout, recipe, cluster, num_shards=num_shards)
    return {part: seconds for part, seconds in parts.items() if seconds}


def exposed_s(parts: dict[str, float]) -> float:
    return sum(seconds for part, seconds in parts.items() if part.endswith("exposed"))


# Computing


def _passes(job: Job, layout: Layout, recipe: Recipe, cluster: Cluster) -> tuple[Pass, Pass, Pass]:
    """Forward, what backward computes again, backward; of all layers of the slowest stage and, there, of the ends.

    Backward makes two products for each of forward's, and moves twice its bytes.
    """
    layers, tokens = stage_layers(job, layout), layout.micro_batch * job.context
    layer = _layer(job, layout, recipe, cluster, tokens)
    ends = _ends(job, layout, recipe, cluster, tokens)
    flash = 2.5 if recipe.kept.scores == 0 else 2.0  # fused attention's backward makes its scores again
    backward = Pass(2 * layer.products, flash * layer.attention, 2 * layer.memory, 1.5 * layer.ops)
    again = Pass(0, 0, 0, 0)
    if layout.recompute == "full":
        again = layer
    elif layout.recompute == "selective":
        again = _selected_again(job, layout, recipe, layer)
        slower = 1.0 if recipe.recomputes_scores_only else SELECTIVE_OPS
        layer, again = (
            Pass(layer.products, layer.attention, layer.memory, slower * layer.ops),
            Pass(again.products, again.attention, again.memory, slower * layer.ops),
        )
    return layer * layers + ends, again * layers, backward * layers + ends * (0 if _makes_gradient(recipe) else 2)


def _selected_again(job: Job, layout: Layout, recipe: Recipe, layer: Pass) -> Pass:
    if recipe.recomputes_scores_only:
        share = (
            recipe.kept.scores
            * job.shape.heads
            * job.context
            / max(1.0, recipe.kept.bytes_per_token(job, 1, sequence_parallel=False))
        )
        return Pass(0, layer.attention, share * layer.memory, layer.ops / 4)
    dropped = 1 - recipe.products_kept
    return Pass(dropped * layer.products, 0, layer.memory, layer.ops)


def _makes_gradient(recipe: Recipe) -> bool:
    """Our loss makes its gradient in the forward pass (training/models/linear_cross_entropy.py)."""
    return recipe.chunked_logits


def product_s(rows: float, inner: float, columns: float, job: Job, recipe: Recipe, cluster: Cluster) -> float:
    """Of one matrix product [rows, inner] x [inner, columns]."""
    flops = 2 * rows * inner * columns
    moved = job.width_bytes * (rows * inner + inner * columns + rows * columns)
    return flops / (recipe.sustained * cluster.matmul_tflops * 1e12) + moved / (cluster.memory_gb_per_s * 1e9)


def _layer(job: Job, layout: Layout, recipe: Recipe, cluster: Cluster, tokens: int) -> Pass:
    """Forward, of one layer on one tp rank."""
    shape, tp = job.shape, layout.tp
    width, mlp = shape.width, shape.mlp_width / tp
    products = [
        (width, (width + 2 * job.kv_width) / tp),
        (width / tp, width),
        (width, mlp * (2 if job.is_gated else 1)),
        (mlp, width),
    ]
    flops = 4 * tokens * job.context * width / tp * (0.5 if job.is_causal and recipe.skips_masked else 1)
    rate = cluster.attention_tflops or recipe.attention_share * recipe.sustained * cluster.matmul_tflops
    scores = recipe.kept.scores * shape.heads * job.context / tp
    kept = recipe.kept.bytes_per_token(job, tp, sequence_parallel=recipe.sequence_parallel) - scores
    moved = tokens * (recipe.passes * kept + recipe.score_passes * scores)
    return Pass(
        products=sum(product_s(tokens, inner, columns, job, recipe, cluster) for inner, columns in products),
        attention=flops / (rate * 1e12),
        memory=moved / (cluster.memory_gb_per_s * 1e9),
        ops=(recipe.ops + (TP_OPS if tp > 1 else 0)) * recipe.op_us / 1e6,
    )


def _ends(job: Job, layout: Layout, recipe: Recipe, cluster: Cluster, tokens: int) -> Pass:
    """Output layer and loss, forward; ours makes the gradient at once, chunk by chunk."""
    words, width = job.shape.vocab_size / layout.tp, job.shape.width
    times = 3 if _makes_gradient(recipe) else 1
    chunks = -(-tokens // CHUNK_TOKENS) if recipe.chunked_logits else 1
    rows = tokens / chunks
    moved = tokens * words * (24 if _makes_gradient(recipe) else 12)  # fp32 logits, thrice forth and back
    moved += chunks * 8 * words * width if _makes_gradient(recipe) else 0  # the gradient's sum over chunks
    return Pass(
        products=times * chunks * product_s(rows, width, words, job, recipe, cluster),
        attention=0.0,
        memory=moved / (cluster.memory_gb_per_s * 1e9),
        ops=chunks * 20 * recipe.op_us / 1e6,
    )


# Talking


def tp_s(job: Job, layout: Layout, recipe: Recipe, cluster: Cluster) -> float:
    """Of one micro-batch: two sums a layer and direction (Shoeybi et al. 2019, section 3), which nothing hides; once
    more where whole layers are recomputed. Under sequence parallelism each is two halves of a sum."""
    if layout.tp == 1:
        return 0.0
    num_bytes = layout.micro_batch * job.context * job.shape.width * job.width_bytes
    sums = stage_layers(job, layout) * (6 if layout.recompute == "full" else 4) + 2
    link = cluster.link(layout.tp)
    return sums * link.all_reduce_s(num_bytes, layout.tp)


def pp_s(job: Job, layout: Layout, recipe: Recipe, cluster: Cluster) -> float:
    """Hidden states forth and gradients back, between neighbours; half of it stands in the way of the next."""
    num_bytes = layout.micro_batch * job.context * job.shape.width * recipe.boundary_bytes
    ranks_of_a_stage = layout.dp * layout.tp
    link = cluster.link(layout.pp, stride=ranks_of_a_stage)
    if recipe.scatters_boundary:
        num_bytes /= layout.tp
    sends = 2 * layout.stages_per_rank * (layout.accumulation + layout.pp - 1)
    return 0.5 * sends * link.send_s(num_bytes)


def dp_s(
    job: Job,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    *,
    num_shards: int,
    forward: Pass,
    backward: Pass,
) -> float:
    """What data parallelism's gathers and reductions take beyond what they can hide behind.

    ddp hides in the last micro-batch's backward; fsdp and ZeRO-3 in every pass, but for the first layer's gather and
    the last one's reduction; a pipeline reduces after its schedule. Groups add up in hsdp's last backward, and agree
    after local-sgd's update.
    """
    if layout.dp == 1:
        return 0.0
    sharing = SHARING[layout.strategy]
    parameters = stage_parameters(job, layout, stage=0)
    layers = stage_layers(job, layout) + 1
    link, n = cluster.link(num_shards, stride=layout.tp), num_shards
    gather = link.gather_s(recipe.gather_bytes * parameters, n, calls=layers)
    if sharing.stage < 2:
        calls = max(1.0, recipe.reduce_bytes * parameters / BUCKET_BYTES)
        reduce = link.all_reduce_s(recipe.reduce_bytes * parameters, n, calls=calls)
    else:
        scatter = link.gather_s if cluster.kind == "cuda" else link.all_reduce_s  # gloo has no reduce-scatter
        reduce = scatter(recipe.reduce_bytes * parameters, n, calls=layers)
    num_groups = layout.dp // num_shards
    over = cluster.link(num_groups, stride=num_shards * layout.tp)
    across = over.all_reduce_s(recipe.across_bytes * parameters / num_shards, num_groups)
    forth = sharing.gathers / 2 * gather
    back = forth + reduce
    hides = recipe.hides if layout.pp == 1 else 0.0
    hidden_forth, hidden_back = hides * forward.computing(), hides * backward.computing()
    if not sharing.reduces_each:
        return _exposed(reduce, hidden_back, recipe, layers) + across
    exposed = _exposed(forth, hidden_forth, recipe, layers) + _exposed(back, hidden_back, recipe, layers)
    return exposed * (layout.accumulation if layout.pp == 1 else 1) + max(0.0, across - max(0.0, hidden_back - back))


def _exposed(talk: float, hidden: float, recipe: Recipe, layers: int) -> float:
    """What computing is too short to hide; at least the first layer's, and what hidden talk slows computing by."""
    return max(talk - hidden, talk / layers, recipe.contention * talk)


# Updating


def _update_s(job: Job, layout: Layout, recipe: Recipe, cluster: Cluster, *, num_shards: int) -> dict[str, float]:
    sharing = SHARING[layout.strategy]
    parameters = stage_parameters(job, layout, stage=0)
    own = parameters / (num_shards if sharing.stage >= 1 else 1)
    parts = {"optimizer": recipe.update_bytes * own / (cluster.memory_gb_per_s * 1e9)}
    if cluster.kind == "cuda" and layout.offload != "none":
        parts["optimizer"] = recipe.update_bytes * own / (HOST_ADAM_GB_PER_S * 1e9)
        moved = 8 * own  # gradients to the host, weights back
        if layout.offload == "parameters":
            moved += layout.accumulation * 2 * recipe.gather_bytes * own
        parts["offload"] = moved / (PCIE_GB_PER_S * 1e9)
    if sharing.gathers_update and layout.dp > 1:
        link = cluster.link(num_shards, stride=layout.tp)
        parts["dp exposed update"] = link.gather_s(recipe.weight_bytes * parameters, num_shards)
    return parts
