"""What the ranks that generate text are told: which model, how it is shared among them, and where requests come from.

Written by tasks/inference/torch_engine.py, read by every rank of training/generate.py.
"""

from __future__ import annotations

from typing import Literal

from training.records.record import Record

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
