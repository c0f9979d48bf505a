"""The export section of the config: formats, and the bounds within which each must match the model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.config.section import Section


class TensorRTConfig(Section):
    """Shapes and limits of TensorRT engines."""

    usual_batch: int = Field(1, ge=1, le=1024, description="Batch size for which TensorRT engines are tuned.")
    max_batch: int = Field(8, ge=1, le=1024, description="Largest batch size that TensorRT engines accept.")
    max_prefill_batch: int = Field(
        8,
        ge=1,
        le=1024,
        description="Largest number of prompts that a TensorRT engine with a KV cache reads at once, each up to the "
        "whole context; single tokens go up to max_batch.",
    )
    usual_length: int = Field(
        128, ge=1, description="Sequence length, in tokens, for which TensorRT engines are tuned."
    )
    workspace_gib: float = Field(
        4,
        gt=0,
        description="GPU memory, in GiB, that building and running an engine may use in addition to the weights.",
    )
    optimization_level: int = Field(
        3,
        ge=0,
        le=5,
        description="Effort that TensorRT's builder spends on an engine: 0 builds fastest, 5 searches most.",
    )

    @model_validator(mode="after")
    def _usual_is_possible(self) -> Self:
        if self.usual_batch > self.max_batch:
            raise ValueError(
                f"usual_batch = {self.usual_batch} is more than max_batch = {self.max_batch}: raise max_batch"
            )
        return self


class ExportConfig(Section):
    """Exported formats, and the bounds within which they must match the trained model."""

    precisions: tuple[Literal["fp32", "fp16", "int8", "int4"], ...] = Field(
        ("fp32",),
        min_length=1,
        description="Precisions in which ONNX graphs are exported; fp32 must be among them. int8 and int4 quantize the "
        "weights of the graph that the server steps (causal models only).",
    )
    weights: Literal["better", "last", "average"] = Field(
        "better",
        description="Which weights the evaluation's figures are of, and are exported, where train.average makes others "
        "beside the last ones. better: those of the lower held-out loss. Without train.average: the last ones.",
    )
    max_perplexity_increase: float = Field(
        0.005,
        ge=0,
        description="Quality bound for the graphs that the server may step in fewer bits than fp32: the increase of "
        "perplexity on held-out text, as a fraction of fp32's. A precision that exceeds it is left out of the export.",
    )
    onnx_up_to_gib: float = Field(
        32,
        ge=0,
        description="Size of the largest model, in GiB of its fp32 weights, of which ONNX graphs are made and logits "
        "compared; that needs 5 times as much of this host's memory. Larger models, and those for which there is "
        "not that much, are exported as Hugging Face files alone, which are copied from the checkpoint without holding "
        "the model in memory. 0 makes no graphs.",
    )
    max_logit_difference: float = Field(
        1e-3,
        gt=0,
        description="Parity bound for fp32 graphs: the largest absolute difference between any logit of ONNX "
        "Runtime and of torch on held-out text. Graphs that exceed a bound are left out of the export.",
    )
    min_argmax_agreement: float = Field(
        0.999,
        gt=0,
        le=1,
        description="Parity bound for fp32 graphs: the fraction of positions at which ONNX Runtime and torch rate "
        "the same token most likely.",
    )
    max_perplexity_difference: float = Field(
        1e-3,
        gt=0,
        description="Parity bound for fp32 graphs: the difference in perplexity on held-out text, as a fraction of "
        "torch's perplexity.",
    )
    fp16_max_logit_difference: float = Field(
        0.1,
        gt=0,
        description="Parity bound for fp16 graphs: the largest absolute difference between any logit and torch's in "
        "fp32.",
    )
    fp16_min_argmax_agreement: float = Field(
        0.98,
        gt=0,
        le=1,
        description="Parity bound for fp16 graphs: the fraction of positions at which the most likely token is the "
        "same as in fp32.",
    )
    fp16_max_perplexity_difference: float = Field(
        0.01,
        gt=0,
        description="Parity bound for fp16 graphs: the difference in perplexity, as a fraction of torch's in fp32.",
    )
    parity_sequences: int = Field(
        8, ge=1, le=10_000, description="Number of held-out sequences on which parity is checked."
    )

    tensorrt: TensorRTConfig = Field(
        TensorRTConfig(),
        description="Settings of TensorRT engines, which are built where TensorRT and a GPU are available.",
    )
    latency_seconds: float = Field(
        6,
        ge=0,
        le=600,
        description="Time, in seconds, to spend on comparing the speed of ONNX Runtime and torch; 0 skips the "
        "measurement.",
    )
    latency_batches: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 8), min_length=1, description="Batch sizes at which latency is measured."
    )
    latency_lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (32, 128),
        min_length=1,
        description="Sequence lengths, in tokens, at which latency is measured: of the whole text in a forward "
        "pass, of the text so far when one more token is decoded.",
    )
    latency_compile: bool = Field(
        False,
        description="Also measure the latency of the model under torch.compile, which needs a C++ compiler and "
        "about a minute.",
    )

    @model_validator(mode="after")
    def _fp32_is_there(self) -> Self:
        if "fp32" not in self.precisions:
            raise ValueError(
                f"export.precisions = {list(self.precisions)} has no fp32, which the server runs on CPUs: add fp32"
            )
        return self
