"""Predicts one rank's memory at the peak of a step, by part: from a job, a layout and a cost model (cost_model.py).

Weights, gradients and optimizer by ZeRO's stages (Rajbhandari et al. 2020, section 5); activations by Korthikanti et
al. 2022 (arXiv:2205.05198): section 4 for tensor and sequence parallelism, eq. 5 for pipelines, section 5 for
recomputation. Attention scores count only where the cost model stores them. Peaks of parts that never coincide are not
added.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from training.planner.cost_model import SHARING, CostModel
from training.planner.job import Job, Layout, chunk_tokens, padding_words
from training.records.plan import even_stages

GIB = 2**30
LAYERS_GATHERED = 2  # the one that computes, and the next


def memory_gib(job: Job, layout: Layout, model: CostModel, *, num_shards: int) -> dict[str, float]:
    """Memory by part, in GiB, of the rank that holds most. `num_shards`: ranks over which a sharded state is spread."""
    ranks = [
        _bytes_of_stage(job, layout, model, stage=stage, num_shards=num_shards)
        for stage in stages_with_most(job, layout)
    ]
    largest = max(ranks, key=lambda parts: sum(parts.values()))
    return {part: num_bytes / GIB for part, num_bytes in largest.items() if num_bytes}


def stage_layers(job: Job, layout: Layout, *, stage: int) -> int:
    """Layers of a rank whose first stage this is; of stages that cannot be equal the first have one more."""
    if layout.stages:
        return layout.own_layers
    layers, stages = _layers_and_stages(job, layout, stage=stage)
    return sum(layers[each] for each in stages)


def stages_with_most(job: Job, layout: Layout) -> Sequence[int]:
    """The stages of ranks that may have most, in order; of like layers the first and the last."""
    if layout.at is not None:
        return [layout.at[1]]
    if len(job.shape.sizes.layers) > 1 or layout.counts_ends:
        return range(layout.pp)
    return sorted({0, layout.pp - 1})


def stage_parameters(job: Job, layout: Layout) -> float:
    """Parameters of one rank before data parallelism shards them, of the stage that has most."""
    return max(rank_parameters(job, layout, stage=stage) for stage in stages_with_most(job, layout))


def rank_parameters(job: Job, layout: Layout, *, stage: int) -> float:
    """Parameters of a rank of this stage, before data parallelism shards them."""
    return job.of_rank(*_layers_and_stages(job, layout, stage=stage), tp=layout.tp)


def hidden_parameters(job: Job, layout: Layout, *, stage: int) -> float:
    """Those of a rank's parameters that are in layers, before data parallelism shards them."""
    return job.hidden_of_rank(*_layers_and_stages(job, layout, stage=stage), tp=layout.tp)


def _layers_and_stages(job: Job, layout: Layout, *, stage: int) -> tuple[Sequence[int], range]:
    """Return the layers of each stage of the pipeline, and the stages of a rank whose first one is `stage`."""
    if layout.at is not None:
        return layout.stages[layout.at[0]], range(stage, stage + 1)
    num_stages = layout.pp * layout.stages_per_rank
    return _like_stages(job.shape.layers, num_stages, layout.counts_ends), range(stage, num_stages, layout.pp)


@functools.cache
def _like_stages(num_layers: int, num_stages: int, counts_ends: bool) -> tuple[int, ...]:
    ends = 1 if counts_ends and num_stages > 1 else 0
    first, *others = even_stages(num_layers + 2 * ends, num_stages)
    layers = [first - ends, *others] if others else [first]
    layers[-1] -= ends
    return tuple(layers)


def _optimizer_bytes(job: Job, layout: Layout, model: CostModel, *, stage: int, parameters: float) -> float:
    hidden = hidden_parameters(job, layout, stage=stage) if model.program.orthogonalizes else 0.0
    return model.memory.optimizer_bytes * (parameters - hidden) + model.memory.hidden_optimizer_bytes * hidden


def _exchanged_bytes(job: Job, layout: Layout, model: CostModel, *, stage: int, num_shards: int) -> float:
    """Bytes of Muon's momenta and updates in bf16, and of the messages that carry them, after the backward pass."""
    if not model.program.orthogonalizes:
        return 0.0
    hidden = hidden_parameters(job, layout, stage=stage)
    return 12 * hidden / num_shards if SHARING[layout.strategy].stage >= 1 or layout.tp > 1 else 6 * hidden


def _bytes_of_stage(job: Job, layout: Layout, model: CostModel, *, stage: int, num_shards: int) -> dict[str, float]:
    sharing, n = SHARING[layout.strategy], num_shards
    parameters = rank_parameters(job, layout, stage=stage)
    on_host, states_on_host = layout.offload == "parameters", layout.offload != "none"
    activations = _activations(job, layout, model, stage=stage)
    passing = {
        "activations": activations,
        "layer being recomputed": _recomputed(job, layout, model),
        "logits": _logits(job, layout, model) if stage == layout.pp - 1 else 0.0,
        "gathered sequence": _gathered_sequence(job, layout, model),
    }
    gradients = model.memory.gradient_bytes * parameters / (n if sharing.stage >= 2 else 1)
    if on_host:
        gradients = 0.0
    elif model.memory.frees_before_gradients and layout.accumulation == 1:
        gradients = max(0.0, gradients - sum(passing.values()))
    working = _working_weights(job, layout, model, parameters=parameters)
    parts = {
        "weights": 0.0 if on_host else model.program.weight_bytes * parameters / (n if sharing.stage >= 3 else 1),
        "gradients": gradients,
        "optimizer": 0.0
        if states_on_host
        else _optimizer_bytes(job, layout, model, stage=stage, parameters=parameters)
        / (n if sharing.stage >= 1 else 1),
        "optimizer's copy of the weights": model.memory.copy_bytes * parameters / n,
        "buckets": model.memory.bucket_bytes if layout.gradient_ranks > 1 else 0.0,
        "gathered or cast weights": working,
        **passing,
    }
    exchanged = _exchanged_bytes(job, layout, model, stage=stage, num_shards=n if sharing.stage >= 1 else 1)
    parts["Muon's updates"] = max(0.0, exchanged - sum(passing.values()))
    parts["fragmentation"] = model.memory.fragmentation * (working + sum(passing.values()))
    parts["process"] = model.memory.process_gib * GIB
    return parts


def _working_weights(job: Job, layout: Layout, model: CostModel, *, parameters: float) -> float:
    """Bytes of the weights that computing needs beside the stored ones.

    Stage 3: the gathered layers, what of the rest is kept from forward to backward, and whole gradients, of the output
    layer and of the layer whose gradients are on their way to the shards; all weights where they are gathered once a
    step, and all gradients where they are reduced once. Else copies for matrix products.
    """
    if SHARING[layout.strategy].stage < 3:
        return model.memory.cast_bytes * parameters
    tp = layout.tp
    layer = max(each.of_rank(tp) for each in job.shape.sizes.layers)
    output = job.shape.vocab_size * job.shape.width / tp
    gather, reduce = model.program.gather_bytes, model.program.reduce_bytes
    casts = model.memory.cast_bytes if gather == 4 else 0.0
    is_alone = model.program.gathers_embedding and not job.shape.tied
    outside = output if is_alone else job.outside.of_rank(tp)
    gathered = parameters if layout.gathers_once else LAYERS_GATHERED * layer + outside
    if layout.pp > 1:
        whole_gradients = parameters * reduce
    else:
        whole_gradients = layer * (gather + reduce) + output * gather
        whole_gradients += parameters * reduce if layout.reduces_once and layout.accumulation > 1 else 0.0
    return gathered * (gather + casts) + whole_gradients


def in_flight(layout: Layout, *, stage: int = 0) -> float:
    """Micro-batches whose activations a rank holds: 1F1B, and interleaved (Korthikanti et al. 2022, section 4.2.3)."""
    held = min(layout.pp - stage, layout.accumulation)
    more = (layout.pp - 1) / (layout.pp * layout.stages_per_rank) if layout.stages_per_rank > 1 else 0.0
    return held * (1 + more)


def _activations(job: Job, layout: Layout, model: CostModel, *, stage: int) -> float:
    """Bytes of activations: all layers and micro-batches in flight, and some tensors around the output layer."""
    tokens, shape = layout.tokens(job), job.shape
    shared = layout.tp if model.program.sequence_parallel else 1
    around_output = 2 / shared + 1 if model.program.kept.gathered else 3 / shared  # ours gathers what the words take
    ends = around_output * model.program.boundary_bytes * shape.width * tokens if stage == layout.pp - 1 else 0.0
    layers = in_flight(layout, stage=stage) * stage_layers(job, layout, stage=stage)
    return layers * activation_bytes_per_token(job, layout, model) * tokens + ends


def activation_bytes_per_token(job: Job, layout: Layout, model: CostModel) -> float:
    """Bytes that a layer keeps per token from its forward to its backward pass."""
    shape, tp = job.shape, layout.tp
    boundary = model.program.boundary_bytes * shape.width / (tp if model.program.sequence_parallel else 1)
    everything = _kept_per_token(job, layout, model)
    if layout.recompute == "none":
        return everything
    if layout.recompute == "full":
        return boundary
    if model.program.recomputes_scores_only:
        return everything - model.program.kept.scores * shape.heads * job.context / tp
    shared = (job.q_width + 2 * job.kv_width + (2 if job.is_gated else 1) * job.mlp_width) / tp
    summed = 2 * shape.width / (tp if model.program.sequence_parallel else 1)  # tp ranks have the sums whole
    selected = job.width_bytes * (model.program.products_kept * (shared + summed) + job.q_width / tp)
    return boundary + selected + 4 * shape.heads / tp


def _kept_per_token(job: Job, layout: Layout, model: CostModel) -> float:
    """Bytes that a layer keeps per token without recomputation.

    Where cp ranks share a sequence: also keys and values of the others' tokens; a causal model's result of attention,
    made in two pieces, as one; and GPT-2's own keys and values, which are views of one product.
    """
    kept = model.program.kept.bytes_per_token(job, layout.tp, sequence_parallel=model.program.sequence_parallel)
    if layout.cp == 1:
        return kept
    gathered = layout.cp if job.shape.architecture == "gpt2" else layout.cp - 1
    joined = job.width_bytes * job.q_width / layout.tp if job.is_causal else 0.0
    return kept + gathered * key_value_bytes(job, layout) + joined


def key_value_bytes(job: Job, layout: Layout) -> float:
    """Bytes of a token's keys and values in one layer, on one tp rank."""
    return 2 * job.kv_width * job.width_bytes / layout.tp


def _recomputed(job: Job, layout: Layout, model: CostModel) -> float:
    """Bytes of one layer's activations that its backward pass recomputes."""
    if layout.recompute == "none":
        return 0.0
    whole = _kept_per_token(job, layout, model)
    return layout.tokens(job) * max(0.0, whole - activation_bytes_per_token(job, layout, model))


def _gathered_sequence(job: Job, layout: Layout, model: CostModel) -> float:
    """Bytes of a layer's inputs and outputs, and their gradients, which sequence parallelism gathers whole."""
    if not model.program.sequence_parallel or layout.tp == 1:
        return 0.0
    return 4 * model.program.boundary_bytes * job.shape.width * layout.tokens(job)


def _logits(job: Job, layout: Layout, model: CostModel) -> float:
    """Bytes of all logits; or of a chunk's, the output layer's fp32 gradient, and what a chunk adds to it."""
    vocab_rows, tokens = job.shape.vocab_size / layout.tp, layout.tokens(job)
    if not model.program.chunked_logits:
        return vocab_rows * tokens * model.memory.logit_bytes
    chunk = chunk_tokens(job.width_bytes)
    added = job.width_bytes if tokens > chunk else 0
    if job.width_bytes == 4 and padding_words(int(vocab_rows)):  # a copy; in 16 bits it is the cast one
        added += 4
    return vocab_rows * (min(tokens, chunk) * model.memory.logit_bytes + (4 + added) * job.shape.width)
