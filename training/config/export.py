"""The export section of the config: formats, and the bounds that each must keep."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.config.section import Section


class TensorRTConfig(Section):
    """Shapes and limits of TensorRT's engines."""

    usual_batch: int = Field(1, ge=1, le=1024, description="Batch that engines are tuned for.")
    max_batch: int = Field(8, ge=1, le=1024, description="Largest batch that engines take.")
    usual_length: int = Field(
        128, ge=1, description="Tokens of a text, or before a new one, that engines are tuned for."
    )
    workspace_gib: float = Field(4, gt=0, description="GPU memory that building and running may use beside weights.")
    optimization_level: int = Field(3, ge=0, le=5, description="Effort of the builder, 5 is the most.")

    @model_validator(mode="after")
    def _usual_is_possible(self) -> Self:
        if self.usual_batch > self.max_batch:
            raise ValueError(
                f"usual_batch = {self.usual_batch} is more than max_batch = {self.max_batch}: raise max_batch"
            )
        return self


class ExportConfig(Section):
    precisions: tuple[Literal["fp32", "fp16"], ...] = Field(
        ("fp32",), min_length=1, description="Precisions of the ONNX graphs; fp32 is always among them."
    )
    max_logit_difference: float = Field(
        1e-3, gt=0, description="Parity bound: largest |ONNX - torch| of any logit on held-out text."
    )
    min_argmax_agreement: float = Field(
        0.999, gt=0, le=1, description="Parity bound: share of positions whose likeliest token is the same."
    )
    max_perplexity_difference: float = Field(
        1e-3, gt=0, description="Parity bound: difference of the perplexities on held-out text, as a share of torch's."
    )
    fp16_max_logit_difference: float = Field(0.1, gt=0, description="The same bound for fp16 graphs.")
    fp16_min_argmax_agreement: float = Field(0.98, gt=0, le=1, description="The same bound for fp16 graphs.")
    fp16_max_perplexity_difference: float = Field(0.01, gt=0, description="The same bound for fp16 graphs.")
    parity_sequences: int = Field(8, ge=1, le=10_000, description="Held-out sequences that parity is checked on.")

    tensorrt: TensorRTConfig = Field(TensorRTConfig(), description="Engines, where TensorRT and a GPU are there.")
    latency_seconds: float = Field(
        6, ge=0, le=600, description="Time for comparing the speed of ONNX Runtime and torch; 0: it is not measured."
    )
    latency_batches: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 8), min_length=1, description="Texts at a time."
    )
    latency_lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (32, 128), min_length=1, description="Tokens of a text, or before the token that is decoded."
    )
    latency_compile: bool = Field(
        False, description="Measure torch.compile as well: a minute of compilation, by a C++ compiler."
    )

    @model_validator(mode="after")
    def _fp32_is_there(self) -> Self:
        if "fp32" not in self.precisions:
            raise ValueError(
                f"export.precisions = {list(self.precisions)} has no fp32, which the server runs on CPUs: add fp32"
            )
        return self
