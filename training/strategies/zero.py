"""ZeRO stages 1, 2 and 3 by DeepSpeed: optimizer state, gradients and weights sharded over the ranks.

With tensor or pipeline parallelism, or Muon, stage 1 is training/strategies/sharded_optimizer.py, not DeepSpeed's.

Weights stay fp32 and products are autocast inside LanguageModel, as in the other strategies, so that a run
may change strategy without changing its arithmetic. DeepSpeed's JSON is derived from the plan, never written by hand.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.data.batch import Batch, Share
from training.facts.strategies import STRATEGIES
from training.models.freezing import not_reached, without_gradient
from training.models.init_weights import fill
from training.models.language_model import LanguageModel
from training.models.state import state_of
from training.records.plan import RankPlan
from training.runtime.mesh import Mesh
from training.runtime.step_trace import phase
from training.runtime.tensor_cut import Parts, flat_parts, whole_on_each
from training.strategies.optim import MOMENTS, LossScale, build_adamw, set_learning_rate
from training.strategies.spikes import Spikes
from training.strategies.stats import StepStats
from training.strategies.torch_strategy import TorchStrategy


def runs_deepspeed(plan: RankPlan) -> bool:
    is_mesh = plan.mesh["tp"] > 1 or plan.mesh["pp"] > 1
    return STRATEGIES[plan.strategy].by_deepspeed and not is_mesh and plan.config.train.optimizer == "adamw"


def build(plan: RankPlan, mesh: Mesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> Zero | TorchStrategy:
    if not runs_deepspeed(plan):
        return TorchStrategy(plan, mesh, model, weights, shard_optimizer=True)
    if STRATEGIES[plan.strategy].stage < 3:
        fill(model.hf, weights)  # DeepSpeed copies them when it takes the model over
    return Zero(plan, mesh, model, weights)


def deepspeed_config(plan: RankPlan) -> dict[str, Any]:
    """Return DeepSpeed's JSON for this plan; batch sizes and stage follow from the plan."""
    bucket = plan.config.parallel.bucket_mib * 2**18  # in fp32 numbers
    zero_stage = STRATEGIES[plan.strategy].stage
    zero: dict[str, Any] = {
        "stage": zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # With it, stages 1 and 2 reduce a bucket while the backward pass fills another; a CPU cannot overlap the two.
        # In stage 3, true is DeepSpeed's default.
        "overlap_comm": plan.device_kind == "cuda" or zero_stage == 3,
    }
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": plan.device_kind == "cuda"}
    if plan.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": plan.device_kind == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,  # DeepSpeed only counts samples by it: shares may differ
        "gradient_accumulation_steps": plan.accumulation * plan.config.train.most_accumulated,  # `step` ends each step
        "gradient_clipping": plan.config.train.clip_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # torch's own AdamW: no compiler needed, the same numbers as ddp
        "steps_per_print": 10**9,
    }


def import_deepspeed(device_kind: str) -> Any:
    """Import DeepSpeed for devices of a plan's kind; by default it uses GPUs wherever there are any, even on CPU ranks.

    On CPUs its shared-memory op is disabled, because it compiles at the first start and needs g++ on every host.
    """
    os.environ["DS_ACCELERATOR"] = device_kind
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    if device_kind == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _shard_before_it_moves(model: LanguageModel, plan: RankPlan, weights: Mapping[str, Tensor], *, rank: int) -> None:
    """Partition the weights one by one; otherwise DeepSpeed moves the whole model to the device (its engine.py).

    The model is filled after that, so that each rank reads only what it keeps. Call it after AdamW's groups are made: a
    partitioned parameter no longer shows its number of dimensions.
    """
    import deepspeed

    deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config(plan))
    for name, tensor in state_of(model.hf).items():
        if not isinstance(tensor, nn.Parameter):
            tensor.copy_(weights[name])
            continue
        partition: Tensor = tensor.ds_tensor  # type: ignore[attr-defined]
        own = own_numbers(weights[name], partition.numel(), rank)
        partition.detach()[: own.numel()].copy_(own)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(plan.device_kind))


def own_numbers(whole: Tensor, numel: int, rank: int) -> Tensor:
    """Return a rank's partition in stage 3, a view: `numel` of the tensor's numbers, fewer on the last ranks."""
    return whole.flatten()[numel * rank : numel * (rank + 1)]


class _InForward(nn.Module):
    """Runs a method of the model inside a `forward`, because DeepSpeed's stage 3 gathers weights only there.

    Stage 3 prefetches weights in the order in which modules were called last time. The model itself is not called as a
    module, so that training and sampling call the same modules.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return method(*arguments)


class Zero:
    def __init__(self, plan: RankPlan, mesh: Mesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
        deepspeed = import_deepspeed(plan.device_kind)
        train = plan.config.train
        self.model, self.rank = model, mesh["dp"].get_local_rank()
        self.stage = STRATEGIES[plan.strategy].stage
        adamw = build_adamw(model, train, fused=True)
        if self.stage == 3:
            _shard_before_it_moves(model, plan, weights, rank=self.rank)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=_InForward(model), optimizer=adamw, config=deepspeed_config(plan), dist_init_required=False
        )
        self.module, self.dp, self.is_checked = self.engine, mesh["dp"].size(), False
        self.ranks = [*range(plan.world_size)]  # tp and pp are 1
        self.scale = LossScale(dynamic=plan.scales_loss)
        self.may_skip = train.on_nonfinite == "skip" or plan.scales_loss
        self.spikes: Spikes | None = None
        self.spike, self.spike_norm = "", torch.tensor(0.0)
        self.losses, self.num_targets = list[Tensor](), 0  # of the current step
        self.added: dict[str, Tensor] = {}  # of the step that was judged before its update
        if train.on_spike == "skip":
            self._judge_before_update()
        self.optimizer.check_grad_overflow = self.may_skip  # its step then skips gradients that are not finite
        self._create_moments()
        self.fragment_lengths = self._fragment_lengths() if self.stage < 3 else {}

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        set_learning_rate(self.optimizer.param_groups, learning_rate)
        scale = self.scale.value
        if self.scale.dynamic:
            self.optimizer.override_loss_scale(scale)
        self.losses, self.num_targets, self.spike, self.added = [], share.num_targets, "", {}
        for number, batch in enumerate(share.batches, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(share.batches))
            with phase("forward"):
                loss = self.engine(self.model.forward, batch.inputs, batch.targets, batch.positions, batch.documents)
            self._check_used(loss)
            with phase("backward"):
                self.engine.backward(loss * (self.dp / share.num_targets), scale_wrt_gas=False)
            self.losses.append(loss.detach())
            with phase("optimizer"):
                self.engine.step()
        overflow = self.may_skip and self.optimizer.overflow and not self.spike
        norm = self.spike_norm if self.spike else self.engine.get_global_grad_norm()
        self.scale.update(overflow=overflow)
        loss_sum = torch.stack(self.losses).sum()
        return StepStats(
            loss_sum=loss_sum,
            added=self.added or self.model.take_added(loss_sum.device),
            num_targets=share.num_targets,
            grad_norm=torch.as_tensor(float("inf") if overflow or norm is None else norm),
            loss_scale=scale,
            skipped=bool(overflow or self.spike),
            spike=self.spike,
        )

    def _judge_before_update(self) -> None:
        """Let `spikes` judge the gradient's norm inside DeepSpeed's step, which skips an update of infinite norm."""
        name = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        of_gradient: Callable[[], Any] = getattr(self.optimizer, name)

        def judged() -> Any:
            norms = of_gradient()  # stage 3: of each group; negative where they are not finite
            if self.spikes is None:
                return norms
            each = torch.stack([torch.as_tensor(norm) for norm in norms]) if self.stage == 3 else torch.as_tensor(norms)
            if bool((each < 0).any()):
                return norms
            self.spike_norm = each.norm() / self.scale.value
            loss_sum = torch.stack(self.losses).sum()
            self.added = self.model.take_added(loss_sum.device)
            cross_entropy = loss_sum - sum(self.added.values())
            self.spike = self.spikes.judge_together(cross_entropy, self.spike_norm, num_targets=self.num_targets)
            if not self.spike:
                return norms
            infinite = torch.full_like(each, float("inf"))
            return [*infinite] if self.stage == 3 else infinite

        setattr(self.optimizer, name, judged)

    def _check_used(self, loss: Tensor) -> None:
        """Raise ValueError, before the first backward, for trained parameters that get no gradient.

        DeepSpeed would take it for 0, so that weight decay shrinks them; the other strategies leave them as they are.
        """
        if not self.is_checked and (unused := not_reached(loss, dict(self.trainable()))):
            names = (name for name, _ in self.model.hf.named_parameters())
            raise ValueError(f"{without_gradient(unused, names)}; DeepSpeed would shrink them by weight decay")
        self.is_checked = True

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.engine(self.model.forward, batch.inputs, batch.targets, batch.positions, batch.documents)
        return loss

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, right = self.engine(self.model.scores, batch)
        return losses, right

    def next_logits(self, inputs: Tensor, places: Tensor) -> Tensor:
        logits: Tensor = self.engine(self.model.next_logits, inputs, places)
        return logits

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.hf.named_parameters() if p.requires_grad)

    def weights(self) -> Iterator[tuple[str, Parts]]:
        from deepspeed.utils import safe_get_local_fp32_param

        for name, tensor in state_of(self.model.hf).items():
            if self.stage < 3 or not isinstance(tensor, nn.Parameter):
                yield name, whole_on_each(tensor.detach(), self.ranks)
            else:  # the optimizer does not hold frozen parameters
                frozen = not tensor.requires_grad
                own: Tensor = tensor.ds_tensor if frozen else safe_get_local_fp32_param(tensor)  # type: ignore[attr-defined]
                yield name, self._partitions_of(tensor, own.detach())

    def moments(self) -> Iterator[tuple[str, Parts]]:
        from deepspeed.utils import safe_get_local_optimizer_state

        for name, parameter in self.trainable():
            for moment in MOMENTS:
                if self.stage < 3:
                    parts = self._fragments_of(name, parameter, moment)
                else:
                    parts = self._partitions_of(parameter, safe_get_local_optimizer_state(parameter, moment))
                yield f"{name}.{moment}", parts

    def optimizer_scalars(self) -> dict[str, Tensor]:
        return {"step": next(iter(self._states()))["step"], **self.scale.state()}

    def _partitions_of(self, parameter: nn.Parameter, own: Tensor) -> Parts:
        """Return a parameter's parts in stage 3: equally many numbers on each rank, with padding at the end."""
        lengths = [own.numel()] * self.dp
        return flat_parts(own, shape=parameter.ds_shape, ranks=self.ranks, lengths=lengths)  # type: ignore[attr-defined]

    def _fragments_of(self, name: str, parameter: nn.Parameter, moment: str) -> Parts:
        """Return a moment's parts in stages 1 and 2, which cut one flat row of all parameters over ranks.

        A rank may hold all numbers of a parameter, some, or none.
        """
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        own = parameter.new_empty(0) if mapping is None else mapping.get_optim_state_fragment(moment)
        return flat_parts(own, shape=parameter.shape, ranks=self.ranks, lengths=self.fragment_lengths[name])

    def _fragment_lengths(self) -> dict[str, list[int]]:
        """Return the count of each parameter's numbers in each rank's partition, by parameter name. Collective."""
        mappings = {name: parameter._hp_mapping for name, parameter in self.trainable()}  # type: ignore[attr-defined]
        own = [0 if mapping is None else mapping.lp_fragment_address.numel for mapping in mappings.values()]
        gathered: list[list[int]] = [[]] * self.dp
        dist.all_gather_object(gathered, own)
        return {name: [of_rank[number] for of_rank in gathered] for number, name in enumerate(mappings)}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trainable():
            for moment in MOMENTS:
                self._set_moment(parameter, moment, state[f"{name}.{moment}"])
        for partition in self._states():
            partition["step"].copy_(state["step"])
        self.scale.load(state)

    def rank_state(self) -> dict[str, Tensor]:
        return {}

    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: a rank has no state of its own."""

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        from deepspeed.utils import (
            safe_get_local_optimizer_state,
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, value, moment)
            return
        # DeepSpeed's setter overruns if the ranks do not divide the parameter evenly: pad like its partitions.
        numel = safe_get_local_optimizer_state(parameter, moment).numel()
        own = own_numbers(value, numel, self.rank)
        safe_set_local_optimizer_state(parameter, nn.functional.pad(own, (0, numel - own.numel())), moment)

    def _partitions(self) -> list[Tensor]:
        """Return this rank's flat fp32 parameter partitions, the keys of the inner optimizer's state."""
        zero = self.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _states(self) -> Iterator[dict[str, Tensor]]:
        return (self.optimizer.optimizer.state[partition] for partition in self._partitions())

    def _create_moments(self) -> None:
        """Make AdamW's moments, zeros, now instead of at its first step, so that a checkpoint can be loaded before it.

        Stages 1 and 2 link parameters to moments once, when the first of the groups has stepped; the second
        group's moments would then be missing from every checkpoint.
        """
        for partition in self._partitions():
            self.optimizer.optimizer.state[partition] = {
                "step": torch.zeros((), device=partition.device),
                **{moment: torch.zeros_like(partition) for moment in MOMENTS},
            }
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()
