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

from training.models.architectures import layers_of
from training.models.language_model import LanguageModel
from training.runtime.mesh import copy_to_group, gather_sequence, own_piece, scatter_sum, sum_over_group
from training.runtime.tensor_cut import Cut


def shard_matrices(model: LanguageModel, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Replace the model's matrices by this rank's pieces; `model.cuts` records how, by parameter name."""
    assert model.architecture is not None, "the plan refuses tp for such models"
    architecture, group = model.architecture, mesh.get_group()
    hf: Any = model.hf
    names = {id(parameter): name for name, parameter in hf.named_parameters()}

    def cut(parameter: nn.Parameter, dim: int, blocks: int = 1) -> nn.Parameter:
        how = model.cuts[names[id(parameter)]] = Cut(dim, parameter.shape[dim], blocks)
        return nn.Parameter(
            how.take(parameter.detach(), mesh).clone(memory_format=torch.contiguous_format),
            requires_grad=parameter.requires_grad,
        )

    for layer in layers_of(hf):
        for path in (*architecture.column, *architecture.row):
            matrix = layer.get_submodule(path)
            column, blocks = path in architecture.column, 3 if path == architecture.fused else 1
            sharded = _ShardedLinear(matrix, cut, column=column, blocks=blocks, group=group)
            sharded.sequence_parallel = sequence_parallel
            layer.set_submodule(path, sharded)
    if hf.config.model_type == "gpt2":
        for layer in hf.transformer.h:
            layer.attn.split_size //= mesh.size()  # the width at which GPT-2 splits q, k, v
    output, embedding = hf.get_submodule(architecture.output), hf.get_submodule(architecture.embedding)
    words = torch.arange(len(output.weight)).tensor_split(mesh.size())[mesh.get_local_rank()]
    model.first_token_id, model.tp_group = int(words[0]), group
    output.weight = cut(output.weight, 0)
    if output.bias is not None:
        _shard_bias(hf, output.bias, cut(output.bias, 0))
    weight = output.weight if model.tied else cut(embedding.weight, 0)
    sharded_embedding = _ShardedEmbedding(weight, model.first_token_id, group)
    sharded_embedding.sequence_parallel = sequence_parallel
    hf.set_submodule(architecture.embedding, sharded_embedding)
    if sequence_parallel:
        model.sequence_pieces = mesh.size()
        _split_sequences(model, group)


def _split_sequences(model: LanguageModel, group: dist.ProcessGroup) -> None:
    """Gather the inputs of each block of a layer, and take this rank's piece of the added embeddings' results."""
    assert model.architecture is not None

    def gather(
        block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_gathered(args[0], group), *args[1:]), named
        return args, named | {"hidden_states": _gathered(named["hidden_states"], group)}

    for layer in layers_of(model.hf):
        for path in (model.architecture.attention, model.architecture.mlp):
            layer.get_submodule(path).register_forward_pre_hook(gather, with_kwargs=True)
    for path in model.architecture.added:
        model.hf.get_submodule(path).register_forward_hook(lambda module, args, rows: own_piece(rows, group))


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
    """A rank's piece of a linear layer. `column`: some of its outputs; else some of its inputs, summed over ranks.

    The weight of GPT-2's Conv1D is [inputs, outputs], that of nn.Linear [outputs, inputs].
    """

    def __init__(self, whole: Any, cut: Any, *, column: bool, blocks: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.column, self.group, self.transposed = column, group, not isinstance(whole, nn.Linear)
        self.linear = F.linear  # training/strategies/float8.py may replace it
        self.sequence_parallel = False
        self.weight: nn.Parameter = cut(whole.weight, int(column == self.transposed), blocks)
        keeps_bias = whole.bias is None or not column
        self.bias: nn.Parameter | None = whole.bias if keeps_bias else cut(whole.bias, 0, blocks)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        if self.column:
            return self.linear(x if self.sequence_parallel else copy_to_group(x, self.group), weight, self.bias)
        collect = scatter_sum if self.sequence_parallel else sum_over_group
        result = collect(self.linear(x, weight), self.group)
        return result if self.bias is None else result + self.bias.to(result.dtype)


class _ShardedEmbedding(nn.Module):
    """A rank's rows of the embedding, from `first_token_id` on.

    Words of other ranks give zeros, so the sum over ranks gives every word its row.
    """

    def __init__(self, weight: nn.Parameter, first_token_id: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.first_token_id, self.group = weight, first_token_id, group
        self.sequence_parallel = False

    def forward(self, inputs: Tensor) -> Tensor:
        words = inputs - self.first_token_id
        here = (words >= 0) & (words < len(self.weight))
        rows = F.embedding(torch.where(here, words, 0), self.weight)
        collect = scatter_sum if self.sequence_parallel else sum_over_group
        return collect(torch.where(here.unsqueeze(-1), rows, 0.0), self.group)
