"""How Triton Inference Server is to run an exported model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from training.config.data import Part


class TritonConfig(Part):
    """What `shardline triton` takes as field=value."""

    max_batch_size: int = Field(8, ge=1, le=1024, description="Most requests that Triton puts together.")
    max_queue_delay_us: int = Field(500, ge=0, description="How long a request may wait for others, microseconds.")
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="auto: Triton takes GPUs where it finds some.")
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="GPUs to use; empty: each that Triton sees.")
    instances: int = Field(1, ge=1, le=64, description="Copies of a model on each GPU, or on the CPU.")
    keep_versions: int = Field(1, ge=1, le=100, description="Newest versions that are served.")
    warm_up: bool = Field(
        True, description="Run each model once at the smallest and the largest batch before it is ready."
    )
