"""The strategies: how the ranks share one optimizer step. A new one is one file, one line in STRATEGIES, and one row in
training/facts/strategies.py.

A strategy owns the whole micro-batch cycle (forward, backward, reduction, clipping, update), because
DeepSpeed's engines and pipeline schedules do. Every strategy must make the update that a single process would
make on the same global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from training.data.batch import Batch, Share
from training.facts import strategies as facts
from training.models.family import layers_of
from training.models.hidden_matrices import hidden_matrices
from training.models.language_model import LanguageModel
from training.records.plan import RankPlan
from training.runtime.mesh import Mesh
from training.runtime.tensor_cut import Parts
from training.strategies import ddp, fsdp, local_sgd, pipeline, tensor, torch_strategy, zero
from training.strategies.activation_checkpointing import compile_layers, recompute_in_backward
from training.strategies.async_tp import use_async_tp
from training.strategies.float8 import use_float8, use_torchao
from training.strategies.spikes import Spikes
from training.strategies.stats import StepStats

__all__ = ["STRATEGIES", "StepStats", "Strategy", "parallelize"]


class Strategy(Protocol):
    """The methods that training and evaluation need of a strategy; every method is called on all ranks alike."""

    module: nn.Module
    spikes: Spikes | None  # judges every step before its update; None: updates are made

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        """Make one optimizer step on this rank's micro-batches."""

    def loss(self, batch: Batch) -> Tensor:
        """Return a held-out batch's summed loss []; a sum over all ranks counts each sequence once. Call in no_grad."""

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each token's loss, fp32, in a held-out batch, and whether its target is the likeliest word, bool.

        Of ranks with the same tokens only one returns them, the others zeros: a sum over all ranks counts each token
        once. Call in no_grad.
        """

    def next_logits(self, inputs: Tensor, places: Tensor) -> Tensor:
        """Return the logits fp32 [batch, vocab] of the word after each place: int64 [batch, length] and [batch].

        All ranks pass the same inputs, and get the same logits up to rounding. Call in no_grad.
        """

    def weights(self) -> Iterator[tuple[str, Parts]]:
        """Return this rank's parts of the fp32 weights and of persistent buffers, by Hugging Face name, tied ones once,
        without communication.

        All ranks of a pipeline stage get the same names in the same order; stages get different ones.
        """

    def moments(self) -> Iterator[tuple[str, Parts]]:
        """Return the same of the moments: AdamW's NAME.exp_avg and NAME.exp_avg_sq, and Muon's NAME.momentum_buffer;
        frozen parameters have none."""

    def optimizer_scalars(self) -> dict[str, Tensor]:
        """Return the optimizer's scalars [], the same on all ranks: `step`, …."""

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the whole `moments` and the `optimizer_scalars` that any strategy saved."""

    def rank_state(self) -> dict[str, Tensor]:
        """Return the tensors by name (no copies) that only this rank holds and that a bit-exact resume needs too."""

    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's `rank_state`, on the same mesh; called after `load_optimizer_state`."""


Build = Callable[[RankPlan, Mesh, LanguageModel, Mapping[str, Tensor]], Strategy]

STRATEGIES: dict[str, Build] = {
    "single": torch_strategy.TorchStrategy,
    "ddp": ddp.Ddp,
    "fsdp": fsdp.build,
    "hsdp": fsdp.build,
    "local-sgd": local_sgd.LocalSgd,
    "zero1": zero.build,
    "zero2": zero.build,
    "zero3": zero.build,
}


def parallelize(
    plan: RankPlan, mesh: Mesh, model: LanguageModel, *, weights: Mapping[str, Tensor], device: torch.device
) -> Strategy:
    """Apply tensor and context parallelism, the rank's precision, activation checkpointing, compilation, then the
    pipeline or data parallelism.

    `model` is in host memory, unfilled; each rank takes its part of the whole `weights`. The model moves to the device
    after it is split; fsdp, hsdp and zero3 move it layer by layer, since the models that need them do not fit whole.
    """
    row = facts.STRATEGIES[plan.strategy]
    if plan.config.train.optimizer == "muon" and model.training:
        model.matrices = hidden_matrices(model.hf)
    if plan.mesh["tp"] > 1:
        tensor.shard_matrices(model, mesh["tp"], sequence_parallel=plan.sequence_parallel)
    if plan.cp > 1:
        model.share_context(mesh["cp"].get_group())
    if plan.mesh["pp"] > 1:
        pipeline.keep_own_stages(plan, model)
    if row.stage < 3:
        model.to(device)
    precision = plan.precision
    if plan.precisions:
        precision = plan.precisions[mesh["dp"].get_local_rank() // plan.cp]
        model.compute_in(precision)
    if plan.config.train.residual == "bf16" and precision in {"bf16", "fp8"}:  # an evaluation computes in fp32
        model.carry_bf16()
    if precision == "fp8" and plan.config.parallel.fp8_by == "torchao":
        use_torchao(layers_of(model.hf), gathers=row.by_fsdp, device=device)
    elif precision == "fp8":
        use_float8(layers_of(model.hf))
    if plan.activation_checkpointing != "none":
        recompute_in_backward(model, plan.activation_checkpointing)
    if plan.compiled:
        compile_layers(model, one_shape=not plan.rebalance, device_kind=plan.device_kind)
    if plan.config.parallel.async_tp and plan.sequence_parallel:
        use_async_tp(mesh["tp"].get_group(), device)
    if plan.mesh["pp"] > 1:
        return pipeline.Pipeline(plan, mesh, model, weights)
    return STRATEGIES[plan.strategy](plan, mesh, model, weights)
