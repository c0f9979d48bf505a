"""Attention within documents is that of a dense mask, in results and gradients, and makes no such mask."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tests.support.plain_torch import LargestTensor
from training.models import document_attention
from training.models.document_attention import (
    CPU_CONTEXT,
    attend,
    document_blocks,
    document_bounds,
    own_rules,
    way_to_attend,
)
from training.models.language_model import LanguageModel, attention_mask
from training.shards.packing import PADDING

CONTEXT = 2 * CPU_CONTEXT
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 16
ON_A_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="")])


def documents_of(context: int = CONTEXT) -> Tensor:
    """Three sequences: of many documents, some of one token; of one document; of two and padding."""
    torch.manual_seed(0)
    many = (torch.rand(context) < 0.05).cumsum(0)
    padded = torch.arange(context) * 3 // context
    padded[padded == 2] = PADDING
    return torch.stack([many, torch.full((context,), 7), padded])


def model_of(architecture: str) -> LanguageModel:
    torch.manual_seed(0)
    llama = {
        "vocab_size": 64,
        "hidden_size": HEADS * HEAD_WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "max_position_embeddings": CONTEXT,
    }
    gpt2 = {"vocab_size": 64, "n_embd": 64, "n_head": HEADS, "n_layer": 2, "n_positions": CONTEXT}
    sizes: dict[str, dict[str, Any]] = {
        "llama": llama | {"num_key_value_heads": KV_HEADS},
        "gpt2": gpt2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "bert": llama | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }
    auto = AutoModelForMaskedLM if architecture == "bert" else AutoModelForCausalLM
    return LanguageModel(auto.from_config(AutoConfig.for_model(architecture, **sizes[architecture])), precision="fp32")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_loss_and_gradients_are_those_of_a_dense_mask_which_is_never_made(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, documents = model_of(architecture), documents_of()
    tokens = torch.randint(64, (2, *documents.shape))
    found = {}
    for way, shortest in (("by document", 0), ("dense", CONTEXT + 1)):
        monkeypatch.setattr(document_attention, "CPU_CONTEXT", shortest)
        model.zero_grad()
        with LargestTensor() as largest:
            loss = model(*tokens, documents=documents)
            loss.backward()
        found[way] = loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert (largest.numel < documents.numel() * CONTEXT) == (way == "by document")
    (loss, gradients), (dense_loss, dense_gradients) = found.values()
    torch.testing.assert_close(loss, dense_loss, rtol=1e-6, atol=0)
    assert gradients.keys() == dense_gradients.keys()
    for name, gradient in dense_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7, name


def of_piece(number: int, of: int) -> list[slice]:
    """The places of a context parallel rank's tokens: `of` is twice the number of ranks."""
    length = CONTEXT // of
    return [slice(piece * length, (piece + 1) * length) for piece in (number, of - 1 - number)]


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("way", ["bounds", "blocks"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "pieces", [[slice(0, CONTEXT)], of_piece(0, 4), of_piece(1, 4)], ids=["whole", "first and last", "middle"]
)
def test_each_way_sees_what_a_dense_mask_lets_through(pieces: list[slice], causal: bool, way: str, device: str) -> None:
    """Queries of whole sequences, and of a context parallel rank's two pieces.

    On a GPU: varlen's kernel, and flex_attention compiled, which on CPUs has no backward pass.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    take = functools.partial(_taken, pieces=pieces)
    documents = documents_of().to(device)
    heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    tensors = [torch.randn(3, number, CONTEXT, HEAD_WIDTH, device=device, dtype=dtype) for number in heads.values()]
    with_gradients = way == "bounds" or device == "cuda"
    query, key, value = (tensor.requires_grad_(with_gradients) for tensor in tensors)
    own = take(query.transpose(1, 2)).transpose(1, 2)
    mask: Any = document_bounds(documents, pieces, causal=causal)
    if way == "blocks":
        places = take(torch.arange(CONTEXT, device=device)[None])[0]
        mask = document_blocks(documents, places, causal=causal)
    run: Any = torch.compile(attend) if way == "blocks" and device == "cuda" else attend
    got = run(own, key, value, mask, causal=causal, scale=None)
    dense = attention_mask(documents, causal=causal, rows=take)
    expected = torch.nn.functional.scaled_dot_product_attention(own, key, value, attn_mask=dense, enable_gqa=True)
    expected = expected.transpose(1, 2)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
    if not with_gradients:
        return
    along = torch.randn_like(expected)
    for mine, theirs in zip(*(torch.autograd.grad(each, tensors, along) for each in (got, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=2 * bound)


def _taken(whole: Tensor, pieces: list[slice]) -> Tensor:
    return torch.cat([whole[:, piece] for piece in pieces], 1)


@pytest.mark.parametrize(
    ("capability", "dtype", "options", "way"),
    [
        ((9, 0), torch.bfloat16, {}, "varlen"),
        ((9, 0), torch.bfloat16, {"dropout": True}, "dense"),
        ((9, 0), torch.float32, {}, "dense"),
        ((9, 0), torch.float32, {"compiled": True}, "flex"),
        ((7, 0), torch.float16, {"compiled": True}, "flex"),
        ((9, 0), torch.bfloat16, {"compiled": True, "head_width": 512}, "flex"),
        ((9, 0), torch.bfloat16, {"head_width": 100}, "dense"),
    ],
)
def test_a_gpu_gets_what_it_can_run(
    capability: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    given = {"context": 4096, "head_width": 128, "compiled": False, "dropout": False} | options
    assert way_to_attend(torch.device("cuda"), dtype, **given) == way


def test_dropout_of_attention_keeps_the_dense_mask_in_training_and_not_in_validation() -> None:
    model, documents = model_of("gpt2"), documents_of()
    model.hf.config.attn_pdrop = 0.1  # type: ignore[union-attr]
    assert model.train().document_mask(documents).dtype == torch.bool
    assert model.eval().document_mask(documents).dtype == torch.int32


def test_only_a_window_shorter_than_the_sequence_leaves_the_fast_ways() -> None:
    sequence = torch.zeros(1, 2, 64, 16)
    assert own_rules(sequence, sequence, {"sliding_window": 64}) == {}
    assert own_rules(sequence, sequence, {"sliding_window": 63}) == {"window": 63}
