"""What the ranks that generate text are told: which model, how it is shared among them, and where requests come from.

Written by tasks/inference/torch_engine.py, read by every rank of training/generate.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from training.planner.cost_model import DESCRIBED
from training.records.plan import Record
from training.config.serving import InferenceConfig
from training.planner.model_shape import shape_of_hf

ROWS = 16  # sequences that a batch may hold


class DecodePlan(Record):
    """`channel`: Unix socket; each leading rank connects to it, and ends when it is closed.

    `rows`: sequences in one batch; a pipeline has one batch a stage. `context`: tokens that the model may see.
    """

    folder: str
    channel: str
    parallel: Literal["none", "data", "tensor", "pipeline"]
    degree: int
    device_kind: Literal["cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    deepspeed: bool = False
    context: int
    rows: int = ROWS
    threads_per_rank: int

    @property
    def leaders(self) -> int:
        """Ranks with a channel of their own."""
        return self.degree if self.parallel == "data" else 1


def check_inference(folder: Path, inference: InferenceConfig, *, device_kind: str = "cpu") -> None:
    """Raises ValueError, with the numbers, for a model that cannot be shared as asked for."""
    degree = inference.degree
    if inference.engine == "deepspeed":
        _check_deepspeed(folder, inference, device_kind=device_kind)
    if inference.parallel == "none" and degree > 1:
        raise ValueError(
            f"inference.degree = {degree}, but inference.parallel = none: set inference.parallel to data (copies), "
            "tensor (split matrices) or pipeline (dealt layers), or leave the degree out"
        )
    if inference.parallel not in {"tensor", "pipeline"}:
        return
    settings = json.loads((folder / "config.json").read_text())
    shape = shape_of_hf(settings, vocab_size=int(settings["vocab_size"]), context=0)
    if shape.architecture not in DESCRIBED:
        raise ValueError(
            f"a {shape.architecture} model has no tensor or pipeline plan (there is one for {', '.join(DESCRIBED)}): "
            "set inference.parallel=data"
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
    """What it has for CPUs is automatic tensor parallelism, which leaves out classes that have kernels (0.19.8)."""
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
