"""The export section of the config: formats, and the bounds that each must keep."""

from __future__ import annotations

from pydantic import Field

from training.data_config import Part


class ExportConfig(Part):
    max_logit_difference: float = Field(
        1e-3, gt=0, description="Parity bound: largest |ONNX - torch| of any logit on held-out text."
    )
    min_argmax_agreement: float = Field(
        0.999, gt=0, le=1, description="Parity bound: share of positions whose likeliest token is the same."
    )
    parity_sequences: int = Field(8, ge=1, le=10_000, description="Held-out sequences that parity is checked on.")
