"""A whole model of any class decodes row by row, with its own cache or without one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training.inference.model_shard import WholeModel
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
