"""Which parameters are hidden matrices: those that Muon orthogonalizes. All others are AdamW's.

A hidden matrix is the weight of a linear layer inside the list of layers, or an expert's matrix, of which a 3-D
parameter holds one for each expert. Embeddings, the head, norms, biases, convolutions and other tables are none (Jordan
et al. 2024; Liu et al. 2025, arXiv 2502.16982, section 2.2). Matrices that a class keeps in one tensor are taken apart
where its plan for tensor parallelism, its kind of experts, or its own forward (split_outputs.py) says.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training.models.family import BLOCKS, STYLES, is_linear, layers_name, styles_of
from training.models.split_outputs import Split, split_outputs

# Names of one matrix, which rotary embeddings divide all the same; and of several in one.
ONE = re.compile(r"(q|k|v|query|key|value)(_b|_lin|_head|_global)?(_proj)?|wq_b|wk|linear_[qkv]")
SEVERAL = re.compile(
    r"w?qkv(_proj)?|query_key_value|c_attn|in_proj(_qkvz?|_ba)?|gate_up_proj|kv(_b)?_proj", re.IGNORECASE
)
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
# Parameters of two dimensions and more that are no matrices, so that weight decay leaves them as they are.
NO_MATRIX = re.compile(r"(bias|(^|\.)(A_log|D)|time_(mix|decay|first)\w*|norm\w*\.weight)$")


class HiddenMatrix(NamedTuple):
    """How a parameter is made of matrices: one, or several whose outputs, along `dim`, lie as `split` says.

    A 3-D parameter has as many for each expert.
    """

    dim: int = 0
    split: Split | None = None

    def apart(self, whole: Tensor) -> list[Tensor]:
        """Return the matrices, [number, rows, columns] of each part."""
        if self.split is None:
            parts: Any = [whole]
        else:
            turns = whole.unflatten(self.dim, (self.split.repeats, -1))
            parts = [part.flatten(self.dim, self.dim + 1) for part in turns.split(self.split.sizes, self.dim + 1)]
        return [part[None] if part.dim() == 2 else part for part in parts]

    def joined(self, matrices: list[Tensor], shape: torch.Size) -> Tensor:
        """Undo `apart`: return a tensor of this shape."""
        parts = [each[0] if len(shape) == 2 else each for each in matrices]
        if self.split is None:
            return parts[0]
        turns = [part.unflatten(self.dim, (self.split.repeats, -1)) for part in parts]
        return torch.cat(turns, self.dim + 1).flatten(self.dim, self.dim + 1)


def hidden_matrices(hf: Any) -> dict[str, HiddenMatrix]:
    """Return the hidden matrices of a model that no rank has cut yet, by parameter name.

    Raises ValueError for a class without a list of layers, and for several matrices in one whose places in it are not
    found.
    """
    kind = hf.config.model_type
    if (layers := layers_name(hf)) is None:
        raise ValueError(
            f"models of type {kind} have no list of layers, so train.optimizer=muon cannot tell their hidden matrices: "
            "set train.optimizer=adamw"
        )
    styles = styles_of(hf) if getattr(hf, "tp_plan", None) or kind in STYLES else {}
    splits = split_outputs(hf)
    ends = [hf.get_input_embeddings(), hf.get_output_embeddings()]
    at_ends = {id(end.weight) for end in ends if end is not None and hasattr(end, "weight")}
    found: dict[str, HiddenMatrix] = {}
    for name, parameter in hf.named_parameters():
        if not name.startswith(f"{layers}.") or id(parameter) in at_ends or min(parameter.shape[-2:], default=0) < 2:
            continue
        owner, _, leaf = name.rpartition(".")
        module, style, one_head = hf.get_submodule(owner), styles.get(name) or styles.get(owner, ""), False
        if leaf == "weight" and (isinstance(module, nn.Linear) or is_linear(module)):
            dim = 0 if isinstance(module, nn.Linear) else 1  # Conv1D's weight is [inputs, outputs]
            around = hf.get_submodule(owner.rpartition(".")[0])
            split = _equal(parameter, dim, style) or _divided(owner, splits.get(owner), around)
            found[name] = HiddenMatrix(dim, split)
            one_head = parameter.shape[dim] == getattr(around, "head_dim", None)  # keys are values (DeepSeek-V4)
            leaf = owner.rpartition(".")[2]
        elif parameter.dim() == 3 and EXPERTS.search(name):
            found[name] = _of_experts(module, leaf, parameter, style)
        else:
            continue
        if found[name].split is None and SEVERAL.fullmatch(leaf) and owner not in splits and not one_head:
            raise ValueError(
                f"{name} holds several matrices in one, and neither transformers' tensor-parallel plan for type {kind} "
                "nor the class's forward says where each begins, so train.optimizer=muon cannot take them apart: set "
                "train.optimizer=adamw"
            )
    return found


def _equal(parameter: Tensor, dim: int, style: str) -> Split | None:
    """Return the split of a plan's style: into equal parts."""
    blocks = BLOCKS.get(style, 1)
    return None if blocks == 1 else Split((parameter.shape[dim] // blocks,) * blocks)


def _divided(name: str, split: Split | None, around: Any) -> Split | None:
    """Return the split of a linear layer's outputs if it is into matrices, and not inside a head.

    Queries beside their gates are the only matrices in one of queries (Qwen3-Next).
    """
    head = getattr(around, "head_dim", None)
    if split is None or sum(split.sizes) == head:
        return None
    is_one = any(ONE.fullmatch(part) for part in name.split(".")[-2:])
    return split if not is_one or (split.sizes == (head, head) and split.repeats > 1) else None


def _of_experts(module: Any, leaf: str, parameter: Tensor, style: str) -> HiddenMatrix:
    """Return how an experts' parameter is made, by what transformers keeps of its class, or by the plan."""
    transposed = getattr(module, "is_transposed", style == "packed_rowwise")
    dim = 2 if transposed else 1
    if leaf != "gate_up_proj":
        return HiddenMatrix(dim)
    width = parameter.shape[dim] // 2
    if hasattr(module, "is_concatenated"):
        return HiddenMatrix(dim, Split((width, width)) if module.is_concatenated else Split((1, 1), width))
    return HiddenMatrix(dim, _equal(parameter, dim, style))
