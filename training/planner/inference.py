"""Checks that a model can be divided over devices for inference as the config asks."""

from __future__ import annotations

import json
from pathlib import Path

from training.config.serving import InferenceConfig
from training.planner.job import KNOWN_ARCHITECTURES
from training.planner.model_shape import shape_of_hf


def check_inference(folder: Path, inference: InferenceConfig, *, device_kind: str = "cpu") -> None:
    """Raises ValueError, with the numbers and the cure, if the model cannot be divided as the config asks."""
    degree = inference.degree
    if inference.engine == "deepspeed":
        _check_deepspeed(folder, inference, device_kind=device_kind)
    if inference.parallel == "none" and degree > 1:
        raise ValueError(
            f"inference.degree = {degree}, but inference.parallel = none: set inference.parallel to data (copies), "
            "tensor (split matrices) or pipeline (distributed layers), or leave the degree out"
        )
    if inference.parallel not in {"tensor", "pipeline"}:
        return
    settings = json.loads((folder / "config.json").read_text())
    shape = shape_of_hf(settings, vocab_size=int(settings["vocab_size"]), context=0)
    if shape.architecture not in KNOWN_ARCHITECTURES:
        raise ValueError(
            f"a {shape.architecture} model has no tensor or pipeline plan (there is one for "
            f"{', '.join(KNOWN_ARCHITECTURES)}): set inference.parallel=data"
        )
    if inference.parallel == "pipeline" and shape.layers < degree:
        raise ValueError(
            f"{shape.layers} layers cannot fill inference.degree = {degree} stages: lower it to {shape.layers} or less"
        )
    for what, size in (("attention heads", shape.heads), ("key/value heads", shape.kv_heads)):
        if inference.parallel == "tensor" and size % degree:
            raise ValueError(
                f"{size} {what} cannot be shared by inference.degree = {degree} ranks: choose a degree that divides "
                f"{size}, or inference.parallel=pipeline"
            )


def _check_deepspeed(folder: Path, inference: InferenceConfig, *, device_kind: str) -> None:
    """Refuse what DeepSpeed-Inference (0.19.8) cannot do: on CPUs that is all but automatic tensor parallelism."""
    if inference.parallel not in {"none", "tensor"}:
        raise ValueError(
            f"inference.parallel = {inference.parallel}: DeepSpeed-Inference splits matrices (tensor) or runs on one "
            "device (none): choose one of them, or inference.engine=torch"
        )
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    if device_kind == "cpu" and (inference.parallel == "none" or model_type == "gpt2"):
        left = "runs a model on one rank as it is" if inference.parallel == "none" else "has nothing for gpt2 models"
        raise ValueError(
            f"inference.engine = deepspeed: its kernels need CUDA, and no GPU is visible. Without them it {left}: "
            "set inference.engine=torch"
        )
