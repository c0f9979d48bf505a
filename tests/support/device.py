"""The device of tests of ranks: CPUs, or with SHARDLINE_TEST_DEVICE=cuda the GPUs that are here (make test-gpu)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

DEVICE_KIND = os.environ.get("SHARDLINE_TEST_DEVICE", "cpu")
LOOSER = 10.0 if DEVICE_KIND == "cuda" else 1.0  # sums are made in another order at each start
assert DEVICE_KIND in {"cpu", "cuda"}, f"SHARDLINE_TEST_DEVICE={DEVICE_KIND}: cpu or cuda"


def on_device(overrides: dict[str, Any], *, ranks: int) -> dict[str, Any]:
    """A config's overrides for so many ranks there; the test is skipped where GPUs are too few."""
    if DEVICE_KIND == "cpu":
        return overrides
    if ranks > torch.cuda.device_count():
        pytest.skip(f"{ranks} GPUs are needed, {torch.cuda.device_count()} are here")
    return {"parallel__precision": "fp32", "train__deterministic": True, **overrides}


def rank_environment() -> dict[str, str]:
    """Exact products: cuBLAS rounds to TF32's 10 bits else."""
    return {"NVIDIA_TF32_OVERRIDE": "0"} if DEVICE_KIND == "cuda" else {}
