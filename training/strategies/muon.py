"""Muon for hidden matrices (Jordan et al. 2024), AdamW for all other parameters, over any layout of ranks.

A matrix's update is its gradient's momentum, made nearly orthogonal by five Newton-Schulz steps in bf16, and scaled to
the root mean square of AdamW's updates, so that both have one learning rate (Liu et al. 2025, arXiv 2502.16982, section
2.2). The arithmetic is that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw". A CPU without instructions for
bf16 multiplies the same bf16 numbers in fp32, and rounds each product to bf16.

A matrix is orthogonalized whole, by one of the ranks that hold it or a part of it: they share out the matrices by
their FLOPs. Each rank makes the momentum of its own part, and rounds it to bf16, as the first product would; the parts
go to that rank, and parts of its result come back, 2 bytes per number. So each layout has the numbers of one process.
"""

from __future__ import annotations

import functools
import math
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.facts.muon import STEPS, newton_schulz_flops
from training.models.hidden_matrices import HiddenMatrix
from training.records.plan import RankPlan
from training.runtime.mesh import exchange
from training.runtime.tensor_cut import Cut, Parts, own_part, split_like

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
MUON_MOMENTS = ("momentum_buffer",)  # the names of its state tensors
MOMENTUM = 0.95
RMS = 0.2  # of AdamW's updates, about


@dataclass(frozen=True)
class Held:
    """A parameter made of hidden matrices: its name, its parts on the ranks with the same weights, and tp's cut."""

    name: str
    matrix: HiddenMatrix
    parts: Parts
    cut: Cut | None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for row in self.parts.holders for rank in row))

    @functools.cached_property
    def shapes(self) -> list[torch.Size]:
        """The shapes [number, rows, columns] of its matrices, part by part."""
        return [part.shape for part in self.matrix.apart(torch.empty(self.parts.shape, device="meta"))]

    @property
    def flops(self) -> float:
        return sum(number * newton_schulz_flops(rows, columns) for number, rows, columns in self.shapes)

    @property
    def longest(self) -> int:
        """The longest side of all its matrices, by which updates are scaled."""
        return max(max(shape[1:]) for shape in self.shapes)

    def place(self, rank: int) -> int:
        """Return which of the parts a rank holds."""
        return self.parts.row_of(rank).index(rank)


class Muon(torch.optim.AdamW):
    """Both optimizers, as one: `groups` are AdamW's, with all parameters; those in `held` are Muon's.

    `peers`, `group`: the ranks that exchange parts of matrices; this rank alone holds them if it is the only peer.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        held: Mapping[nn.Parameter, Held],
        *,
        peers: Sequence[int],
        group: dist.ProcessGroup | None,
        tp: int,
        **adamw: Any,
    ) -> None:
        super().__init__(groups, **adamw)
        self.held, self.peers, self.group, self.tp = held, peers, group, tp
        self.rank = dist.get_rank() if len(peers) > 1 else peers[0]
        parameters = [parameter for each in groups for parameter in each["params"]]
        self.is_split = tp > 1 or isinstance(parameters[0], DTensor)
        self.like = torch.empty(0, dtype=torch.bfloat16, device=parameters[0].device)
        self.owners = _dealt_out(held.values())
        self.sent_bytes = sum(self._sent_bytes(each) for each in held.values())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the hidden matrices, and free their gradients; then AdamW updates all that still have one."""
        group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        own = {parameter: self._direction(parameter) for parameter in self.held if parameter.grad is not None}
        for parameter, update in self._orthogonalized(own).items():
            rate, decay = group_of[parameter]["lr"], group_of[parameter]["weight_decay"]
            adjusted = rate * RMS * math.sqrt(self.held[parameter].longest)
            own_part(parameter.detach()).mul_(1 - rate * decay).add_(update, alpha=-adjusted)
            parameter.grad = None
        super().step()

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of the gradient's Nesterov momentum, in bf16."""
        state, gradient = self.state[parameter], own_part(parameter.grad)  # type: ignore[arg-type]
        momentum = own_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        state["step"] += 1
        return gradient.lerp(momentum, MOMENTUM).bfloat16()

    def _orthogonalized(self, own: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return this rank's parts of the matrices' updates, of its parts of their momentum. Collective."""
        if len(self.peers) == 1:
            return {parameter: self._whole_update(self.held[parameter], part) for parameter, part in own.items()}
        wholes = self._gathered(own)
        updates = {parameter: self._whole_update(self.held[parameter], whole) for parameter, whole in wholes.items()}
        return self._scattered(own, updates)

    @staticmethod
    def _whole_update(held: Held, whole: Tensor) -> Tensor:
        updates = [orthogonalized(part) for part in held.matrix.apart(whole)]
        for update in updates:  # the step scales by the longest side of all
            if (longest := max(update.shape[1:])) < held.longest:
                update.mul_(math.sqrt(longest / held.longest))
        return held.matrix.joined(updates, whole.shape)

    def _gathered(self, own: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return whole those parameters' momenta that this rank orthogonalizes."""
        me, sent, shapes = self.rank, defaultdict[int, list[Tensor]](list), defaultdict[int, list[torch.Size]](list)
        for parameter, part in own.items():
            held, owner = self.held[parameter], self.owners[self.held[parameter].name]
            row = held.parts.row_of(owner)
            if owner == me:
                for rank, shape in zip(row, held.parts.part_shapes, strict=True):
                    shapes[rank] += [shape] if rank != me else []
            elif me in row:
                sent[owner].append(part)
        arrived = self._exchange(sent, shapes) if self.is_split else {}
        wholes = {}
        for parameter, part in own.items():
            held = self.held[parameter]
            if self.owners[held.name] == me:
                row = held.parts.row_of(me)
                wholes[parameter] = held.parts.join([part if rank == me else next(arrived[rank]) for rank in row])
        return wholes

    def _scattered(
        self, own: Mapping[nn.Parameter, Tensor], updates: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Send all ranks their parts of the updates that this rank made; return its own parts of all updates."""
        me, sent, shapes = self.rank, defaultdict[int, list[Tensor]](list), defaultdict[int, list[torch.Size]](list)
        mine = {}
        for parameter in own:
            held, owner = self.held[parameter], self.owners[self.held[parameter].name]
            if owner != me:
                shapes[owner].append(held.parts.part_shapes[held.place(me)])
                continue
            parts = split_like(held.parts, updates[parameter], cut=held.cut, tp=self.tp)
            mine[parameter] = parts[held.place(me)]
            for rank in held.ranks:
                sent[rank] += [parts[held.place(rank)]] if rank != me else []
        arrived = self._exchange(sent, shapes)
        return {
            parameter: mine[parameter] if parameter in mine else next(arrived[self.owners[self.held[parameter].name]])
            for parameter in own
        }

    def _exchange(self, sent: Mapping[int, list[Tensor]], shapes: Mapping[int, list[torch.Size]]) -> dict[int, Any]:
        arrived = exchange(sent, shapes, peers=self.peers, group=self.group, like=self.like)
        return {rank: iter(tensors) for rank, tensors in arrived.items()}

    def _sent_bytes(self, held: Held) -> int:
        """Return the bytes that this rank sends in a step for a parameter."""
        owner, shapes = self.owners[held.name], held.parts.part_shapes
        if owner == self.rank:
            return 2 * sum(shapes[held.place(rank)].numel() for rank in held.ranks if rank != owner)
        return 2 * shapes[held.place(self.rank)].numel() if self.rank in held.parts.row_of(owner) else 0


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return nearly orthogonal matrices with the singular vectors of these, in bf16: [number, rows, columns].

    Newton-Schulz's quintic iteration, whose singular values end between about 0.7 and 1.2 (Jordan et al. 2024).
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    products = torch.bfloat16 if x.device.type != "cpu" or cpu_has_bf16() else torch.float32
    x = x.to(products)
    for _ in range(STEPS):
        gram = (x @ x.mT).bfloat16().to(products)
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(products)
        x = torch.baddbmm(x, update, x, beta=a).bfloat16().to(products)
    x = x.bfloat16()
    return x.mT if is_tall else x


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether this CPU has products of bf16 numbers; without, torch's take 80 times as long as in fp32 (on AVX2).

    The processor decides, no timing: a resumed run must make the same products.
    """
    if platform.machine() in {"x86_64", "AMD64"}:
        return torch.cpu._is_avx512_bf16_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def peers_of(plan: RankPlan) -> list[tuple[int, ...]]:
    """Return the groups of ranks that exchange parts of matrices: those that hold parts of the same ones, or copies.

    These are the ranks of a pipeline stage; the groups of local-sgd have unlike weights, and replicas of unlike shape
    share matrices across stages.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, place in enumerate(plan.places):
        if plan.strategy == "local-sgd":
            groups[place.dp // plan.group_ranks].append(rank)
        else:
            groups[0 if plan.stages else place.pp].append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _dealt_out(held: Iterable[Held]) -> dict[str, int]:
    """Return the rank that orthogonalizes each parameter: the one with the fewest FLOPs so far, largest first.

    Only parameters of the same ranks count together, so that these ranks agree.
    """
    loads: dict[tuple[int, ...], dict[int, float]] = {}
    owners = {}
    for each in sorted(held, key=lambda each: (-each.flops, each.name)):
        of_ranks = loads.setdefault(each.ranks, dict.fromkeys(each.ranks, 0.0))
        owner = min(of_ranks, key=of_ranks.__getitem__)
        of_ranks[owner] += each.flops
        owners[each.name] = owner
    return owners
