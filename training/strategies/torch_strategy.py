"""Training in one process, and the base of all strategies but DeepSpeed's: one step, and saving and loading state."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.data.batch import Batch, Share
from training.models.freezing import without_gradient
from training.models.language_model import LanguageModel
from training.models.state import state_of
from training.records.plan import RankPlan
from training.runtime.mesh import Mesh, all_reduce_together, make_groups
from training.runtime.step_trace import phase
from training.runtime.tensor_cut import Parts, own_part, parts_of, sharded_like
from training.strategies.float8 import scale_float8_weights
from training.strategies.muon import MUON_MOMENTS, Held, Muon, peers_of
from training.strategies.optim import MOMENTS, LossScale, build_adamw, set_learning_rate
from training.strategies.sharded_optimizer import ShardedOptimizer
from training.strategies.spikes import Spikes
from training.strategies.stats import StepStats

logger = logging.getLogger(__name__)


class TorchStrategy:
    """A model, possibly cut over tp ranks or sharded over dp ranks, and a fused AdamW for this rank's parameters.

    `module`: the model as its strategy wraps it; by default the model itself.
    The summed loss is divided by the number of targets of all ranks, so that each target has the same weight in unequal
    micro-batches. `averaged_over`: the ranks over which the module's reduction averages gradients; the loss is
    multiplied by their number. `norm_groups`: groups whose ranks hold different parts of the gradient; the squared norm
    is summed over them. `shard_optimizer`: dp ranks, which all hold the same weights, split the update. `needs_all`:
    the module's reduction waits for a gradient of every parameter, and would never end without one.
    """

    def __init__(
        self,
        plan: RankPlan,
        mesh: Mesh,
        model: LanguageModel,
        weights: Mapping[str, Tensor],
        *,
        module: nn.Module | None = None,
        averaged_over: int = 1,
        norm_groups: tuple[dist.ProcessGroup, ...] = (),
        shard_optimizer: bool = False,
        needs_all: bool = False,
    ) -> None:
        train = plan.config.train
        self.model, self.module, self.mesh, self.averaged_over = model, module or model, mesh, averaged_over
        self.clip_norm, self.may_skip = train.clip_norm, train.on_nonfinite == "skip" or plan.scales_loss
        self.scale = LossScale(dynamic=plan.scales_loss)
        self.spikes: Spikes | None = None
        self.needs_all, self.is_checked = needs_all, False
        self.by_torchao = plan.config.parallel.fp8_by == "torchao"
        axes = (*(("dp",) if shard_optimizer else ()), *(("tp",) if plan.mesh["tp"] > 1 else ()))
        self.norm_groups = (*norm_groups, *(mesh[axis].get_group() for axis in axes))
        self.counts_replicated = mesh["tp"].get_local_rank() == 0  # tp peers hold the same norms and biases
        self.all_ranks = torch.arange(plan.world_size).view(-1, plan.mesh["tp"])
        # Read once: while FSDP2 has weights gathered, the model lists those.
        self.parameters_by_name = self.saved_names()
        self.trainable = {
            name: p for name, p in self.parameters_by_name.items() if isinstance(p, nn.Parameter) and p.requires_grad
        }
        self.sharded = ShardedOptimizer(self.trainable, mesh["dp"]) if shard_optimizer else None
        if self.sharded is not None:
            self.trainable = self.sharded.shards
        self.parameters = list(self.trainable.values())
        self.muon_matrices = self._hidden_matrices() if train.optimizer == "muon" and model.training else {}
        self.optimizer = build_adamw(model, train, fused=True, shards=self.trainable, build=self._builder(plan))
        self.exchanged_bytes = self.optimizer.sent_bytes if isinstance(self.optimizer, Muon) else 0
        self.norm_parameters = [p for name, p in self.trainable.items() if name in model.cuts or self.counts_replicated]
        # Their gradient covers only this tp rank's pieces of sequences, or heads.
        self.partial_gradients: list[nn.Parameter] = []
        if model.sequence_pieces > 1 or model.partial:
            some = model.partial if model.sequence_pieces == 1 else self.trainable.keys() - model.cuts.keys()
            self.partial_gradients = [p for name, p in self.trainable.items() if name in some]
        self.load_weights(weights)
        for parameter in self.parameters:  # AdamW makes this state at its first step: a checkpoint may come earlier
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                **{name: torch.zeros_like(parameter, requires_grad=False) for name in self.moment_names(parameter)},
            }

    def _hidden_matrices(self) -> dict[nn.Parameter, Held]:
        """Return the parameters that Muon updates, and where their parts are."""
        return {
            p: Held(
                name,
                matrix=self.model.matrices[name],
                parts=parts_of(p.detach(), cut=self.model.cuts.get(name), ranks=self.ranks_alike(name)),
                cut=self.model.cuts.get(name),
            )
            for name, p in self.trainable.items()
            if name in self.model.matrices
        }

    def _builder(self, plan: RankPlan) -> Callable[..., torch.optim.AdamW]:
        if plan.config.train.optimizer != "muon" or not self.model.training:
            return torch.optim.AdamW
        groups = peers_of(plan)
        peers = next(ranks for ranks in groups if dist.get_rank() in ranks)
        made = make_groups(plan, [ranks for ranks in groups if len(ranks) > 1])
        return functools.partial(
            Muon, held=self.muon_matrices, peers=peers, group=made.get(peers), tp=self.all_ranks.shape[1]
        )

    def moment_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names of the tensors that the optimizer keeps of a parameter."""
        return MUON_MOMENTS if parameter in self.muon_matrices else MOMENTS

    def saved_names(self) -> dict[str, Tensor]:
        """Return this rank's parameters, or its pieces of them, and persistent buffers, by the name in the files."""
        return state_of(self.model.hf)

    def backward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context in which each micro-batch runs; strategies may reduce gradients only in the last one."""
        return nullcontext()

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        set_learning_rate(self.optimizer.param_groups, learning_rate)
        weight = self.averaged_over * self.scale.value / share.num_targets
        losses = []
        for number, batch in enumerate(share.batches, start=1):
            with self.backward_context(last=number == len(share.batches)):
                with phase("forward"):
                    loss = self.module(batch.inputs, batch.targets, batch.positions, batch.documents)
                with phase("backward"):
                    (loss * weight).backward()
            losses.append(loss.detach())
        self.reduce_gradients()
        with phase("optimizer"):
            return self.update(torch.stack(losses).sum(), share.num_targets)

    def reduce_gradients(self) -> None:
        """Sum over ranks, after the last micro-batch, the gradients that the module's backward did not sum."""
        if self.sharded is not None:
            self.sharded.reduce_gradients()

    def update(self, loss_sum: Tensor, num_targets: int) -> StepStats:
        """Clip the gradients, update the weights, free the gradients.

        With `may_skip`, a norm that is not finite skips the update, on all ranks alike because the norm is global; so
        does a spike, with `spikes`.
        """
        scale = self.scale.value
        self.check_used()
        if self.partial_gradients:
            all_reduce_together(self.gradients(self.partial_gradients), self.mesh["tp"].get_group())
        if scale != 1.0:
            torch._foreach_div_(self.gradients(self.parameters), scale)
        norm = self.global_norm()
        loss_sum, spike = self.counted_once(loss_sum), ""
        added = {name: self.counted_once(part) for name, part in self.model.take_added(loss_sum.device).items()}
        overflow = self.may_skip and not bool(torch.isfinite(norm))
        if self.spikes is not None and not overflow:
            cross_entropy = loss_sum - sum(added.values())
            spike = self.spikes.judge_together(cross_entropy, norm, num_targets=num_targets)
        if not (overflow or spike):
            if self.clip_norm:
                nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
            self.optimizer.step()
            if self.by_torchao:
                scale_float8_weights(self.module)
            if self.sharded is not None:
                self.sharded.gather_weights()
        self.optimizer.zero_grad(set_to_none=True)
        self.scale.update(overflow=overflow)
        return StepStats(
            loss_sum=loss_sum,
            added=added,
            num_targets=num_targets,
            grad_norm=norm,
            loss_scale=scale,
            skipped=bool(overflow or spike),
            spike=spike,
            sent_bytes=self.sent_bytes(),
        )

    def check_used(self) -> None:
        """Name, after the first backward, the trained parameters without a gradient, which no update changes.

        Raises ValueError for them if the module's reduction `needs_all`.
        """
        if self.is_checked:
            return
        self.is_checked = True
        unused = [name for name, parameter in self.trainable.items() if parameter.grad is None]
        if unused and self.needs_all:
            raise ValueError(
                f"{without_gradient(unused, self.parameters_by_name)}; ddp and local-sgd wait for all gradients"
            )
        if unused and self.counts_replicated and self.mesh["dp"].get_local_rank() == 0:
            logger.warning(
                "%s, or leave them: they keep their values", without_gradient(unused, self.parameters_by_name)
            )

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sent in the step that ends; 0: not counted."""
        return 0

    @staticmethod
    def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return the gradients that this rank holds, or its shards of them."""
        grads = [p.grad for p in parameters if p.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]

    def global_norm(self) -> Tensor:
        """Return the L2 norm [] of the whole gradient, with each element counted once."""
        norm = nn.utils.get_total_norm(self.gradients(self.norm_parameters))
        if not self.norm_groups:
            return norm
        squares = norm.square().to(self.parameters[0].device)
        for group in self.norm_groups:
            dist.all_reduce(squares, group=group)
        return squares.sqrt()

    def loss(self, batch: Batch) -> Tensor:
        loss = self.module(batch.inputs, batch.targets, batch.positions, batch.documents)
        return self.counted_once(loss)

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, right = self.model.scores(batch)
        return self.counted_once(losses), self.counted_once(right)

    def next_logits(self, inputs: Tensor, places: Tensor) -> Tensor:
        return self.model.next_logits(inputs, places)

    def counted_once(self, loss: Tensor) -> Tensor:
        return loss if self.counts_replicated else torch.zeros_like(loss)

    def weights(self) -> Iterator[tuple[str, Parts]]:
        for name, tensor in self.parameters_by_name.items():
            yield name, self.parts(name, tensor.detach())

    def moments(self) -> Iterator[tuple[str, Parts]]:
        for name, parameter in self.trainable.items():
            for moment in self.moment_names(parameter):
                yield f"{name}.{moment}", self.parts(name, self.optimizer.state[parameter][moment])

    def optimizer_scalars(self) -> dict[str, Tensor]:
        steps = (own_part(self.optimizer.state[parameter]["step"]) for parameter in self.parameters)
        return {"step": next(steps, torch.zeros(())), **self.scale.state()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self.parameters_by_name.items():
            own, target = self.own(name, weights[name], tensor), tensor.detach()
            if isinstance(own, DTensor) and isinstance(target, DTensor):
                own, target = own.to_local(), target.to_local()
            target.copy_(own)

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trainable.items():
            names = self.moment_names(parameter)
            moments = {moment: self.own(name, state[f"{name}.{moment}"], parameter) for moment in names}
            self.optimizer.state[parameter] = {
                "step": state["step"].to(parameter.device, copy=True),
                # On a CPU, views of the mapped checkpoint file must not stay: on tmpfs they would keep it in memory.
                **{name: own.clone() if own.device.type == "cpu" else own for name, own in moments.items()},
            }
        self.scale.load(state)

    def rank_state(self) -> dict[str, Tensor]:
        return {}

    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.rank_state().items():
            tensor.copy_(state[name])

    def parts(self, name: str, tensor: Tensor) -> Parts:
        """Return the parts that the ranks hold of a parameter, of its moment, or of a buffer."""
        return parts_of(tensor, cut=self.model.cuts.get(name), ranks=self.ranks_with(name))

    def ranks_with(self, name: str) -> Tensor:
        """Return the ranks that hold a parameter or buffer, and save it, [dp, tp]."""
        return self.all_ranks

    def ranks_alike(self, name: str) -> Tensor:
        """Return the ranks that hold the same weights, or parts of them, and make the same update, [dp, tp]."""
        return self.ranks_with(name)

    def own(self, name: str, whole: Tensor, parameter: Tensor) -> Tensor:
        cut = self.model.cuts.get(name)
        piece = whole if cut is None else cut.take(whole, self.mesh["tp"])
        return sharded_like(piece, parameter.detach())
