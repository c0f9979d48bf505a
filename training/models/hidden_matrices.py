"""Which parameters are hidden matrices: those that Muon orthogonalizes. All others are AdamW's.

A hidden matrix is the weight of a linear layer inside the list of layers, or an expert's matrix, of which a 3-D
parameter holds one for each expert. Embeddings, the head, norms, biases, convolutions and other tables are none (Jordan
et al. 2024; Liu et al. 2025, arXiv 2502.16982, section 2.2). Matrices that a class keeps in one tensor are taken apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training.models.family import BLOCKS, STYLES, is_linear, layers_name, styles_of
from training.planner.model_shape import attention_among


class HiddenMatrix(NamedTuple):
    """How a parameter is made of matrices: `blocks` equal ones along `dim`; a 3-D one, of so many for each expert."""

    dim: int = 0
    blocks: int = 1

    def apart(self, whole: Tensor) -> Tensor:
        """Return the matrices, [number, rows, columns]."""
        return torch.stack(whole.chunk(self.blocks, self.dim)).flatten(0, -3)

    def joined(self, matrices: Tensor, shape: torch.Size) -> Tensor:
        """Undo `apart`: return a tensor of this shape."""
        blocks = matrices.unflatten(0, (self.blocks, -1)) if len(shape) > 2 else matrices
        return torch.cat(list(blocks), self.dim)


def hidden_matrices(hf: Any) -> dict[str, HiddenMatrix]:
    """Return the hidden matrices of a model that no rank has cut yet, by parameter name.

    Raises ValueError for a class without a list of layers, and for queries, keys and values in one matrix whose places
    in it the class's tensor-parallel plan does not tell.
    """
    kind = hf.config.model_type
    if (layers := layers_name(hf)) is None:
        raise ValueError(
            f"models of type {kind} have no list of layers, so train.optimizer=muon cannot tell their hidden matrices: "
            "set train.optimizer=adamw"
        )
    styles = styles_of(hf) if getattr(hf, "tp_plan", None) or kind in STYLES else {}
    ends = [hf.get_input_embeddings(), hf.get_output_embeddings()]
    at_ends = {id(end.weight) for end in ends if end is not None and hasattr(end, "weight")}
    found: dict[str, HiddenMatrix] = {}
    for name, parameter in hf.named_parameters():
        if not name.startswith(f"{layers}.") or id(parameter) in at_ends:
            continue
        owner, _, leaf = name.rpartition(".")
        module = hf.get_submodule(owner)
        linear = leaf == "weight" and (isinstance(module, nn.Linear) or is_linear(module))
        experts = parameter.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd)
        if (linear or experts) and min(parameter.shape[-2:]) > 1:
            style = styles.get(name) or styles.get(owner, "")
            found[name] = HiddenMatrix(_dim_of(module, parameter, style), BLOCKS.get(style, 1))
    _check_attention(hf, found)
    return found


def _dim_of(module: nn.Module, parameter: nn.Parameter, style: str) -> int:
    """Return the dimension of a matrix's outputs, along which matrices in one tensor lie side by side."""
    if parameter.dim() == 3:
        return 2 if style == "packed_rowwise" else 1
    return 0 if isinstance(module, nn.Linear) else 1  # Conv1D's weight is [inputs, outputs]


def _check_attention(hf: Any, found: dict[str, HiddenMatrix]) -> None:
    """Raise ValueError if queries, keys and values lie in one matrix and their places are not known."""
    config = hf.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    if not isinstance(heads, int) or not heads:
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for name in attention_among([*found]):
        parameter = hf.get_parameter(name)
        if parameter.shape[found[name].dim] == (heads + 2 * kv_heads) * head_dim and found[name].blocks == 1:
            raise ValueError(
                f"{name} holds queries, keys and values in one matrix, and transformers' tensor-parallel plan for type "
                f"{hf.config.model_type} does not say where each begins, so train.optimizer=muon cannot take them "
                "apart: set train.optimizer=adamw"
            )
