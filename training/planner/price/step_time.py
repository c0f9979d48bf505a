"""Predicts the time of a step, by part.

Products at the measured rate plus the bytes they read and write (a roofline whose two sides add up: Williams et al.
2009), attention, what is bound by memory, collectives by ring over the link they cross, what of them computing cannot
hide, the pipeline's bubble (Narayanan et al. 2021, section 2.2), the optimizer, and the bus to the host. Seconds of the
rank that is the last to be done.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.facts.loss_chunks import chunk_tokens
from training.facts.muon import SENT_BYTES
from training.planner.cluster import HOST_ADAM_GB_PER_S, PCIE_GB_PER_S
from training.planner.price.step import Step, hidden_parameters, rank_parameters, stage_layers, stages_with_most

BUCKET_BYTES = 25 * 2**20
# Half a wave of a GPU's tiles: 120 processors (A100 108, H100 132), each of which makes 128 x 256 numbers at a time. A
# product's last wave is half full on average (NVIDIA, Matrix Multiplication Background User's Guide, "Wave
# Quantization").
HALF_WAVE = 120 / 2 * 128 * 256
FP8_CAST_BYTES = 2.0  # each factor is written once more as it is and once transposed, by the kernel that makes it
HALF_CONTEXT = 350  # tokens, for which causal attention reaches half of its rate: Shah et al. 2024, arXiv:2407.08608


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch on one rank, forward or backward."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    def __mul__(self, factor: float) -> Pass:
        return Pass(self.products * factor, self.attention * factor, self.memory * factor)

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.products + other.products, self.attention + other.attention, self.memory + other.memory)

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.memory


@dataclass(frozen=True)
class MicroBatch:
    """The computing of one micro-batch on one rank. `layers`: so many of the model's are the rank's."""

    forward: Pass
    recompute: Pass
    backward: Pass
    layers: int

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.recompute.seconds + self.backward.seconds


def step_s(step: Step) -> dict[str, float]:
    """Seconds of a step by part; they add up. "… exposed" is communication that nothing hides."""
    layout = step.layout
    stages = [_micro_batch(step, stage) for stage in stages_with_most(step.job, layout)]
    slowest = max(stages, key=lambda stage: stage.seconds)
    tp_comm = _tp_s(step, slowest.layers)
    n, both = layout.accumulation, slowest.forward + slowest.backward
    parts = {
        "products": n * both.products,
        "attention": n * both.attention,
        "memory-bound": n * both.memory,
        "recomputing": n * slowest.recompute.seconds,
        "tp exposed": n * tp_comm,
        "cp exposed": n * _cp_s(step, slowest.layers),
    }
    if layout.pp > 1:
        others = [stage.seconds for stage in stages if stage is not slowest]
        # of like stages only the first and the last were computed; all but the last are as long as the first
        others += [stages[0].seconds] * (layout.pp - 1 - len(others))
        others_s = sum(others) + (layout.pp - 1) * tp_comm
        parts["pipeline bubble"] = others_s / layout.stages_per_rank
        parts["pp exposed"] = _pp_s(step)
    parts["dp exposed"] = _dp_s(step, slowest)
    parts |= _update_s(step)
    return {part: seconds for part, seconds in parts.items() if seconds}


# Computing


def _micro_batch(step: Step, stage: int) -> MicroBatch:
    """Forward, what backward recomputes, and backward, of a stage's layers, and of the output layer on the last one.

    Backward makes two products for each of forward's, and moves twice its bytes.
    """
    layout, model, cluster = step.layout, step.model, step.cluster
    layers = stage_layers(step.job, layout, stage)
    layer, products_backward = _layer(step)
    attention = 2.5 if model.program.kept.scores == 0 else 2.0  # fused attention's backward recomputes its scores
    hidden = layer.seconds if cluster.kind == "cuda" else 0.0  # a GPU computes while its host launches what comes next
    launching = Pass(memory=max(0.0, model.time.launching_s * cluster.launch_slowdown - hidden))
    layer += launching
    forward = layer * layers
    backward = (
        launching * (-0.5 * layers) + Pass(products_backward, attention * layer.attention, 2 * layer.memory) * layers
    )
    recompute = Pass()
    if layout.recompute == "full":
        recompute = layer * layers
    elif layout.recompute == "selective":
        recompute = _selective_recompute(step, layer) * layers
    accumulated = model.time.accumulated_bytes * rank_parameters(step.job, layout, stage)
    backward += Pass(memory=step.copied_s(accumulated))
    if stage == layout.pp - 1:
        output = _output_layer(step)
        forward, backward = forward + output, backward + output * (0 if model.program.chunked_logits else 2)
    return MicroBatch(forward, recompute, backward, layers)


def _selective_recompute(step: Step, layer: Pass) -> Pass:
    """Return the work that the backward pass of one layer recomputes.

    That is attention's scores, or all but the products that are kept.
    """
    program, job = step.model.program, step.job
    if not program.recomputes_scores_only:
        return Pass((1 - program.products_kept) * layer.products, 0, layer.memory)
    scores = program.kept.scores * job.shape.heads * job.context
    share = scores / max(1.0, program.kept.bytes_per_token(job, 1, sequence_parallel=False))
    return Pass(0, layer.attention, share * layer.memory)


def _product_s(step: Step, rows: float, inner: float, columns: float) -> float:
    """Seconds of one matrix product [rows, inner] x [inner, columns]: its last wave counts as a whole one."""
    job = step.job
    results = rows * columns + (HALF_WAVE if step.cluster.kind == "cuda" else 0)
    factor_bytes = job.width_bytes if job.precision != "fp8" else 1 + FP8_CAST_BYTES
    moved = factor_bytes * (rows * inner + inner * columns) + job.width_bytes * rows * columns
    return step.multiplied_s(2 * results * inner) + step.copied_s(moved)


def _layer(step: Step) -> tuple[Pass, float]:
    """The forward pass of one layer on one tp rank, and the seconds of its backward pass's products."""
    job, model, cluster, tokens = step.job, step.model, step.cluster, step.tokens
    shape, tp = job.shape, step.layout.tp
    width, q_width, mlp = shape.width, job.q_width, job.mlp_width / tp
    attention = [(width, (q_width + 2 * job.kv_width) / tp), (q_width / tp, width)]
    multiplied = 2 * width * (q_width + job.kv_width)  # more than there is where queries, keys and values have low rank
    share = job.attention_parameters / multiplied if multiplied else 0.0
    feed_forward = [(width, mlp * (2 if job.is_gated else 1)), (mlp, width)]
    flops = 4 * tokens * job.context * q_width / tp * (0.5 if job.is_causal and model.time.skips_masked else 1)
    rate = model.time.sustained * cluster.attention_tflops
    if cluster.kind == "cuda":
        rate *= job.context / (job.context + HALF_CONTEXT)
    scores = model.program.kept.scores * shape.heads * job.context / tp
    kept = model.program.kept.bytes_per_token(job, tp, sequence_parallel=step.is_split) - scores
    moved = model.time.passes * kept + model.time.score_passes * scores
    moved += model.time.norm_bytes * width / (tp if step.is_split else 1)

    def forward_s(products: list[tuple[float, float]]) -> float:
        return sum(_product_s(step, tokens, inner, columns) for inner, columns in products)

    def backward_s(products: list[tuple[float, float]]) -> float:
        return sum(
            _product_s(step, tokens, columns, inner) + _product_s(step, inner, tokens, columns)
            for inner, columns in products
        )

    forward = Pass(
        products=share * forward_s(attention) + forward_s(feed_forward),
        attention=flops / (rate * 1e12),
        memory=step.copied_s(tokens * moved),
    )
    return forward, share * backward_s(attention) + backward_s(feed_forward)


def _output_layer(step: Step) -> Pass:
    """The forward pass of the output layer and the loss; ours makes the gradient at once, chunk by chunk."""
    job, tokens, is_ours = step.job, step.tokens, step.model.program.chunked_logits
    words, width = job.shape.vocab_size / step.layout.tp, job.shape.width
    num_products = 3 if is_ours else 1
    chunks = -(-tokens // chunk_tokens(job.width_bytes)) if is_ours else 1
    number_bytes = job.width_bytes if step.cluster.kind == "cuda" else 4  # a CPU takes as long for one in 16 bits
    # fp32 logits, read and written three times; ours, in the products' width, are read four times and written once
    moved = tokens * words * (5 * number_bytes if is_ours else 12)
    moved += chunks * 8 * words * width if is_ours else 0  # the gradient's sum over chunks
    products = num_products * chunks * _product_s(step, tokens / chunks, width, words)
    return Pass(products=products, memory=step.copied_s(moved))


# Communicating


def _tp_s(step: Step, layers: int) -> float:
    """Seconds of tensor parallelism's sums in one micro-batch, which nothing hides.

    There are two a layer and direction (Shoeybi et al. 2019, section 3), and two more where whole layers are
    recomputed. Under sequence parallelism each is two halves of a sum, the first of which gloo makes as a whole one.
    """
    tp = step.layout.tp
    if tp == 1:
        return 0.0
    sums = layers * (6 if step.layout.recompute == "full" else 4) + 2
    each = step.cluster.link(tp).all_reduce_s(step.tokens * step.job.shape.width * step.job.width_bytes, tp)
    if step.is_split and step.cluster.kind == "cpu":
        each *= 1.5
    return step.model.time.tp_exposed * sums * each


def _cp_s(step: Step, layers: int) -> float:
    """Seconds of context parallelism's gathers and sums in one micro-batch, which nothing hides.

    A layer gathers keys and values, once more where it is recomputed, and scatters the sums of their gradients.
    """
    layout = step.layout
    if layout.cp == 1:
        return 0.0
    link = step.cluster.link(layout.cp, stride=layout.tp)
    num_bytes = layout.micro_batch * step.job.context * step.key_value_bytes
    gathers = 1 if layout.recompute == "none" else 2
    scatter = link.gather_s if step.cluster.kind == "cuda" else link.all_reduce_s  # gloo has no reduce-scatter
    seconds = gathers * link.gather_s(num_bytes, layout.cp, calls=2) + scatter(num_bytes, layout.cp, calls=2)
    return layers * seconds


def _pp_s(step: Step) -> float:
    """Seconds of sending hidden states forward and gradients back between stages, half of which computing hides."""
    layout = step.layout
    num_bytes = layout.micro_batch * step.job.context * step.job.shape.width * step.model.program.boundary_bytes
    link = step.cluster.link(layout.pp, stride=layout.tp if layout.stages else layout.dp * layout.tp)
    if step.model.time.scatters_boundary:
        num_bytes /= layout.tp
    sends = 2 * layout.stages_per_rank * (layout.accumulation + layout.pp - 1)
    return 0.5 * sends * link.send_s(num_bytes)


def _dp_s(step: Step, slowest: MicroBatch) -> float:
    """Seconds of data parallelism's gathers and reductions that computing does not hide.

    ddp hides in the last micro-batch's backward; fsdp and ZeRO-3 in every pass that gathers or reduces; a pipeline
    reduces after its schedule. Groups add up in hsdp's last backward, and agree after local-sgd's update.
    """
    layout, cluster, program, time = step.layout, step.cluster, step.model.program, step.model.time
    if layout.gradient_ranks == 1:
        return 0.0
    shards, layers = step.num_shards, slowest.layers + 1
    link = cluster.link(shards, stride=layout.tp * (layout.pp if layout.stages else 1))
    gather = link.gather_s(program.gather_bytes * step.parameters, shards, calls=layers)
    reduced_bytes = program.reduce_bytes * step.parameters
    if layout.row.stage < 2 and not time.scatters_sums:
        reduce = link.all_reduce_s(reduced_bytes, shards, calls=max(1.0, reduced_bytes / BUCKET_BYTES))
    else:
        scatter = link.gather_s if cluster.kind == "cuda" else link.all_reduce_s  # gloo has no reduce-scatter
        reduce = scatter(reduced_bytes, shards, calls=layers)
    num_groups = layout.gradient_ranks // shards
    between_groups = cluster.link(num_groups, stride=shards * layout.tp)
    across = between_groups.all_reduce_s(time.across_bytes * step.parameters / shards, num_groups)
    gathered = gather if layout.row.stage == 3 else 0.0
    again = 0.0 if layout.gathers_once else gathered  # in backward
    hides = time.hides if layout.pp == 1 and not layout.stages else 0.0
    forward_hides, backward_hides = (
        hides * slowest.forward.seconds,
        hides * (slowest.recompute + slowest.backward).seconds,
    )
    if layout.row.stage < 2:
        return _exposed(reduce, backward_hides, time.contention) + across
    gathering = 1 if layout.gathers_once else layout.accumulation  # micro-batches that do
    reducing = 1 if layout.reduces_once else layout.accumulation
    exposed = gathering * _exposed(gathered, forward_hides, time.contention)
    exposed += reducing * _exposed(again + reduce, backward_hides, time.contention)
    exposed += (layout.accumulation - reducing) * _exposed(again, backward_hides, time.contention)
    return exposed + max(0.0, across - max(0.0, backward_hides - again - reduce))


def _exposed(communication: float, hides: float, contention: float) -> float:
    """Seconds of communication that computing does not hide. What is hidden slows computing by its contention."""
    return max(communication - hides, contention * communication)


# Updating


def _update_s(step: Step) -> dict[str, float]:
    layout, cluster, time, own = step.layout, step.cluster, step.model.time, step.own_parameters
    parts = {"optimizer": step.copied_s(time.update_bytes * own)}
    if cluster.kind == "cuda" and layout.offload != "none":
        parts["optimizer"] = time.update_bytes * own / (HOST_ADAM_GB_PER_S * 1e9)
        moved = 8 * own  # gradients to the host, weights back
        if layout.offload == "parameters":  # each micro-batch: its fp32 shards twice, its gradients back
            program = step.model.program
            moved = layout.accumulation * (2 * program.weight_bytes + program.reduce_bytes) * own
        parts["offload"] = moved / (PCIE_GB_PER_S * 1e9)
    if step.model.program.orthogonalizes:
        parts |= _muon_s(step)
    if layout.row.stage in (1, 2) and layout.gradient_ranks > 1 and not time.hides_update:
        link = cluster.link(step.num_shards, stride=layout.tp)
        updated_bytes = step.model.program.weight_bytes * step.parameters
        parts["dp exposed update"] = link.gather_s(updated_bytes, step.num_shards)
    return parts


def _muon_s(step: Step) -> dict[str, float]:
    """Seconds of Muon's products, which the ranks that hold the same matrices share out, and of their messages.

    Parts of momenta go to the rank that orthogonalizes, where they are split; updates come back (strategies/muon.py).
    """
    job, layout = step.job, step.layout
    holders = step.num_shards if layout.row.drifts else layout.gradient_ranks
    ranks = holders * layout.tp
    layers = max(stage_layers(job, layout, stage) for stage in stages_with_most(job, layout))
    flops, cluster = layers * job.orthogonalizing_flops / ranks, step.cluster
    rate = cluster.muon_tflops or cluster.matmul_tflops
    parts = {"Muon's products": flops / (step.model.time.sustained * rate * 1e12)}
    if ranks > 1:
        stage = 0 if layout.at is None else layout.at[1]
        own = hidden_parameters(job, layout, stage) / step.sharded_by(1)
        messages = 2 if layout.row.stage >= 1 or layout.tp > 1 else 1
        parts["Muon exposed"] = messages * cluster.link(ranks).gather_s(SENT_BYTES * own, ranks)
    return parts
