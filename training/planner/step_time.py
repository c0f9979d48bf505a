"""Predicts the time of a step, by part: from a job, a layout, a cost model (cost_model.py) and a cluster.

Products at the measured rate plus the bytes they read and write (a roofline whose two sides add up: Williams et al.
2009), attention, what is bound by memory, collectives by ring over the link they cross, what of them computing cannot
hide, the pipeline's bubble (Narayanan et al. 2021, section 2.2), the optimizer, and the bus to the host. Seconds of the
rank that is the last to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from training.facts.muon import SENT_BYTES
from training.planner.cluster import HOST_ADAM_GB_PER_S, PCIE_GB_PER_S, Cluster
from training.planner.cost_model import SHARING, CostModel
from training.planner.job import Job, Layout, chunk_tokens
from training.planner.memory import hidden_parameters, key_value_bytes, stage_layers, stage_parameters

BUCKET_BYTES = 25 * 2**20
TP_OPS = 20.0  # two sums a layer, each of which takes the host some ten operations' time
SELECTIVE_OPS = 5.0  # times as long: selective recomputation sees every operation in Python, forward and backward


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch on one rank, forward or backward; `ops`: the host's, to launch operations."""

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

    def waiting(self, model: CostModel) -> float:
        """Seconds that the device waits for the host: all of launching, or what exceeds the device's computing."""
        return max(0.0, self.ops - self.computing()) if model.time.hides_ops else self.ops

    def seconds(self, model: CostModel) -> float:
        return self.computing() + self.waiting(model)


def step_s(job: Job, layout: Layout, model: CostModel, cluster: Cluster, *, num_shards: int) -> dict[str, float]:
    """Seconds of a step by part; they add up. "… exposed" is communication that nothing hides."""
    forward, recompute, backward = _passes(job, layout, model, cluster)
    per_micro_batch = forward + recompute + backward
    tp_comm, cp_comm = tp_s(job, layout, model, cluster), cp_s(job, layout, cluster)
    n = layout.accumulation
    parts = {
        "products": n * per_micro_batch.products - n * recompute.products,
        "attention": n * per_micro_batch.attention - n * recompute.attention,
        "memory-bound": n * per_micro_batch.memory - n * recompute.memory,
        "recomputing": n * recompute.computing(),
        "launching": n * per_micro_batch.waiting(model),
        "tp exposed": n * tp_comm,
        "cp exposed": n * cp_comm,
    }
    if layout.pp > 1:
        micro_batch_s = per_micro_batch.seconds(model) + tp_comm
        parts["pipeline bubble"] = (layout.pp - 1) / layout.stages_per_rank * micro_batch_s
        parts["pp exposed"] = pp_s(job, layout, model, cluster)
    parts["dp exposed"] = dp_s(
        job, layout, model, cluster, num_shards=num_shards, forward=forward, backward=recompute + backward
    )
    parts |= _update_s(job, layout, model, cluster, num_shards=num_shards)
    return {part: seconds for part, seconds in parts.items() if seconds}


def is_exposed(part: str) -> bool:
    """Whether the part is communication that nothing hides."""
    return part.endswith("exposed")


def exposed_s(parts: Mapping[str, float]) -> float:
    return sum(seconds for part, seconds in parts.items() if is_exposed(part))


# Computing


def _passes(job: Job, layout: Layout, model: CostModel, cluster: Cluster) -> tuple[Pass, Pass, Pass]:
    """Forward, what backward recomputes, and backward, of all layers of the slowest stage and of the output layer.

    Backward makes two products for each of forward's, and moves twice its bytes.
    """
    layers, tokens = stage_layers(job, layout), layout.tokens(job)
    layer = _layer(job, layout, model, cluster, tokens)
    output = _output_layer(job, layout, model, cluster, tokens)
    if layout.at is not None and layout.at[1] < layout.pp - 1:
        output = output * 0
    attention = 2.5 if model.program.kept.scores == 0 else 2.0  # fused attention's backward recomputes its scores
    backward = Pass(2 * layer.products, attention * layer.attention, 2 * layer.memory, 1.5 * layer.ops)
    recompute = Pass(0, 0, 0, 0)
    if layout.recompute == "full":
        recompute = layer
    elif layout.recompute == "selective":
        recompute = _selective_recompute(job, model, layer)
        if not model.program.recomputes_scores_only:
            layer = replace(layer, ops=SELECTIVE_OPS * layer.ops)
    output_backward = output * (0 if _makes_gradient(model) else 2)
    return layer * layers + output, recompute * layers, backward * layers + output_backward


def _selective_recompute(job: Job, model: CostModel, layer: Pass) -> Pass:
    """Return the work that the backward pass of one layer recomputes.

    That is attention's scores, or all but the products that are kept.
    """
    if not model.program.recomputes_scores_only:
        dropped = 1 - model.program.products_kept
        return Pass(dropped * layer.products, 0, layer.memory, SELECTIVE_OPS * layer.ops)
    kept = model.program.kept
    scores = kept.scores * job.shape.heads * job.context
    share = scores / max(1.0, kept.bytes_per_token(job, 1, sequence_parallel=False))
    return Pass(0, layer.attention, share * layer.memory, layer.ops / 4)


def _makes_gradient(model: CostModel) -> bool:
    """Our loss makes its gradient in the forward pass (training/models/linear_cross_entropy.py)."""
    return model.program.chunked_logits


def product_s(rows: float, inner: float, columns: float, job: Job, model: CostModel, cluster: Cluster) -> float:
    """Seconds of one matrix product [rows, inner] x [inner, columns]."""
    flops = 2 * rows * inner * columns
    moved = job.width_bytes * (rows * inner + inner * columns + rows * columns)
    return flops / (model.time.sustained * cluster.matmul_tflops * 1e12) + moved / (cluster.memory_gb_per_s * 1e9)


def _layer(job: Job, layout: Layout, model: CostModel, cluster: Cluster, tokens: float) -> Pass:
    """The forward pass of one layer on one tp rank."""
    shape, tp = job.shape, layout.tp
    width, q_width, mlp = shape.width, job.q_width, job.mlp_width / tp
    attention = [(width, (q_width + 2 * job.kv_width) / tp), (q_width / tp, width)]
    multiplied = 2 * width * (q_width + job.kv_width)  # more than there is where queries, keys and values have low rank
    share = job.attention_parameters / multiplied if multiplied else 0.0
    feed_forward = [(width, mlp * (2 if job.is_gated else 1)), (mlp, width)]
    flops = 4 * tokens * job.context * q_width / tp * (0.5 if job.is_causal and model.time.skips_masked else 1)
    rate = cluster.attention_tflops or model.time.attention_share * model.time.sustained * cluster.matmul_tflops
    scores = model.program.kept.scores * shape.heads * job.context / tp
    kept = model.program.kept.bytes_per_token(job, tp, sequence_parallel=model.program.sequence_parallel) - scores
    moved = tokens * (model.time.passes * kept + model.time.score_passes * scores)

    def seconds(products: list[tuple[float, float]]) -> float:
        return sum(product_s(tokens, inner, columns, job, model, cluster) for inner, columns in products)

    return Pass(
        products=share * seconds(attention) + seconds(feed_forward),
        attention=flops / (rate * 1e12),
        memory=moved / (cluster.memory_gb_per_s * 1e9),
        ops=(model.time.ops + (TP_OPS if tp > 1 else 0)) * model.time.op_us / 1e6,
    )


def _output_layer(job: Job, layout: Layout, model: CostModel, cluster: Cluster, tokens: float) -> Pass:
    """The forward pass of the output layer and the loss; ours makes the gradient at once, chunk by chunk."""
    words, width = job.shape.vocab_size / layout.tp, job.shape.width
    num_products = 3 if _makes_gradient(model) else 1
    chunks = -(-tokens // chunk_tokens(job.width_bytes)) if model.program.chunked_logits else 1
    rows = tokens / chunks
    # fp32 logits, read and written three times; ours, in the products' width, are read four times and written once
    moved = tokens * words * (5 * job.width_bytes if _makes_gradient(model) else 12)
    moved += chunks * 8 * words * width if _makes_gradient(model) else 0  # the gradient's sum over chunks
    return Pass(
        products=num_products * chunks * product_s(rows, width, words, job, model, cluster),
        attention=0.0,
        memory=moved / (cluster.memory_gb_per_s * 1e9),
        ops=chunks * 20 * model.time.op_us / 1e6,
    )


# Communicating


def tp_s(job: Job, layout: Layout, model: CostModel, cluster: Cluster) -> float:
    """Seconds of tensor parallelism's sums in one micro-batch, which nothing hides.

    There are two a layer and direction (Shoeybi et al. 2019, section 3), and two more where whole layers are
    recomputed. Under sequence parallelism each is two halves of a sum, the first of which gloo makes as a whole one.
    """
    if layout.tp == 1:
        return 0.0
    num_bytes = layout.tokens(job) * job.shape.width * job.width_bytes
    sums = stage_layers(job, layout) * (6 if layout.recompute == "full" else 4) + 2
    each = cluster.link(layout.tp).all_reduce_s(num_bytes, layout.tp)
    if model.program.sequence_parallel and cluster.kind == "cpu":
        each *= 1.5
    return model.time.tp_exposed * sums * each


def cp_s(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Seconds of context parallelism's gathers and sums in one micro-batch, which nothing hides.

    A layer gathers keys and values, once more where it is recomputed, and scatters the sums of their gradients.
    """
    if layout.cp == 1:
        return 0.0
    link = cluster.link(layout.cp, stride=layout.tp)
    num_bytes = layout.micro_batch * job.context * key_value_bytes(job, layout)
    gathers = 1 if layout.recompute == "none" else 2
    scatter = link.gather_s if cluster.kind == "cuda" else link.all_reduce_s  # gloo has no reduce-scatter
    seconds = gathers * link.gather_s(num_bytes, layout.cp, calls=2) + scatter(num_bytes, layout.cp, calls=2)
    return stage_layers(job, layout) * seconds


def pp_s(job: Job, layout: Layout, model: CostModel, cluster: Cluster) -> float:
    """Seconds of sending hidden states forward and gradients back between stages, half of which computing hides."""
    num_bytes = layout.micro_batch * job.context * job.shape.width * model.program.boundary_bytes
    ranks_of_a_stage = layout.tp if layout.stages else layout.dp * layout.tp
    link = cluster.link(layout.pp, stride=ranks_of_a_stage)
    if model.time.scatters_boundary:
        num_bytes /= layout.tp
    sends = 2 * layout.stages_per_rank * (layout.accumulation + layout.pp - 1)
    return 0.5 * sends * link.send_s(num_bytes)


def dp_s(
    job: Job,
    layout: Layout,
    model: CostModel,
    cluster: Cluster,
    *,
    num_shards: int,
    forward: Pass,
    backward: Pass,
) -> float:
    """Seconds of data parallelism's gathers and reductions that computing does not hide.

    ddp hides in the last micro-batch's backward; fsdp and ZeRO-3 in every pass that gathers or reduces, but for the
    first layer's gather and the last one's reduction; a pipeline reduces after its schedule. Groups add up in hsdp's
    last backward, and agree after local-sgd's update.
    """
    if layout.gradient_ranks == 1:
        return 0.0
    sharing = SHARING[layout.strategy]
    parameters = stage_parameters(job, layout)
    layers = stage_layers(job, layout) + 1
    link = cluster.link(num_shards, stride=layout.tp * (layout.pp if layout.stages else 1))
    gather = link.gather_s(model.program.gather_bytes * parameters, num_shards, calls=layers)
    reduced_bytes = model.program.reduce_bytes * parameters
    if sharing.stage < 2 and not model.time.scatters_sums:
        reduce = link.all_reduce_s(reduced_bytes, num_shards, calls=max(1.0, reduced_bytes / BUCKET_BYTES))
    else:
        scatter = link.gather_s if cluster.kind == "cuda" else link.all_reduce_s  # gloo has no reduce-scatter
        reduce = scatter(reduced_bytes, num_shards, calls=layers)
    num_groups = layout.gradient_ranks // num_shards
    between_groups = cluster.link(num_groups, stride=num_shards * layout.tp)
    across = between_groups.all_reduce_s(model.time.across_bytes * parameters / num_shards, num_groups)
    gathered = sharing.gathers / 2 * gather
    again = 0.0 if layout.gathers_once else gathered  # in backward
    hides = model.time.hides if layout.pp == 1 and not layout.stages else 0.0
    forward_hides, backward_hides = hides * forward.computing(), hides * backward.computing()
    if not sharing.reduces_each:
        return _exposed(reduce, backward_hides, model, layers) + across
    gathering = 1 if layout.gathers_once else layout.accumulation  # micro-batches that do
    reducing = 1 if layout.reduces_once else layout.accumulation
    exposed = gathering * _exposed(gathered, forward_hides, model, layers)
    exposed += reducing * _exposed(again + reduce, backward_hides, model, layers)
    exposed += (layout.accumulation - reducing) * _exposed(again, backward_hides, model, layers)
    return exposed + max(0.0, across - max(0.0, backward_hides - again - reduce))


def _exposed(communication: float, hides: float, model: CostModel, layers: int) -> float:
    """Seconds of communication that computing does not hide.

    At least the first layer's are exposed, and hidden communication slows computing by its contention.
    """
    return max(communication - hides, communication / layers, model.time.contention * communication)


# Updating


def _update_s(job: Job, layout: Layout, model: CostModel, cluster: Cluster, *, num_shards: int) -> dict[str, float]:
    sharing = SHARING[layout.strategy]
    parameters = stage_parameters(job, layout)
    own = parameters / (num_shards if sharing.stage >= 1 else 1)
    parts = {"optimizer": model.time.update_bytes * own / (cluster.memory_gb_per_s * 1e9)}
    if cluster.kind == "cuda" and layout.offload != "none":
        parts["optimizer"] = model.time.update_bytes * own / (HOST_ADAM_GB_PER_S * 1e9)
        moved = 8 * own  # gradients to the host, weights back
        if layout.offload == "parameters":  # each micro-batch: its fp32 shards twice, its gradients back
            moved = layout.accumulation * (2 * model.program.weight_bytes + model.program.reduce_bytes) * own
        parts["offload"] = moved / (PCIE_GB_PER_S * 1e9)
    if model.program.orthogonalizes:
        parts |= _muon_s(job, layout, model, cluster, num_shards=num_shards)
    if sharing.gathers_update and layout.gradient_ranks > 1 and not model.time.hides_update:
        link = cluster.link(num_shards, stride=layout.tp)
        parts["dp exposed update"] = link.gather_s(model.program.weight_bytes * parameters, num_shards)
    return parts


def _muon_s(job: Job, layout: Layout, model: CostModel, cluster: Cluster, *, num_shards: int) -> dict[str, float]:
    """Seconds of Muon's products, which the ranks that hold the same matrices share out, and of their messages.

    Parts of momenta go to the rank that orthogonalizes, where they are split; updates come back (strategies/muon.py).
    """
    sharing = SHARING[layout.strategy]
    holders = num_shards if layout.strategy == "local-sgd" else layout.gradient_ranks
    ranks = holders * layout.tp
    flops = stage_layers(job, layout) * job.orthogonalizing_flops / ranks
    parts = {"Muon's products": flops / (model.time.sustained * cluster.matmul_tflops * 1e12)}
    if ranks > 1:
        stage = 0 if layout.at is None else layout.at[1]
        own = hidden_parameters(job, layout, stage=stage) / (num_shards if sharing.stage >= 1 else 1)
        messages = 2 if sharing.stage >= 1 or layout.tp > 1 else 1
        link = cluster.link(ranks)
        parts["Muon exposed"] = messages * link.gather_s(SENT_BYTES * own, ranks)
    return parts
