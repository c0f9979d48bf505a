"""The dial `model.size`: from a number of parameters to the model's shape, its tokens, batch and learning rate.

Each choice is a published rule: the width is 64 features for each layer (nanochat, scripts/
base_train.py); a model sees 20 tokens for each parameter (Hoffmann et al. 2022, table 3); the batch and the peak
learning rate follow the training's FLOPs C = 6 x parameters x tokens (DeepSeek-AI 2024, arXiv 2401.02954, eq. 4).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from training.config.data import ASSUMED_VOCAB
from training.config.train import TrainConfig

TOKENS_PER_PARAMETER = 20
ASPECTS = (48, 96)  # the least and the most features of the width for each layer; 64 is the rule
SIZE = r"[1-9]\d*(\.\d+)?[KMB]|0\.\d*[1-9]\d*[MB]"  # 124M, 1.1B, 0.6B
UNIT = {"K": 1e3, "M": 1e6, "B": 1e9}

CHOSEN = {
    "model": ("layers", "width", "heads", "kv_heads", "mlp_width"),
    "train": ("steps", "global_batch", "learning_rate", "min_learning_rate", "warmup_steps", "decay_steps"),
}
MOST_OFF = 0.25  # of the size, by which a shape may differ from it

Choices = dict[str, dict[str, Any]]  # section -> field -> value


def choices(config: Mapping[str, Any]) -> Choices:
    """Return what `model.size` chooses: fields of the sections model and train.

    `config`: the content of a RunConfig. Its vocabulary and context are taken as they are given. Raises ValueError for
    a size that no shape has.
    """
    model, train, data = (config.get(name) or {} for name in ("model", "train", "data"))
    asked = parameters(model["size"])
    layers, width = _layers_and_width(asked, words=_rows_of_embeddings(model, data))
    tokens = TOKENS_PER_PARAMETER * asked
    flops = 6 * asked * tokens
    sequence = train.get("context", TrainConfig().context)
    batch = 2 ** max(0, round(math.log2(0.2920 * flops**0.3271 / sequence)))
    steps = max(1, round(tokens / (batch * sequence)))
    rate = float(f"{0.3118 * flops**-0.1250:.2g}")
    return {
        "model": {
            "layers": layers,
            "width": width,
            "heads": width // (64 if width < 2048 else 128),
            "kv_heads": 0,
            "mlp_width": 0,
        },
        "train": {
            "steps": steps,
            "global_batch": batch,
            "learning_rate": rate,
            "min_learning_rate": float(f"{rate / 10:.2g}"),
            "warmup_steps": max(1, steps // 50),
            "decay_steps": 0,
        },
    }


def parameters(size: str) -> float:
    """Return the number that `size` writes: 124e6 for 124M."""
    return float(size[:-1]) * UNIT[size[-1]]


def filled(config: Any) -> Any:
    """Return the content of a RunConfig with the choices of its `model.size` where a field is not given.

    Without a size, or with one that the config will refuse, it is returned as it is. Raises ValueError for a size that
    no shape has, and for layers and a width that make another model.
    """
    if not isinstance(config, Mapping):
        return config
    given = {
        name: part.model_dump(exclude_unset=True) if isinstance(part, BaseModel) else part
        for name, part in config.items()
    }
    model = given.get("model")
    if not isinstance(model, Mapping) or not re.fullmatch(SIZE, str(model.get("size", ""))):
        return config
    whole = {**given, **{name: chosen | (given.get(name) or {}) for name, chosen in choices(given).items()}}
    _check_given(whole["model"], given.get("data") or {})
    return whole


def cleared(config: dict[str, Any]) -> None:
    """Takes out of the content of a RunConfig, in place, what `model.size` chooses: a size is asked for anew."""
    for section, fields in CHOSEN.items():
        for field in fields:
            config.get(section, {}).pop(field, None)


def describe(config: Any) -> list[str]:
    """Return a sentence on what `model.size` of a RunConfig chose, and what was given instead; without it nothing."""
    if not config.model.size:
        return []
    content = config.model_dump()
    chosen = choices(content)
    given = [
        f"{name}.{field} = {content[name][field]} (the rule: {value})"
        for name, fields in chosen.items()
        for field, value in fields.items()
        if content[name][field] != value
    ]
    model, train = chosen["model"], chosen["train"]
    steps, batch = train["steps"], train["global_batch"]
    return [
        f"model.size = {config.model.size}: {model['layers']} layers of width {model['width']:,} (about 64 for each "
        f"layer) and {model['heads']} heads, {steps * batch * config.train.context:,} tokens ({TOKENS_PER_PARAMETER} "
        f"for each parameter) in {steps:,} steps, and for that many FLOPs batches of {batch:,} sequences, a "
        f"learning rate of {train['learning_rate']:g}, a minimum rate of {train['min_learning_rate']:g} and a warm-up "
        f"of {train['warmup_steps']:,} steps (docs/training.md)"
        + (f"; given instead: {', '.join(given)}" if given else "")
    ]


def _check_given(model: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raise ValueError if the layers and the width, which somebody gave, make a model of another size."""
    layers, width, asked = model["layers"], model["width"], parameters(model["size"])
    if not (isinstance(layers, int) and isinstance(width, int)):
        return  # the config refuses them
    found = 12 * layers * width**2 + _rows_of_embeddings(model, data) * width
    if abs(found / asked - 1) > MOST_OFF:
        raise ValueError(
            f"model.size = {model['size']}, and model.layers = {layers}, model.width = {width} make about {found:,} "
            "parameters: set model.size alone, or model.layers and model.width without it (an override model.size=… "
            "drops those of a preset)"
        )


def _rows_of_embeddings(model: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    tokenizer = data.get("tokenizer") or {}
    words = tokenizer.get("vocab_size") or ASSUMED_VOCAB.get(tokenizer.get("kind", "bpe"), 0)
    return int(words) * (1 if model.get("tie_embeddings", True) else 2)


def _layers_and_width(asked: float, *, words: int) -> tuple[int, int]:
    """Return the shape for `asked` parameters: 12 x width^2 for each layer, and `words` rows of embeddings.

    Of the shapes within 5% of `asked` it is the one nearest to 64 features for each layer, else the nearest to `asked`.
    Raises ValueError if that is not within 25%.
    """
    (low, high), shapes = ASPECTS, []
    for width in (*range(64, 2048, 64), *range(2048, 32_769, 128)):  # heads of 64 features, and of 128
        layers = round((asked - words * width) / (12 * width**2))
        layers = min(max(layers, math.ceil(width / high)), width // low)
        found = 12 * layers * width**2 + words * width
        shapes.append((max(0.0, abs(math.log(found / asked)) - 0.05), abs(width / layers - 64), layers, width, found))
    off, _, layers, width, found = min(shapes)
    if off + 0.05 > MOST_OFF:
        raise ValueError(
            f"model.size: no model of {asked:,.0f} parameters, the nearest has {found:,} with {words:,} rows of "
            "embeddings: change model.size, or data.tokenizer.vocab_size"
        )
    return layers, width
