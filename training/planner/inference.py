"""Checks that a model can be divided over devices for inference as configured."""

from __future__ import annotations

from pathlib import Path

from training.config.serving import InferenceConfig
from training.facts.families import Ability, why_not
from training.planner.model_shape import shape_of_hf
from training.records.record import read_fields


def check_inference(folder: Path, inference: InferenceConfig) -> None:
    """Raise ValueError, with the numbers and the cure, if the model cannot be divided as configured."""
    degree = inference.degree
    if inference.parallel == "none" and degree > 1:
        raise ValueError(
            f"inference.degree = {degree}, but inference.parallel = none: set inference.parallel to data (copies), "
            "tensor (split matrices) or pipeline (distributed layers), or leave the degree out"
        )
    if inference.parallel not in {"tensor", "pipeline"}:
        return
    settings = dict(read_fields(folder / "config.json"))
    shape = shape_of_hf(settings, vocab_size=int(settings["vocab_size"]))
    needed: tuple[Ability, ...] = ("tp" if inference.parallel == "tensor" else "pp", "cached")
    if why := next(filter(None, (why_not(shape, ability) for ability in needed)), None):
        raise ValueError(
            f"models of type {shape.architecture} have no inference.parallel={inference.parallel}: {why}: set "
            "inference.parallel=data"
        )
    if inference.parallel == "pipeline" and shape.layers < degree:
        raise ValueError(
            f"{shape.layers} layers cannot fill inference.degree = {degree} stages: lower it to {shape.layers} or less"
        )
    kv_heads = [("key/value heads", heads) for heads in (shape.kv_heads, *shape.some_kv_heads)]
    for what, size in (("attention heads", shape.heads), *kv_heads):
        if inference.parallel == "tensor" and size % degree:
            raise ValueError(
                f"{size} {what} cannot be shared by inference.degree = {degree} ranks: choose a degree that divides "
                f"{size}, or inference.parallel=pipeline"
            )
