"""Texts of whole models of any class: those of the model's own logits, whatever is decoded at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_configs import tiny_model
from training.inference.sampling import SamplingParams, choose_tokens
from training.inference.whole_model import (
    DecodeOneByOne,
    Decoder,
    DecodeTogether,
    DecodeUncached,
    TokenChoice,
    decoder_of,
)

CONTEXT = 32
DRAWN = SamplingParams(temperature=1.0, top_k=40, top_p=0.9)
PROMPTS = [[5, 6, 7], [8], list(range(1, 25)), [9] * 12, [11, 12]] * 4  # more than are decoded together


def loaded(model_type: str) -> Any:
    """A model with the attention that its class has when it is loaded from a folder."""
    model = tiny_model(model_type).eval()
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model


@contextmanager
def decoding(model: Any) -> Iterator[Decoder]:
    decoder = decoder_of(model, context=CONTEXT)
    try:
        yield decoder
    finally:
        decoder.close()


def text(
    decoder: Decoder, ids: list[int], *, seed: int, new_tokens: int = 8, end_ids: tuple[int, ...] = ()
) -> list[int]:
    new: list[int] = []
    choice = TokenChoice(DRAWN, np.random.default_rng(seed))
    decoder.decode(ids, choice, new_tokens=new_tokens, end_ids=list(end_ids), emit=new.append)
    return new


def expected(model: Any, ids: list[int], *, seed: int, new_tokens: int = 8) -> list[int]:
    seen, random = list(ids), np.random.default_rng(seed)
    with torch.inference_mode():
        for _ in range(new_tokens):
            seen += choose_tokens(model(torch.tensor([seen])).logits[:, -1].float(), [DRAWN], [random])
    return seen[len(ids) :]


@pytest.mark.parametrize(
    ("model_type", "decoder_class"),
    [
        *(
            (model_type, DecodeTogether) for model_type in ("llama", "gpt2", "mistral", "gemma3_text")
        ),  # some have windows
        ("mamba", DecodeOneByOne),
        ("bloom", DecodeOneByOne),  # its positions are biases, which continuous batching does not know
        ("openai-gpt", DecodeOneByOne),  # it has no cache
        ("dory", DecodeUncached),  # its cache ends in an error
    ],
)
def test_texts_are_those_of_the_models_own_logits(model_type: str, decoder_class: type) -> None:
    model = loaded(model_type)
    prompts = PROMPTS if decoder_class is DecodeTogether else PROMPTS[:3]
    wanted = [expected(model, ids, seed=number) for number, ids in enumerate(prompts)]
    with decoding(model) as decoder, ThreadPoolExecutor(len(prompts)) as pool:
        assert type(decoder) is decoder_class
        found = [pool.submit(text, decoder, ids, seed=number) for number, ids in enumerate(prompts)]
        assert [each.result() for each in found] == wanted
        end = wanted[0][3]
        ended = text(decoder, prompts[0], seed=0, end_ids=(96, end))
        assert ended == wanted[0][: wanted[0].index(end) + 1]


@pytest.mark.parametrize("model_type", ["llama", "mamba"])
def test_a_text_whose_reader_leaves_makes_room_for_others(model_type: str) -> None:
    model = loaded(model_type)
    with decoding(model) as decoder:

        class LeftError(Exception):
            pass

        def leave(token: int) -> None:
            raise LeftError

        for _ in range(decoder.rows + 1):
            choice = TokenChoice(DRAWN, np.random.default_rng(0))
            with pytest.raises(LeftError):
                decoder.decode([5, 6], choice, new_tokens=10**6, end_ids=[], emit=leave)
        assert text(decoder, [5, 6, 7], seed=1) == expected(model, [5, 6, 7], seed=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_half_precision_is_no_reason_to_decode_one_by_one(model_type: str, dtype: torch.dtype) -> None:
    with decoding(loaded(model_type).to(dtype)) as decoder:
        assert type(decoder) is DecodeTogether
        assert len(text(decoder, [5, 6, 7], seed=1)) == 8


def test_a_batch_that_stops_is_seen() -> None:
    decoder = decoder_of(loaded("llama"), context=CONTEXT)
    decoder.close()
    decoder.wait()
    with pytest.raises(RuntimeError, match="continuous batching has ended"):
        text(decoder, [5], seed=0)


def test_a_class_that_no_way_decodes_is_refused_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    monkeypatch.setattr("training.inference.whole_model.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match=r"not up to 16 texts together .* logits up to .* differ by .*; not one text"):
        decoder_of(model, context=CONTEXT)
