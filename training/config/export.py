"""The export section of the config: formats, and the bounds within which each must match the model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from training.config.section import Section


class ExportConfig(Section):
    """Exported formats, and the bounds within which they must match the trained model."""

    precisions: tuple[Literal["fp32", "fp16", "int8", "int4"], ...] = Field(("fp32",), min_length=1)
    """Precisions in which ONNX graphs are exported; fp32 must be among them. int8 and int4 quantize the weights of the
    graph that the server steps (causal models only).
    """
    weights: Literal["better", "last", "average"] = "better"
    """Which weights the evaluation's figures are of, and are exported, where train.average makes others beside the last
    ones. better: those of the lower held-out loss. Without train.average: the last ones.
    """
    max_perplexity_increase: float = Field(0.005, ge=0)
    """Quality bound for the graphs that the server may step in fewer bits than fp32: the increase of perplexity on
    held-out text, as a fraction of fp32's. A precision that exceeds it is left out of the export.
    """
    onnx_up_to_gib: float = Field(32, ge=0)
    """Size of the largest model, in GiB of its fp32 weights, of which ONNX graphs are made and logits compared; that
    needs 5 times as much of this host's memory. Larger models, and those for which there is not that much, are exported
    as Hugging Face files alone, which are copied from the checkpoint without holding the model in memory. 0 makes no
    graphs.
    """
    max_logit_difference: float = Field(1e-3, gt=0)
    """Parity bound: the largest absolute difference between any logit of an fp32 graph in ONNX Runtime and of torch on
    held-out text, and a hundredth of that of an fp16 graph. Graphs that exceed a bound are left out of the export.
    """
    latency_seconds: float = Field(6, ge=0, le=600)
    """Time, in seconds, to spend on comparing the speed of ONNX Runtime and torch; 0 skips the measurement."""

    @model_validator(mode="after")
    def _fp32_is_there(self) -> Self:
        if "fp32" not in self.precisions:
            raise ValueError(
                f"export.precisions = {list(self.precisions)} has no fp32, which the server runs on CPUs: add fp32"
            )
        return self
