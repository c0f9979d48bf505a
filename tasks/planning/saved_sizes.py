"""The parameters of saved weights, by their names and shapes in the files' headers: exact in all, near in its parts.

Which parameters tensor parallelism divides, the class says (training/models/sizes.py), and there is no class here: of
the types that it can divide at all, all matrices.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from training.facts.families import why_not
from training.planner.model_shape import attention_among, experts_of_a_token
from training.planner.precision import FP8_MULTIPLE, NOT_IN_FP8
from training.records.model_sizes import LayersAlike, ModelSizes, Part
from training.records.model_state import Shapes
from training.records.plan import ModelShape

# Buffers that older versions of transformers saved, and that today's classes ignore.
STALE = re.compile(r"(^|\.)(attn|attention|self)\.(masked_)?bias$|rotary_emb\.inv_freq$|position_ids$")
LAYER = re.compile(r"^(\D*\.)(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+\.)?")
LAST = re.compile(r"(^|\.)(\w*lm_head|cls|embed_out|output|vocab_projector|norm|ln_f|norm_f|final_(layer_)?norm)\.")


def num_saved(saved: Shapes) -> int:
    """Return the number of numbers in saved weights, without buffers that nothing loads."""
    return sum(math.prod(shape) for name, shape in saved.items() if not STALE.search(name))


def is_tied(saved: Shapes, hf: Mapping[str, Any]) -> bool:
    """Return whether the output layer's matrix is the embedding's: where config.json leaves it to the class's default,
    whether the files have no such matrix of their own."""
    rows, named = hf["vocab_size"], hf.get("tie_word_embeddings")
    is_own = any(shape[:1] == (rows,) and len(shape) == 2 and LAST.search(name) for name, shape in saved.items())
    return not is_own if named is None else bool(named)


def sizes_of_saved(saved: Shapes, hf: Mapping[str, Any], shape: ModelShape) -> ModelSizes:
    """Return the sizes of saved weights. `hf`: the content of their config.json, `shape`: what it describes."""
    numbered = defaultdict[str, dict[int, list[str]]](lambda: defaultdict(list))
    names = [name for name in saved if not STALE.search(name) and not (shape.tied and name == "lm_head.weight")]
    for name in names:
        if found := LAYER.match(name):
            numbered[found[1]][int(found[2])].append(name)
    layers = max(numbered.values(), key=len, default={})
    inside = {name for own in layers.values() for name in own}
    experts = {int(found[1][:-1]) for name in inside if (found := EXPERT.search(name)) and found[1]}

    def used(name: str) -> int:
        total, chosen = math.prod(saved[name]), experts_of_a_token(hf)
        if not EXPERT.search(name) or not chosen:
            return total
        return total * chosen // (len(experts) or saved[name][0])

    def numbers(own: Iterable[str]) -> dict[str, int]:
        own = [*own]
        matrices = [name for name in own if len(saved[name]) > 1]
        is_cut = not why_not(shape, "tp")
        return {
            "parameters": sum(math.prod(saved[name]) for name in own),
            "used": sum(map(used, own)),
            "cut": sum(math.prod(saved[name]) for name in matrices) if is_cut else 0,
        }

    def layer(own: Iterable[str]) -> LayersAlike:
        matrices = [name for name in own if len(saved[name]) > 1]
        attention = sum(map(used, attention_among(matrices)))
        in_fp8 = (name for name in matrices if not NOT_IN_FP8.search(name.rpartition(".")[0]))
        for_fp8 = sum(used(name) for name in in_fp8 if not any(size % FP8_MULTIPLE for size in saved[name]))
        multiplied = sum(map(used, matrices))
        return LayersAlike(count=1, multiplied=multiplied, attention=attention, for_fp8=for_fp8, **numbers(own))

    outside = [name for name in names if name not in inside]
    words = shape.vocab_size * shape.width
    alike = itertools.groupby(layer(layers[number]) for number in sorted(layers))
    return ModelSizes(
        counted="safetensors headers",
        before=Part(**numbers(name for name in outside if not LAST.search(name)), per_word=shape.width),
        layers=tuple(each.model_copy(update={"count": len(list(same))}) for each, same in alike),
        after=Part(**numbers(filter(LAST.search, outside)), per_word=0 if shape.tied else shape.width),
        looked_up=0 if shape.tied else words,
        tied=shape.tied,
    )
