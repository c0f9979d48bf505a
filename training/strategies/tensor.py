"""Tensor parallelism: ranks split each layer's matrices and the vocabulary (Shoeybi et al. 2019, section 3).

A block's first matrices are split by outputs, so each rank has whole attention heads and whole MLP units; its last
matrix is split by inputs, and the ranks' partial results are summed: one all-reduce per block and direction. Parameters
stay plain tensors under their own names, so that DDP, FSDP2 and pipelines treat them like any others.

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2), each rank has its piece of every sequence between
these blocks: norms, dropout and residuals are computed and kept once, not by every rank. A block's inputs are gathered,
and its sums scattered, which together send as much as the all-reduce. Parameters that are not cut (norms, some biases)
get a gradient from this rank's piece only; training/strategies/torch_strategy.py sums these gradients over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from training.models.document_attention import attend_by_document
from training.models.family import BLOCKS, Family, is_linear
from training.models.language_model import LanguageModel
from training.runtime.mesh import (
    copy_to_group,
    gather_columns,
    gather_sequence,
    own_piece,
    scatter_sum,
    sum_over_group,
    take_columns,
)
from training.runtime.tensor_cut import Cut

BY_OUTPUTS = ("colwise", "packed_colwise", "packed_colwise 3", "colwise_gather_output", "colwise_rep")
BY_INPUTS = ("rowwise", "rowwise_split_input", "packed_rowwise")


def shard_matrices(model: LanguageModel, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Replace the model's matrices by this rank's pieces; `model.cuts` records how, by parameter name."""
    family, group = model.known_family(), mesh.get_group()
    hf: Any = model.hf
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    made: dict[int, nn.Parameter] = {}

    def cut(parameter: nn.Parameter, dim: int, blocks: int = 1) -> nn.Parameter:
        if id(parameter) not in made:
            how = model.cuts[names[id(parameter)]] = Cut(dim, parameter.shape[dim], blocks)
            made[id(parameter)] = nn.Parameter(
                how.take(parameter.detach(), mesh).clone(memory_format=torch.contiguous_format),
                requires_grad=parameter.requires_grad,
            )
        return made[id(parameter)]

    output, embedding = hf.get_submodule(family.head), hf.get_submodule(family.embedding)
    parents: dict[str, nn.Module] = {}
    for name, style in family.styles.items():
        owner, _, leaf = name.rpartition(".")
        module = hf.get_submodule(owner)
        if module in (output, embedding) or (child := getattr(module, leaf)) in (output, embedding):
            continue  # cut by words, below
        if isinstance(module, _ShardedLinear) or (isinstance(child, nn.Parameter) and is_linear(module)):
            continue  # cut with its module
        if style == "divided":
            setattr(module, leaf, child // mesh.size())
        elif isinstance(child, nn.Parameter):
            if (dim := _dim_of(style, child.dim())) is not None:
                setattr(module, leaf, cut(child, dim, BLOCKS.get(style, 1)))
        elif is_linear(child) and style in (*BY_OUTPUTS, *BY_INPUTS):
            sharded = _ShardedLinear(child, cut, style=style, group=group)
            sharded.sequence_parallel = sequence_parallel
            setattr(module, leaf, sharded)
            if style in BY_OUTPUTS:
                parents[owner] = module
        else:
            _follow(model, child, name, style, group=group)
    words = torch.arange(len(output.weight)).tensor_split(mesh.size())[mesh.get_local_rank()]
    model.first_token_id, model.tp_group = int(words[0]), group
    if getattr(output, "bias", None) is not None:
        _shard_bias(hf, output.bias, cut(output.bias, 0))
    output.weight, embedding.weight = cut(output.weight, 0), cut(embedding.weight, 0)
    _look_up_own_rows(embedding, model.first_token_id, group, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        model.sequence_pieces = mesh.size()
        _split_sequences(model, family, parents, group)


def _dim_of(style: str, dims: int) -> int | None:
    """Return the dimension in which a parameter of an expert, or another module that is no linear layer, is cut."""
    if style in BY_OUTPUTS:
        return max(dims - 2, 0)
    if style in BY_INPUTS and dims > 1:
        return dims - 1
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def _follow(model: LanguageModel, module: Any, name: str, style: str, *, group: dist.ProcessGroup) -> None:
    """Let a module that is no linear layer compute with its cut parameters, by its style in transformers' words."""

    def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(copy_to_group(x, group) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    def with_copied_rotary(result: Tensor) -> Tensor:
        block = model.hf.get_submodule(name.rpartition(".")[0])
        config = model.hf.config.get_text_config()  # type: ignore[operator,union-attr]
        width = getattr(block, "qk_rope_head_dim", None) or config.qk_rope_head_dim
        return torch.cat([result[..., :-width], copy_to_group(result[..., -width:], group)], -1)

    real = module.forward
    if style == "replicated_with_grad_allreduce":
        model.partial |= {f"{name}.{each}" for each, _ in module.named_parameters(recurse=False)}
    elif style == "mla_kv_a_proj":
        module.forward = lambda x: with_copied_rotary(real(x))
    elif style == "moe_tp_experts":
        module.forward = lambda *args: sum_over_group(real(*copied(args)), group)
    elif style == "moe_identity_expert":
        module.forward = lambda x, *args: real(x / group.size(), *args)
    elif style == "all_reduce":
        module.forward = lambda *args, **named: sum_over_group(real(*args, **named), group)
    elif style in {"colwise", "packed_colwise"}:
        module.forward = lambda *args: real(*copied(args))
    elif style not in {"local_params", "replicate", "packed_rowwise"}:
        raise NotImplementedError(f"{name} has the style {style}, for which there is no tensor parallelism here")


def _split_sequences(
    model: LanguageModel, family: Family, parents: dict[str, nn.Module], group: dist.ProcessGroup
) -> None:
    """Gather the inputs of each block of a layer and of the head; take this rank's piece of added embeddings' rows.

    The class would make masks of the pieces, for attention to whole sequences, so it makes none.
    """

    def gather(
        block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_gathered(args[0], group), *args[1:]), named
        return args, named | {"hidden_states": _gathered(named["hidden_states"], group)}

    if model.by_document:
        attend_by_document(model.hf, masked=False)
    for parent in parents.values():
        parent.register_forward_pre_hook(gather, with_kwargs=True)
    if family.before_head:  # here, since GPT-2 gives what follows the shape of whole sequences
        norm, model.gathers_before_head = model.hf.get_submodule(family.before_head[-1]), True
        norm.register_forward_hook(lambda module, args, hidden: gather_sequence(hidden, group))
    for path in family.before:
        added = model.hf.get_submodule(path)
        if path != family.embedding and isinstance(added, nn.Embedding):
            added.register_forward_hook(lambda module, args, rows: own_piece(rows, group))


def _gathered(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather hidden states, under autocast in its precision: each linear layer would cast them to it anyway."""
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    return gather_sequence(hidden, group)


def _shard_bias(hf: nn.Module, whole: nn.Parameter, piece: nn.Parameter) -> None:
    """Shard the output layer's bias, under both names that BERT has for it."""
    for module in hf.modules():
        if getattr(module, "bias", None) is whole:
            module.bias = piece


class _ShardedLinear(nn.Module):
    """A rank's piece of a linear layer, by its style: some of its outputs; or some of its inputs, summed over ranks.

    The weight of GPT-2's Conv1D is [inputs, outputs], that of nn.Linear [outputs, inputs].
    """

    def __init__(self, whole: Any, cut: Any, *, style: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.column, self.group, self.transposed = style in BY_OUTPUTS, group, not isinstance(whole, nn.Linear)
        self.gathers, self.splits = style in {"colwise_gather_output", "colwise_rep"}, style == "rowwise_split_input"
        self.linear = F.linear  # training/strategies/float8.py may replace it
        self.sequence_parallel = False
        blocks = BLOCKS.get(style, 1)
        self.weight: nn.Parameter = cut(whole.weight, int(self.column == self.transposed), blocks)
        keeps_bias = whole.bias is None or not self.column
        self.bias: nn.Parameter | None = whole.bias if keeps_bias else cut(whole.bias, 0, blocks)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        if self.column:
            result = self.linear(x if self.sequence_parallel else copy_to_group(x, self.group), weight, self.bias)
            return gather_columns(result, self.group) if self.gathers else result
        collect = scatter_sum if self.sequence_parallel else sum_over_group
        result = collect(self.linear(take_columns(x, self.group) if self.splits else x, weight), self.group)
        return result if self.bias is None else result + self.bias.to(result.dtype)


def _look_up_own_rows(
    embedding: Any, first_token_id: int, group: dist.ProcessGroup, *, sequence_parallel: bool
) -> None:
    """Let an embedding look up its rank's rows, from `first_token_id` on.

    Words of other ranks give zeros, so the sum over ranks gives every word its row.
    """
    real, embedding.padding_idx = embedding.forward, None
    collect = scatter_sum if sequence_parallel else sum_over_group

    def forward(inputs: Tensor) -> Tensor:
        words = inputs - first_token_id
        here = (words >= 0) & (words < len(embedding.weight))
        rows = real(torch.where(here, words, 0))
        return collect(torch.where(here.unsqueeze(-1), rows, 0.0), group)

    embedding.forward = forward
