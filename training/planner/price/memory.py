"""Predicts one rank's memory at the peak of a step, by part.

Weights, gradients and optimizer by ZeRO's stages (Rajbhandari et al. 2020, section 5); activations by Korthikanti et
al. 2022 (arXiv:2205.05198): section 4 for tensor and sequence parallelism, eq. 5 for pipelines, section 5 for
recomputation. Attention scores count only where the cost model stores them. Peaks of parts that never coincide are not
added.
"""

from __future__ import annotations

from training.facts.loss_chunks import chunk_tokens, vocab_padding
from training.planner.price.step import Step, hidden_parameters, rank_parameters, stage_layers, stages_with_most

GIB = 2**30
LAYERS_GATHERED = 2  # the one that computes, and the next


def memory_gib(step: Step) -> dict[str, float]:
    """Memory by part, in GiB, of the rank that holds most."""
    ranks = [_bytes_of_stage(step, stage) for stage in stages_with_most(step.job, step.layout)]
    largest = max(ranks, key=lambda parts: sum(parts.values()))
    return {part: num_bytes / GIB for part, num_bytes in largest.items() if num_bytes}


def _bytes_of_stage(step: Step, stage: int) -> dict[str, float]:
    layout, costs, program = step.layout, step.model.memory, step.model.program
    parameters = rank_parameters(step.job, layout, stage)
    hidden = hidden_parameters(step.job, layout, stage) if program.orthogonalizes else 0.0
    on_host, states_on_host = layout.offload == "parameters", layout.offload != "none"
    # a layer's inputs and outputs, and their gradients, which sequence parallelism gathers whole
    sequence = 4 * program.boundary_bytes * step.job.shape.width * step.tokens if step.is_split else 0.0
    passing = {
        "activations": _activations(step, stage),
        "layer being recomputed": _recomputed(step),
        "logits": _logits(step) if stage == layout.pp - 1 else 0.0,
        "gathered sequence": sequence,
    }
    gradients = costs.gradient_bytes * parameters / step.sharded_by(2)
    if on_host:
        gradients = 0.0
    elif costs.frees_before_gradients and layout.accumulation == 1:
        gradients = max(0.0, gradients - sum(passing.values()))
    working = _working_weights(step, parameters)
    states = costs.optimizer_bytes * (parameters - hidden) + costs.hidden_optimizer_bytes * hidden
    # Muon's momenta and updates in bf16, and the messages that carry them, after the backward pass
    exchanged = 12 * hidden / step.sharded_by(1) if step.layout.row.stage >= 1 or layout.tp > 1 else 6 * hidden
    return {
        "weights": 0.0 if on_host else program.weight_bytes * parameters / step.sharded_by(3),
        "gradients": gradients,
        "optimizer": 0.0 if states_on_host else states / step.sharded_by(1),
        "optimizer's copy of the weights": costs.copy_bytes * parameters / step.num_shards,
        "buckets": costs.bucket_bytes if layout.gradient_ranks > 1 else 0.0,
        "gathered or cast weights": working,
        **passing,
        "Muon's updates": max(0.0, exchanged - sum(passing.values())),
        "fragmentation": costs.fragmentation * (working + sum(passing.values())),
        "process": costs.process_gib * GIB,
    }


def _working_weights(step: Step, parameters: float) -> float:
    """Bytes of the weights that computing needs beside the stored ones.

    Stage 3: the gathered layers, what of the rest is kept from forward to backward, and whole gradients, of the output
    layer and of the layer whose gradients are on their way to the shards; all weights where they are gathered once a
    step, and all gradients where they are reduced once. Else copies for matrix products.
    """
    costs, program, layout, shape = step.model.memory, step.model.program, step.layout, step.job.shape
    if step.layout.row.stage < 3:
        return costs.cast_bytes * parameters
    layer = max(each.of_rank(layout.tp) for each in shape.sizes.layers)
    output = shape.vocab_size * shape.width / layout.tp
    gather, reduce = program.gather_bytes, program.reduce_bytes
    casts = costs.cast_bytes if gather == 4 else 0.0
    is_alone = program.gathers_embedding and not shape.tied
    outside = output if is_alone else step.job.outside.of_rank(layout.tp)
    gathered = parameters if layout.gathers_once else LAYERS_GATHERED * layer + outside
    if layout.pp > 1:
        whole_gradients = parameters * reduce
    else:
        whole_gradients = layer * (gather + reduce) + output * gather
        whole_gradients += parameters * reduce if layout.reduces_once and layout.accumulation > 1 else 0.0
    return gathered * (gather + casts) + whole_gradients


def _activations(step: Step, stage: int) -> float:
    """Bytes of activations: all layers, all micro-batches in flight under 1F1B or interleaved (Korthikanti et al.
    2022, section 4.2.3), and some tensors around the output layer.
    """
    layout, program = step.layout, step.model.program
    shared = layout.tp if program.sequence_parallel else 1
    around_output = 2 / shared + 1 if program.kept.gathered else 3 / shared  # ours gathers what the words take
    at_end = stage == layout.pp - 1
    ends = around_output * program.boundary_bytes * step.job.shape.width * step.tokens if at_end else 0.0
    more = (layout.pp - 1) / (layout.pp * layout.stages_per_rank) if layout.stages_per_rank > 1 else 0.0
    in_flight = min(layout.pp - stage, layout.accumulation) * (1 + more)
    layers = in_flight * stage_layers(step.job, layout, stage)
    return layers * activation_bytes_per_token(step) * step.tokens + ends


def activation_bytes_per_token(step: Step) -> float:
    """Bytes that a layer keeps per token from its forward to its backward pass."""
    job, layout, program = step.job, step.layout, step.model.program
    shape, tp = job.shape, layout.tp
    boundary = program.boundary_bytes * shape.width / (tp if program.sequence_parallel else 1)
    everything = _kept_per_token(step)
    if layout.recompute == "none":
        return everything
    if layout.recompute == "full":
        return boundary
    if program.recomputes_scores_only:
        return everything - program.kept.scores * shape.heads * job.context / tp
    shared = (job.q_width + 2 * job.kv_width + (2 if job.is_gated else 1) * job.mlp_width) / tp
    summed = 2 * shape.width / (tp if program.sequence_parallel else 1)  # tp ranks have the sums whole
    selected = job.width_bytes * (program.products_kept * (shared + summed) + job.q_width / tp)
    return boundary + selected + 4 * shape.heads / tp


def _kept_per_token(step: Step) -> float:
    """Bytes that a layer keeps per token without recomputation.

    Where cp ranks share a sequence: also keys and values of the others' tokens; a causal model's result of attention,
    made in two pieces, as one; and GPT-2's own keys and values, which are views of one product.
    """
    job, layout, program = step.job, step.layout, step.model.program
    kept = program.kept.bytes_per_token(job, layout.tp, sequence_parallel=program.sequence_parallel)
    if layout.cp == 1:
        return kept
    gathered = layout.cp if job.shape.architecture == "gpt2" else layout.cp - 1
    joined = job.width_bytes * job.q_width / layout.tp if job.is_causal else 0.0
    return kept + gathered * step.key_value_bytes + joined


def _recomputed(step: Step) -> float:
    """Bytes of one layer's activations that its backward pass recomputes."""
    if step.layout.recompute == "none":
        return 0.0
    return step.tokens * max(0.0, _kept_per_token(step) - activation_bytes_per_token(step))


def _logits(step: Step) -> float:
    """Bytes of all logits; or of a chunk's, the output layer's fp32 gradient, and what a chunk adds to it."""
    shape, width_bytes, costs = step.job.shape, step.job.width_bytes, step.model.memory
    vocab_rows, tokens = shape.vocab_size / step.layout.tp, step.tokens
    if not step.model.program.chunked_logits:
        return vocab_rows * tokens * costs.logit_bytes
    chunk = chunk_tokens(width_bytes)
    added = width_bytes if tokens > chunk else 0
    if width_bytes == 4 and vocab_padding(int(vocab_rows)):  # a copy; in 16 bits it is the cast one
        added += 4
    return vocab_rows * (min(tokens, chunk) * costs.logit_bytes + (4 + added) * shape.width)
