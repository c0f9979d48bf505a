"""Counted parameters: those of models' own cards, and those of the models that we train."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from training.models.sizes import count_model
from training.planner.model_shape import flops_per_token


def sizes(layers: int, width: int, heads: int, kv_heads: int, mlp: int, words: int, **more: Any) -> dict[str, Any]:
    """The fields that most config.json files share."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": words,
        **more,
    }


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
GPT_OSS = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, **UNTIED}
QWEN3_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, **UNTIED}
# A model's name, its type, its config.json, its parameters, and billions that a token uses, as its card says.
CARDS: list[tuple[str, str, dict[str, Any], int, float | None]] = [
    ("Qwen3-0.6B", "qwen3", sizes(28, 1024, 16, 8, 3072, 151936, head_dim=128, **TIED), 596_049_920, None),
    ("Qwen3-8B", "qwen3", sizes(36, 4096, 32, 8, 12288, 151936, head_dim=128, **UNTIED), 8_190_735_360, None),
    ("Qwen3-30B-A3B", "qwen3_moe", sizes(48, 2048, 32, 4, 6144, 151936, **QWEN3_MOE), 30_532_122_624, 3.3),
    ("Llama-3.1-8B", "llama", sizes(32, 4096, 32, 8, 14336, 128256, **UNTIED), 8_030_261_248, None),
    ("Mistral-7B-v0.1", "mistral", sizes(32, 4096, 32, 8, 14336, 32000, **UNTIED), 7_241_732_096, None),
    ("Mixtral-8x7B", "mixtral", sizes(32, 4096, 32, 8, 14336, 32000, num_local_experts=8), 46_702_792_704, 12.9),
    ("gemma-2-2b", "gemma2", sizes(26, 2304, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888, None),
    ("gemma-3-1b-pt", "gemma3_text", sizes(26, 1152, 4, 1, 6912, 262144, head_dim=256), 999_885_952, None),
    ("OLMo-2-1124-7B", "olmo2", sizes(32, 4096, 32, 32, 11008, 100352, **UNTIED), 7_298_617_344, None),
    ("granite-3.1-2b-base", "granite", sizes(40, 2048, 32, 8, 8192, 49155, **TIED), 2_533_531_648, None),
    ("DeepSeek-V3", "deepseek_v3", {}, 671_026_404_352, 37.0),
    ("gpt-oss-20b", "gpt_oss", sizes(24, 2880, 64, 8, 2880, 201088, **GPT_OSS), 20_914_757_184, 4.2),
    ("GPT-2", "gpt2", {}, 124_439_808, None),
    ("phi-2", "phi", sizes(32, 2560, 32, 32, 10240, 51200, **UNTIED), 2_779_683_840, None),
    ("pythia-160m", "gpt_neox", sizes(12, 768, 12, 12, 3072, 50304, **UNTIED), 162_322_944, None),
]


@pytest.mark.parametrize(("name", "kind", "config", "parameters", "used"), CARDS, ids=[card[0] for card in CARDS])
def test_planned_parameters_are_those_of_the_models_cards(
    name: str, kind: str, config: dict[str, Any], parameters: int, used: float | None
) -> None:
    shape = count_model(AutoConfig.for_model(kind, **config), objective="causal")
    found = shape.sizes
    print(name, found.used, flops_per_token(shape), found.cut / found.parameters)
    assert shape.parameters == parameters
    assert found.used == parameters if used is None else found.used / 1e9 == pytest.approx(used, rel=0.02)
