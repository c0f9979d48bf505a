"""Counts a model's parameters on the meta device, from its config.json alone: no weights, no memory, no GPU.

    python -m training.models.sizes CONFIG_JSON OBJECTIVE [NODE]

prints the ModelShape as one line of JSON, for a program that imports no torch. NODE: the host that it runs on, for a
launcher elsewhere. It exits with 2 and one line if the class cannot be built or planned.
"""

from __future__ import annotations

import itertools
import math
import re
import resource
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.facts.model_config import WRONG_VALUES, first_line, read_settings
from training.models.family import STYLES, is_for_fp8, layers_name
from training.models.hidden_matrices import hidden_matrices
from training.models.pretrained import auto_class_of
from training.planner.model_shape import CHOSEN_EXPERTS, attention_among, experts_of_a_token, shape_of_hf
from training.records.model_sizes import LayersAlike, ModelSizes, Part
from training.records.plan import ModelShape

MEMORY_BYTES = 8 * 2**30  # of the process that counts: 0.5 for DeepSeek-V3
NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
WHOLE = ("replicate", "moe_tp", "mla_kv_a", "local")  # beginnings of the styles that leave parameters whole


def count_model(settings: Any, *, objective: str, where: str = "on meta") -> ModelShape:
    """Return the shape, with counted parameters, of the class that transformers makes of a config."""
    import transformers

    named = {name: value for name in NAMES if (value := _value_of(settings, name)) is not None}
    shape = shape_of_hf(settings.to_dict() | named, vocab_size=int(named.get("vocab_size") or 0))
    try:
        with torch.device("meta"):
            hf = auto_class_of(objective).from_config(settings, dtype=torch.float32)
    except WRONG_VALUES as error:
        why = first_line(error)
        raise ValueError(
            f"model.path holds a model of type {shape.architecture}, which cannot be built: {why} Change its "
            f"config.json, or choose a class that {auto_class_of(objective).__name__} builds"
        ) from None
    sizes = sizes_of(hf, counted=f"counted {where} with transformers {transformers.__version__}")
    return shape.model_copy(update={"layers": sizes.num_layers, "tied": sizes.tied, "sizes": sizes})


def _value_of(settings: Any, name: str) -> Any:
    """Return a field of a config, which some classes compute; None without it, or if its layers differ in it."""
    try:
        return getattr(settings, name, None)
    except RuntimeError:  # transformers': it is to be read for each layer
        return None


def sizes_of(hf: Any, *, counted: str) -> ModelSizes:
    """Return the sizes of a model; it may be on the meta device."""
    if (name := layers_name(hf)) is None:
        raise ValueError(
            f"models of type {hf.config.model_type} have no list of layers, and cannot be planned: choose another type"
        )
    num_layers, tensors = len(hf.get_submodule(name)), _tensors(hf)
    embedding, output = hf.get_input_embeddings().weight, hf.get_output_embeddings()
    if not len(embedding):
        raise ValueError("the model's config.json has vocab_size = 0: set it to the number of the embedding's rows")
    tied = getattr(output, "weight", None) is embedding
    rows = {id(module.weight) for module in hf.modules() if isinstance(module, nn.Embedding)}
    first = next(place for place, each in enumerate(tensors) if each.name.startswith(f"{name}."))
    last = [each for each in tensors[first:] if not each.name.startswith(f"{name}.") and each.identity not in rows]
    if output is not None and not tied:
        own = {id(parameter) for parameter in output.parameters()}
        last += [each for each in tensors if each.identity in own and each not in last]
    before = [each for each in tensors if not each.name.startswith(f"{name}.") and each not in last]
    layers = (
        _layer([each for each in tensors if each.name.startswith(f"{name}.{number}.")]) for number in range(num_layers)
    )
    per_word = sum(
        each.numel // len(embedding)
        for each in last
        if each.shape[:1] == (len(embedding),) and "norm" not in each.name  # a row or a number for each word
    )
    parameters = {alias for each in tensors for alias in each.aliases}
    return ModelSizes(
        counted=counted,
        before=Part(**_numbers(before), per_word=embedding.shape[1]),
        layers=tuple(alike.model_copy(update={"count": len(list(same))}) for alike, same in itertools.groupby(layers)),
        after=Part(**_numbers(last), per_word=per_word),
        looked_up=sum(each.numel for each in before if each.identity in rows - ({id(embedding)} if tied else set())),
        buffers=sum(tensor.numel() for each, tensor in hf.state_dict().items() if each not in parameters),
        tied=tied,
        why_not_muon=_why_not_muon(hf),
    )


def _why_not_muon(hf: Any) -> str:
    try:
        hidden_matrices(hf)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _Tensor:
    """A parameter. `aliases`: its names, the first of which is `name`. `used`: as in Part."""

    name: str
    aliases: tuple[str, ...]
    identity: int
    shape: tuple[int, ...]
    used: int
    is_cut: bool
    for_fp8: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _tensors(hf: Any) -> list[_Tensor]:
    """Return the model's parameters in the order of its modules; tied ones once."""
    names = defaultdict[int, list[str]](list)
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [
        _Tensor(
            name=name,
            aliases=tuple(names[id(parameter)]),
            identity=id(parameter),
            shape=tuple(parameter.shape),
            used=_used(hf, name, parameter),
            is_cut=any(is_cut(hf, alias) for alias in names[id(parameter)]),
            for_fp8=is_for_fp8(name.rpartition(".")[0], hf.get_submodule(name.rpartition(".")[0])),
        )
        for name, parameter in hf.named_parameters()
    ]


def _used(hf: Any, name: str, parameter: nn.Parameter) -> int:
    """Return how many of a parameter's numbers one token uses: of experts, the share that it is sent to."""
    if not (found := EXPERTS.search(name)):
        return parameter.numel()
    if not (chosen := experts_of_a_token(hf.config.to_dict())):
        raise ValueError(
            f"models of type {hf.config.model_type} have experts, and config.json has none of "
            f"{', '.join(CHOSEN_EXPERTS)}: add num_experts_per_tok, the number of experts that each token is sent to"
        )
    experts = hf.get_submodule(name[: found.end()].rstrip("."))
    count = len(experts) if isinstance(experts, nn.ModuleList) else getattr(experts, "num_experts", parameter.shape[0])
    return parameter.numel() * min(chosen, count) // max(1, count)


def is_cut(hf: Any, name: str) -> bool:
    """Whether tensor parallelism divides this parameter, by the class's plan: the style of it or of its module."""
    plan = {**(getattr(hf, "tp_plan", None) or {}), **STYLES.get(hf.config.model_type, {})}
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    module, _, own = pattern.rpartition(".")
    if plan and hf.get_submodule(name.rpartition(".")[0]) in (hf.get_input_embeddings(), hf.get_output_embeddings()):
        return True
    style = plan.get(pattern) or plan.get(module) or ""
    is_added = style.startswith("rowwise") and own == "bias"  # by each rank, after the sum
    return bool(style) and not style.startswith(WHOLE) and not is_added


def _numbers(tensors: Sequence[_Tensor]) -> dict[str, int]:
    return {
        "parameters": sum(each.numel for each in tensors),
        "used": sum(each.used for each in tensors),
        "cut": sum(each.numel for each in tensors if each.is_cut),
    }


def _layer(tensors: Sequence[_Tensor]) -> LayersAlike:
    matrices = [each for each in tensors if len(each.shape) > 1]
    attention = attention_among([each.name for each in matrices])
    return LayersAlike(
        count=1,
        multiplied=sum(each.used for each in matrices),
        attention=sum(each.used for each in matrices if each.name in attention),
        for_fp8=sum(each.used for each in matrices if each.for_fp8),
        **_numbers(tensors),
    )


def main(path: Path, objective: str, node: str = "") -> int:
    where = f"on node {node}" if node else "on meta"
    try:
        settings = read_settings(path, where=f" {where}" if node else "")
        shape = count_model(settings, objective=objective, where=where)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(shape.model_dump_json())
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))  # config.json may be a stranger's
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
