"""Models that cannot be divided over devices are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_configs import tiny_config
from training.config.serving import InferenceConfig
from training.planner.reasons.checks import check_inference


@pytest.mark.parametrize(
    ("model_type", "changes", "inference", "message"),
    [
        (
            "llama",
            {},
            {"parallel": "tensor", "degree": 16},
            "heads cannot be shared by inference.degree = 16",
        ),
        (
            "llama",
            {"num_key_value_heads": 1},
            {"parallel": "tensor", "degree": 2},
            "1 key/value heads",
        ),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 1}, {"parallel": "tensor", "degree": 2}, "1 key/value heads"),
        ("gpt2", {}, {"parallel": "pipeline", "degree": 9}, "layers cannot fill inference.degree = 9 stages: lower it"),
        (
            "bloom",
            {},
            {"parallel": "tensor", "degree": 2},
            "no inference.parallel=tensor: .*parallel=data",
        ),
        ("llama", {}, {"degree": 2}, "inference.parallel = none: set inference.parallel to data"),
        ("llama", {}, {"parallel": "tensor", "degree": 2}, ""),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_numbers(
    tmp_path: Path, model_type: str, changes: dict[str, int], inference: dict[str, Any], message: str
) -> None:
    config = tiny_config(model_type)
    config.update(changes)
    config.save_pretrained(tmp_path)
    if not message:
        return check_inference(tmp_path, InferenceConfig(**inference))
    with pytest.raises(ValueError, match=message):
        check_inference(tmp_path, InferenceConfig(**inference))
