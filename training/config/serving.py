"""How a trained model is run and served; not part of a run, so not of its config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from training.config.data import DataConfig
from training.config.evaluation import EvaluationConfig
from training.config.section import Section


class InferenceConfig(Section):
    """On what, and on how many devices, a trained model runs."""

    engine: Literal["auto", "onnx", "torch", "deepspeed"] = Field(
        "auto",
        description="onnx: ONNX Runtime on the CPU. torch: ranks of torch. deepspeed: the same with the model by "
        "DeepSpeed-Inference. auto: torch where there are GPUs or `parallel` is set, else onnx.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Of weights and products. auto: fp32 on CPUs, bf16 on GPUs that have it, else fp16."
    )
    parallel: Literal["none", "data", "tensor", "pipeline"] = Field(
        "none",
        description="Over several devices: copies that share the prompts, each matrix split, or the layers dealt.",
    )
    degree: int = Field(1, ge=1, le=1024, description="Devices to use; only with `parallel`.")


class ServingConfig(Section):
    """Limits of a server."""

    max_concurrent: int = Field(16, ge=1, le=4096, description="Requests that are generated at the same time.")
    max_waiting: int = Field(64, ge=0, le=100_000, description="Requests that wait; the next one gets a 429.")
    max_new_tokens: int = Field(4096, ge=1, le=1_000_000, description="Most tokens that one request may ask for.")
    max_prompt_chars: int = Field(100_000, ge=1, description="Longest prompt in characters.")
    max_body_bytes: int = Field(1_000_000, ge=1000, description="Largest body that is read.")
    timeout_s: float = Field(120, gt=0, description="A request that takes longer is ended.")
    drain_s: float = Field(30, ge=0, description="For requests under way, on SIGTERM.")
    poll_s: float = Field(5, gt=0, description="Between two looks at the alias.")
    token_file: str = Field("", description="File with one accepted bearer token a line; empty: none is asked for.")


class EvaluateConfig(Section):
    """What `shardline evaluate` takes as section.field=value; `data.path` empty: the run's own held-out text."""

    inference: InferenceConfig = Field(InferenceConfig(), description="Devices, and how they share the model.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="Tasks and samples; a run's own otherwise.")
    data: DataConfig = Field(DataConfig(), description="Other text than the run's held-out split.")


class ServeConfig(Section):
    """What `shardline serve` and `shardline generate` take as section.field=value."""

    inference: InferenceConfig = Field(InferenceConfig(), description="Engine and devices.")
    serving: ServingConfig = Field(ServingConfig(), description="Limits of the server.")


class TritonConfig(Section):
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
