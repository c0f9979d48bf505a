"""The export section of the config: formats, and the bounds that each must keep."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from training.data_config import Part


class ExportConfig(Part):
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

    @model_validator(mode="after")
    def _fp32_is_there(self) -> Self:
        if "fp32" not in self.precisions:
            raise ValueError(
                f"export.precisions = {list(self.precisions)} has no fp32, which the server runs on CPUs: add fp32"
            )
        return self
