"""Groups of ranks that train separately and average their weights seldom, for links far slower than the computation.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1): inside a group, gradients are averaged at every step, as
in ddp, and AdamW makes the inner steps. After every H inner steps, the groups average the changes of their weights. An
outer step (SGD with Nesterov momentum) takes this mean as its gradient, and all groups continue from its result. Each
group has its own AdamW moments. With an outer learning rate of 1 and no momentum this is local SGD: plain averages of
weights (Stich 2019).

Each rank of a group makes the outer step for the parameters that it owns, so that each parameter crosses the slow link
once per group, and the outer state is split over the group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.data.batch import Batch, Share
from training.facts.collectives import all_reduce_bytes, gather_bytes
from training.models.language_model import LanguageModel
from training.records.plan import RankPlan
from training.runtime.mesh import ACROSS, INSIDE, Mesh, group_mesh
from training.runtime.step_trace import phase
from training.runtime.tensor_cut import Parts
from training.strategies.compression import unpack
from training.strategies.ddp import Ddp
from training.strategies.stats import StepStats


class LocalSgd(Ddp):
    """Local SGD and DiLoCo. `weights`, `moments` and `loss` are those of the mean over groups.

    A group's gradient is its part of the global gradient times the number of groups, so that their mean is the whole.
    """

    def __init__(self, plan: RankPlan, mesh: Mesh, model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
        groups, parallel = group_mesh(plan), plan.config.parallel
        self.inside, self.across = groups[INSIDE].get_group(), groups[ACROSS].get_group()
        super().__init__(plan, mesh, model, weights, group=self.inside)
        self.outer_every = parallel.outer_every_steps
        self.outer_rate, self.momentum = parallel.outer_learning_rate, parallel.outer_momentum
        self.sent_dtype = torch.bfloat16 if parallel.compression == "bf16" else torch.float32
        self.owned_by_rank = _deal_out(self.trainable, self.inside.size())
        self.owned = self.owned_by_rank[self.inside.rank()]
        self.outer_weights = {name: p.detach().clone() for name, p in self.owned.items()}  # after the last outer step
        self.outer_momenta = {name: torch.zeros_like(p) for name, p in self.outer_weights.items()}
        self.means: list[Tensor] = []  # over groups, of the weights; kept for this step's validation

    def step(self, share: Share, *, learning_rate: float) -> StepStats:
        self.means.clear()
        stats = super().step(share, learning_rate=learning_rate)
        if self.updates % self.outer_every:
            return stats
        with phase("outer_step"), torch.no_grad():
            sent = self._outer_step() + self._broadcast([list(owned.values()) for owned in self.owned_by_rank])
        return replace(stats, sent_bytes=stats.sent_bytes + sent)

    def _outer_step(self) -> int:
        """Update the parameters that this rank owns; return the bytes that it sent."""
        if not self.owned:  # then its peers in the other groups own none either
            return 0
        weights, momenta = list(self.outer_weights.values()), list(self.outer_momenta.values())
        changes = torch._foreach_sub(weights, list(self.owned.values()))
        flat = torch.cat([tensor.flatten() for tensor in changes]).to(self.sent_dtype)
        dist.all_reduce(flat, group=self.across)
        unpack(flat.float() / self.across.size(), changes)
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, changes)
        torch._foreach_add_(changes, momenta, alpha=self.momentum)  # Nesterov momentum, computed as in torch.optim.SGD
        torch._foreach_add_(weights, changes, alpha=-self.outer_rate)
        torch._foreach_copy_(list(self.owned.values()), weights)
        return all_reduce_bytes(flat.nbytes, self.across.size())

    def _broadcast(self, by_owner: list[list[Tensor]]) -> int:
        """Send each rank's tensors to all ranks of its group; return the bytes that this rank sent."""
        sent, ranks = 0, self.inside.size()
        for owner, tensors in enumerate(by_owner):
            if tensors and ranks > 1:
                flat = torch.cat([tensor.flatten() for tensor in tensors])
                dist.broadcast(flat, group=self.inside, group_src=owner)
                unpack(flat, tensors)
                sent += gather_bytes(flat.nbytes, ranks) if owner == self.inside.rank() else 0
        return sent

    def loss(self, batch: Batch) -> Tensor:
        with self._averaged_weights():
            return super().loss(batch)

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Put the mean over groups in place of the weights; right after an outer step, all groups have the same."""
        if self.updates % self.outer_every == 0:
            yield
            return
        if not self.means:
            self.means = [self._mean(p.detach().clone()) for p in self.parameters]
        own = [p.data for p in self.parameters]
        _set_data(self.parameters, self.means)
        try:
            yield
        finally:
            _set_data(self.parameters, own)

    def _mean(self, tensor: Tensor) -> Tensor:
        """Average a tensor over groups, in place."""
        dist.all_reduce(tensor, group=self.across)
        return tensor.div_(self.across.size())

    def parts(self, name: str, tensor: Tensor) -> Parts:
        """Return parts whose join is the mean over groups; a frozen weight is the same in all groups."""
        parts, groups = super().parts(name, tensor), self.across.size()
        if name not in self.trainable or groups == 1:
            return parts

        rows, in_group = len(parts.holders) // groups, len(parts.part_shapes)  # rows in a group, parts in a row

        def mean(all_parts: Sequence[Tensor]) -> Tensor:
            firsts = range(0, len(all_parts), in_group)
            wholes = [parts.join(all_parts[first : first + in_group]) for first in firsts]
            return functools.reduce(torch.add, wholes).div_(groups)

        return replace(
            parts,
            holders=tuple(sum(parts.holders[row::rows], ()) for row in range(rows)),
            part_shapes=parts.part_shapes * groups,
            join=mean,
        )

    def ranks_alike(self, name: str) -> Tensor:
        return self.all_ranks.unflatten(0, (self.across.size(), -1))[self.across.rank()]

    def rank_state(self) -> dict[str, Tensor]:
        """Return the weights, moments and outer step's state of the parameters that this rank owns in its group."""
        state = {f"group.{name}": p.detach() for name, p in self.owned.items()}
        for name, p in self.owned.items():
            state |= {f"group.{name}.{moment}": self.optimizer.state[p][moment] for moment in self.moment_names(p)}
        state |= {f"agreed.{name}": tensor for name, tensor in self.outer_weights.items()}
        return state | {f"velocity.{name}": tensor for name, tensor in self.outer_momenta.items()}

    @torch.no_grad()
    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_rank_state(state)
        self._broadcast([list(owned.values()) for owned in self.owned_by_rank])
        self._broadcast(
            [
                [self.optimizer.state[p][moment] for p in owned.values() for moment in self.moment_names(p)]
                for owned in self.owned_by_rank
            ]
        )


def _deal_out(parameters: Mapping[str, nn.Parameter], ranks: int) -> list[dict[str, nn.Parameter]]:
    """Assign each parameter to the rank that owns the fewest numbers so far."""
    owned: list[dict[str, nn.Parameter]] = [{} for _ in range(ranks)]
    loads = [0] * ranks
    for name, parameter in parameters.items():
        owner = loads.index(min(loads))
        owned[owner][name] = parameter
        loads[owner] += parameter.numel()
    return owned


def _set_data(parameters: list[nn.Parameter], tensors: list[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor
