"""The decode graph continues texts as the model does: padded, in pieces, in batches; its weights are on disk once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.onnx._internal.exporter._errors import ConversionError
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_run import VOCAB
from training.exports.onnx_graphs import experts_bytes, reason, save_graphs
from training.exports.onnx_session import (
    Decoding,
    decoded_logits,
    forward_logits,
    in_place_logits,
    open_session,
)
from training.exports.parity import torch_logits

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": 97,
    "tie_word_embeddings": True,
}


EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}


def causal_model(architecture: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SIZES, **settings)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama(exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with fewer key than query heads, and the folder of its graphs.

    A copy: files that other tests have registered have several links, which onnx.checker takes for an attack.
    """
    folder = tmp_path_factory.mktemp("llama") / "export"
    shutil.copytree(exported_run / "export", folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.tie_word_embeddings
    return model, folder


def texts_of(*lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, SIZES["vocab_size"], length) for length in lengths]


def differences(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))


def test_rows_of_unlike_lengths_padded_left_get_the_logits_of_each_alone(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    texts = texts_of(40, 9, 23)
    expected = [torch_logits(model)([text])[0] for text in texts]
    assert differences(decoded_logits(open_session(folder / "decode.onnx"), texts, steps=6), expected) < 1e-4
    assert differences(in_place_logits(open_session(folder / "batch.onnx"), texts, steps=6), expected) < 1e-4


def test_padding_on_the_right_of_a_prompt_changes_nothing_either(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    texts = texts_of(17, 12)
    prompts, mask = np.zeros((2, 16), dtype=np.int64), np.zeros((2, 16), dtype=np.int64)
    for row, text in enumerate(texts):
        prompts[row, : len(text) - 1], mask[row, : len(text) - 1] = text[:-1], 1
    decoding = Decoding(open_session(folder / "decode.onnx"), rows=2)
    decoding.logits(prompts, mask)
    last = decoding.logits(np.array([[text[-1]] for text in texts]))[:, 0]
    assert differences(list(last), [torch_logits(model)([text])[0][-1] for text in texts]) < 1e-4


def test_a_text_may_come_in_pieces_of_any_length(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    (text,) = texts_of(20)
    decoding = Decoding(open_session(folder / "decode.onnx"), rows=1)
    pieces = [decoding.logits(text[None, start:end])[0] for start, end in ((0, 1), (1, 2), (2, 13), (13, 20))]
    assert differences([np.concatenate(pieces)], torch_logits(model)([text])) < 1e-4


def test_the_graphs_are_valid_and_their_weights_are_on_disk_once(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    for name in ("model.onnx", "decode.onnx", "batch.onnx"):
        if name != "batch.onnx":  # which has operators of ONNX Runtime's own
            onnx.checker.check_model(str(folder / name), full_check=True)
        assert str(Path.cwd()).encode() not in (folder / name).read_bytes(), "it tells where it was made"
    weights = sum(parameter.nbytes for parameter in model.parameters())
    padding = 4096 * len(list(model.parameters()))
    quantized = {"batch_int8.onnx.data", "batch_int4.onnx.data"}
    assert {path.name for path in folder.glob("*.data")} - quantized == {"model.onnx.data"}
    assert (folder / "model.onnx.data").stat().st_size < weights + padding


def test_the_graphs_name_their_sizes_as_people_do(llama: tuple[Any, Path]) -> None:
    _, folder = llama
    session = open_session(folder / "decode.onnx")
    shapes = {tensor.name: tensor.shape for tensor in (*session.get_inputs(), *session.get_outputs())}
    assert shapes["input_ids"] == ["batch", "length"]
    assert shapes["attention_mask"] == ["batch", "past + length"]
    assert shapes["past_key_values.1.value"] == ["batch", 2, "past", 8]
    assert shapes["present.1.value"] == ["batch", 2, "past + length", 8]
    assert shapes["logits"] == ["batch", "length", VOCAB]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen3", {"head_dim": 16}),
        ("gemma", {"head_dim": 8}),
        ("mixtral", {"num_local_experts": 4, **EXPERTS}),
        ("qwen3_moe", {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, **EXPERTS}),
    ],
)
def test_other_causal_classes_decode_too(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = causal_model(architecture, **settings)
    experts = model.get_experts_implementation()
    assert save_graphs(model, tmp_path, causal=True) == {}
    assert model.get_experts_implementation() == experts, "only what is traced computes by batched products"
    texts = texts_of(21, 30)
    expected = [torch_logits(model)([text])[0] for text in texts]
    assert differences(decoded_logits(open_session(tmp_path / "decode.onnx"), texts, steps=4), expected) < 1e-4
    assert differences(in_place_logits(open_session(tmp_path / "batch.onnx"), texts, steps=4), expected) < 1e-4
    assert differences([forward_logits(open_session(tmp_path / "model.onnx"), texts[0][None])[0]], expected[:1]) < 1e-4


@pytest.mark.slow
def test_a_class_without_keys_and_values_has_a_forward_graph_and_a_reason(tmp_path: Path) -> None:
    config = AutoConfig.for_model("openai-gpt", n_embd=32, n_layer=1, n_head=4, n_positions=64, vocab_size=97)
    skipped = save_graphs(AutoModelForCausalLM.from_config(config).eval(), tmp_path, causal=True)
    assert set(skipped) == {"decode.onnx"}
    assert "OpenAIGPTLMHeadModel cannot be traced with its cache" in skipped["decode.onnx"]
    assert forward_logits(open_session(tmp_path / "model.onnx"), np.zeros((2, 5), dtype=np.int64)).shape == (2, 5, 97)


def test_a_class_that_cannot_be_converted_leaves_no_file_but_reasons_in_plain_text(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, state_size=4, vocab_size=97)
    skipped = save_graphs(AutoModelForCausalLM.from_config(config).eval(), tmp_path, causal=True)
    assert set(skipped) == {"decode.onnx", "model.onnx"}
    assert skipped["model.onnx"].startswith("MambaForCausalLM cannot be converted (")
    assert [*tmp_path.iterdir()] == []


def test_a_reason_is_the_first_line_of_what_began_it_without_colours() -> None:
    step = ConversionError("Failed to convert. \x1b[96mThis is step 3/3\x1b[0m of exporting\n- do this")
    assert reason(step) == "ConversionError: Failed to convert. This is step 3/3 of exporting"
    step.__cause__ = KeyError("aten.grouped_mm")
    assert reason(step) == "KeyError: 'aten.grouped_mm'"


def test_a_mixture_of_experts_copies_the_weights_of_those_that_a_token_is_routed_to() -> None:
    """Of both products of both experts of a token, in fp32."""
    assert experts_bytes(causal_model("mixtral", num_local_experts=4, **EXPERTS)) == 4 * 2 * 3 * 32 * 64
    assert experts_bytes(causal_model("llama")) == 0
