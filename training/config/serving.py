"""Configs of the commands that run and serve a trained model; they are not part of a run's config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from training.config.data import DataConfig
from training.config.evaluation import EvaluationConfig
from training.config.section import Section


class InferenceConfig(Section):
    """The engine and the devices that run a trained model."""

    engine: Literal["auto", "onnx", "torch", "vllm"] = "auto"
    """Engine that runs the model. onnx: ONNX Runtime on the CPU. torch: one process of transformers, for any class.
    vllm: the program `vllm`, on GPUs, or on the CPU if it is a build for CPUs. auto: vllm if `parallel` is set; with
    GPUs vllm if its build for GPUs is on PATH, else torch; without GPUs torch if the export has no graph that decodes,
    else onnx.
    """
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """Precision of weights and matrix products. auto: with onnx the fastest that the export measured and whose
    perplexity passed; with torch fp32 on CPUs, on GPUs bf16 where they support it, else fp16; with vllm vLLM's own
    choice. int8 and int4 need engine onnx.
    """
    parallel: Literal["none", "data", "tensor", "pipeline"] = "none"
    """How several devices share the model, in evaluation and in vLLM. none: one device. data: each device holds a copy
    and serves part of the prompts. tensor: each matrix is split. pipeline: the layers are distributed.
    """
    degree: int = Field(1, ge=1, le=1024)
    """Number of devices to use. More than 1 needs `parallel`."""
    vllm_memory: float = Field(0.45, gt=0, le=0.95)
    """Share of each GPU's memory that one vLLM process takes. A server that changes versions runs two processes for a
    while, so with more than 0.45 the second one may find too little.
    """
    threads: int = Field(0, ge=0, le=1024)
    """Threads of each process of the engine on a CPU. 0: the cores are divided among the processes."""


class ServingConfig(Section):
    """Limits of a server."""

    max_concurrent: int = Field(16, ge=1, le=4096)
    """Maximum number of requests that are generated at the same time."""
    max_waiting: int = Field(64, ge=0, le=100_000)
    """Maximum number of requests that wait. Further requests are refused with status 429."""
    max_new_tokens: int = Field(4096, ge=1, le=1_000_000)
    """Maximum number of new tokens that one request may ask for."""
    max_prompt_chars: int = Field(100_000, ge=1)
    """Maximum length of a prompt, in characters. A request's body may have ten bytes for each of them."""
    timeout_s: float = Field(120, gt=0)
    """Seconds that a request may take in all: its body, a chat's template, a grammar, the wait for a free place, and
    all of its texts.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call this server from a browser, such as https://example.org; "*" means all. Empty
    means none.
    """
    host_names: tuple[str, ...] = ()
    """Names under which clients reach this server, such as model.example.org behind a proxy. Addresses, names without a
    dot, those of this machine, and those that end in .local, .internal or .svc need not be listed; a request for
    another host is refused, as a page of another site could send it.
    """
    poll_s: float = Field(5, gt=0)
    """Seconds between checks of the alias."""
    token_file: str = ""
    """Path of a file with the accepted bearer tokens, one per line; empty means that requests need no token."""

    @property
    def max_body_bytes(self) -> int:
        """A character is up to 6 bytes of JSON; the least is room for a short request's other fields."""
        return max(1000, 10 * self.max_prompt_chars)

    @field_validator("cors_origins")
    @classmethod
    def _without_paths(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if "/" in origin.partition("://")[2]:
                raise ValueError(f"{origin} has a path, which browsers never send: write it as https://example.org")
        return origins


class EvaluateConfig(Section):
    """The settings of `shardline evaluate`, given as section.field=value.

    An empty `data.path` means the run's own held-out text.
    """

    inference: InferenceConfig = InferenceConfig()
    """Engine and devices that run the model."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Downstream tasks and samples. What is not set here is as in the run's own config."""
    data: DataConfig = DataConfig()
    """Text to evaluate on; without a `path` it is the held-out text of the run."""


class ServeConfig(Section):
    """The settings of `shardline serve` and `shardline generate`, given as section.field=value."""

    inference: InferenceConfig = InferenceConfig()
    """Engine and devices that run the model."""
    serving: ServingConfig = ServingConfig()
    """Limits of the server."""

    def known_as(self, host: str) -> ServeConfig:
        """Return the config of a server that clients may also ask under the name that it listens on."""
        serving = self.serving.model_copy(update={"host_names": (*self.serving.host_names, host)})
        return self.model_copy(update={"serving": serving})
