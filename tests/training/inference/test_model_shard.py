"""Rows get the logits of their whole text, from whole models of any class and from shards with our cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_configs import tiny_model
from training.inference.model_shard import ModelShard, WholeModel, load_shard
from training.inference.steps import Extend, Move, Prefill

SIZES = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 97}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 97}


@pytest.mark.parametrize("family", ["openai-gpt", "gpt2", "mamba"])
def test_rows_get_the_logits_of_their_whole_text_whether_the_class_keeps_keys_or_not(family: str) -> None:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(MAMBA if family == "mamba" else SIZES))
    ).eval()
    model = WholeModel(hf, vocab_size=97)
    assert bool(model.cache_argument) == (family != "openai-gpt")
    texts = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    for row, text in enumerate(texts):
        model.run(Prefill(batch=0, row=row, ids=text))
    model.move(Move(batch=0, source=2, target=1, length=4))  # the second text has ended
    texts = [[*texts[0], 11], [*texts[2], 12]]
    found = model.run(Extend(batch=0, tokens=[11, 12], positions=[3, 4]))
    with torch.inference_mode():
        expected = torch.cat([hf(input_ids=torch.tensor([text])).logits[:, -1] for text in texts])
    assert (found - expected).abs().max() < 1e-5


def shard_of(folder: Path, dtype: torch.dtype) -> ModelShard:
    return ModelShard(load_shard(folder, dtype=dtype), batches=1, rows=3, context=64, first=True, last=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_shards_decode_in_half_precision(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    hf = tiny_model(model_type).eval().to(dtype)
    hf.save_pretrained(tmp_path)
    text = tuple(range(3, 20))
    got = shard_of(tmp_path, dtype).run(Prefill(batch=0, row=0, ids=text))
    with torch.inference_mode():
        expected = hf(input_ids=torch.tensor([text])).logits[:, -1].float()
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("model_type", ["llama", "starcoder2", "phi3", "qwen2", "gemma2", "gpt_oss"])
def test_shards_decode_rows_of_unlike_length_further_than_a_window_reaches(model_type: str, tmp_path: Path) -> None:
    """All but llama have a window of 5 tokens in some layers; gemma2 caps scores, gpt_oss has sinks."""
    hf = tiny_model(model_type).eval()
    hf.save_pretrained(tmp_path)
    shard = shard_of(tmp_path, torch.float32)
    texts = [tuple(range(3, 20)), tuple(range(40, 43)), tuple(range(60, 71))]
    for row, text in enumerate(texts):
        shard.run(Prefill(batch=0, row=row, ids=text))
    for token in (21, 22):
        lengths = tuple(map(len, texts))
        got = shard.run(Extend(batch=0, tokens=(token,) * len(texts), positions=lengths))
        texts = [(*text, token) for text in texts]
    with torch.inference_mode():
        expected = torch.cat([hf(input_ids=torch.tensor([text])).logits[:, -1] for text in texts])
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
