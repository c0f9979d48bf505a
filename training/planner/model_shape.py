"""The model's numbers: its shape from a config, its parameter count and its FLOPs per token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from training.config.model import ModelConfig
from training.config.run import RunConfig
from training.facts.families import adds_loss, masked_types, types_counting_from_pad
from training.records.plan import ModelShape
from training.records.token_shards import TokenShards

ASSUMED_VOCAB = {
    "bytes": 257,
    "characters": 128,
    "pretrained": 50_257,
}  # used in a dry run, until the corpus is tokenized
# attention_dropout, resid_pdrop, hidden_dropout_prob, ...: as transformers' classes spell it (5.23)
DROPOUT = re.compile(r"^(?!classifier|summary|seq_classif|qa|pooler|token).*(dropout|pdrop|dropout_prob|dropout_p)$")
MASKED_TYPES = masked_types()

COUNT_FROM_PAD = types_counting_from_pad()
COUNT_FROM_PAD_ID = 1  # the pad token's ID of these classes, where config.json names none


def model_shape(config: RunConfig, *, vocab_size: int, hf_config: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the shape with its parameter count, from Shardline's config or from a Hugging Face config.json."""
    model = config.model
    if model.path:
        if hf_config is None:
            raise ValueError(
                f"model.path = {model.path!r}: it has no config.json that can be read; check the path or name"
            )
        _check_kind(model, str(hf_config.get("model_type", "unknown")))
        _check_dropout(model, hf_config)
        shape = shape_of_hf(hf_config, vocab_size=vocab_size, context=config.train.context)
    else:
        shape = ModelShape(
            architecture=model.architecture,
            layers=model.layers,
            width=model.width,
            heads=model.heads,
            kv_heads=(model.kv_heads or model.heads) if model.architecture == "llama" else model.heads,
            mlp_width=model.mlp_width or default_mlp_width(model),
            vocab_size=vocab_size,
            context=config.train.context,
            tied=model.tie_embeddings,
            parameters=0,
        )
    return shape.model_copy(update={"parameters": count_parameters(shape)})


def _check_kind(model: ModelConfig, model_type: str) -> None:
    """Raise ValueError unless model.architecture, which decides the objective, is the kind of model in model.path."""
    fitting = {"bert"} if model_type in MASKED_TYPES else {"path", model_type}
    if model.architecture not in fitting:
        cure = "bert" if model_type in MASKED_TYPES else "path"
        raise ValueError(
            f"model.path = {model.path} holds a {model_type}, model.architecture is {model.architecture}: "
            f"set model.architecture={cure}"
        )


def _check_dropout(model: ModelConfig, hf: Mapping[str, Any]) -> None:
    if model.dropout and not dropout_fields(hf):
        kind = hf.get("model_type", "unknown")
        raise ValueError(
            f"model.dropout = {model.dropout:g}, but the {kind} in model.path = {model.path} has no dropout anywhere: "
            "set model.dropout=0"
        )


def check_positions(config: RunConfig, hf: Mapping[str, Any], *, end_id: int) -> list[str]:
    """Return sentences on the table of positions of a class that counts them from its pad token's ID + 1 on.

    `end_id`: the end token, which is the pad token of a model with random weights. Raises ValueError if the context
    exceeds the positions that are left.
    """
    if hf.get("model_type") not in COUNT_FROM_PAD:
        return []
    pad_id, rows = int(hf.get("pad_token_id") or COUNT_FROM_PAD_ID), int(hf.get("max_position_embeddings") or 0)
    positions = rows - pad_id - 1
    if config.train.context > positions:
        raise ValueError(
            f"train.context = {config.train.context} exceeds the {positions} positions of model.path: it is a "
            f"{hf['model_type']}, which counts them from its pad token's ID + 1 = {pad_id + 1} on, of "
            f"max_position_embeddings = {rows}: lower train.context"
        )
    if config.model.init == "pretrained" or end_id == pad_id:
        return []
    return [
        f"positions: a {hf['model_type']} counts them from its pad token's ID + 1 on, here {end_id + 1}, so its table "
        f"gets {rows + end_id - pad_id:,} rows for the {positions:,} positions of config.json"
    ]


def dropout_fields(hf: Mapping[str, Any]) -> list[str]:
    """Return the fields of a transformers config that set a language model's dropout, without those of other heads."""
    return [
        name
        for name, value in hf.items()
        if DROPOUT.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool)
    ]


def default_mlp_width(model: ModelConfig) -> int:
    """4 x width; for llama's gated MLP 8/3 x width, rounded up to a multiple of 64, which has as many parameters."""
    return -(-model.width * 8 // 3 // 64) * 64 if model.architecture == "llama" else 4 * model.width


def shape_of_hf(hf: Mapping[str, Any], *, vocab_size: int, context: int) -> ModelShape:
    kind = hf.get("model_type", "unknown")

    def first(*names: str) -> int:
        found = next((hf[name] for name in names if hf.get(name)), None)
        if found is None:
            inside = " beside text_config, as classes have that read images or sound" if "text_config" in hf else ""
            raise ValueError(
                f"model.path holds a {kind}, whose config.json has none of {', '.join(names)}{inside}: such a model "
                "cannot be planned; choose a class of text alone"
            )
        return int(max(found) if isinstance(found, list) else found)  # of each layer: the widest

    width = first("hidden_size", "n_embd", "d_model", "dim")
    heads = first("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
    positions = int(hf.get("max_position_embeddings") or hf.get("n_positions") or context)
    if context > positions:
        raise ValueError(
            f"train.context = {context} exceeds the {positions} positions of model.path: lower train.context"
        )
    mlp_fields = ("intermediate_size", "n_inner", "d_ff", "hidden_dim", "decoder_ffn_dim")
    return ModelShape(
        architecture=str(kind),
        layers=first("decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        width=width,
        heads=heads,
        kv_heads=first("num_key_value_heads") if hf.get("num_key_value_heads") else heads,
        mlp_width=first(*mlp_fields) if any(hf.get(field) for field in mlp_fields) else 4 * width,
        vocab_size=vocab_size,
        context=positions,
        tied=bool(hf.get("tie_word_embeddings", hf.get("model_type") in {"gpt2", "bert"})),
        parameters=0,
        adds_loss=adds_loss(hf),
    )


def count_parameters(shape: ModelShape) -> int:
    """Exact for llama, gpt2 and bert as transformers builds them (a test compares); llama's formula for others."""
    w, m, v, layers = shape.width, shape.mlp_width, shape.vocab_size, shape.layers
    head = 0 if shape.tied else v * w
    if shape.architecture == "gpt2":
        layer = (3 * w * w + 3 * w) + (w * w + w) + (w * m + m) + (m * w + w) + 4 * w
        return v * w + shape.context * w + layers * layer + 2 * w + head
    if shape.architecture == "bert":
        layer = 4 * (w * w + w) + (w * m + m) + (m * w + w) + 4 * w
        embeddings = v * w + shape.context * w + 2 * w + 2 * w
        return embeddings + layers * layer + (w * w + w + 2 * w) + v + (head and head + v)
    kv_width = shape.kv_heads * (w // shape.heads)
    layer = 2 * w * w + 2 * w * kv_width + 3 * w * m + 2 * w
    return v * w + layers * layer + w + head


def flops_per_token(shape: ModelShape) -> float:
    """Return training FLOPs per token: 6 per multiplied parameter, plus attention 12*L*H*Q*T (PaLM, appendix B)."""
    lookups = 0 if shape.tied else shape.vocab_size * shape.width
    if shape.architecture in {"gpt2", "bert"}:
        lookups += shape.context * shape.width
    return 6.0 * (shape.parameters - lookups) + 12.0 * shape.layers * shape.width * shape.context


def vocab_size(config: RunConfig, shards: TokenShards | None, hf_config: Mapping[str, Any] | None) -> int:
    tokenizer = config.data.tokenizer
    ours = shards.vocab_size if shards else tokenizer.bpe_size if tokenizer.kind == "bpe" else tokenizer.vocab_size
    if config.model.init == "pretrained" and hf_config:
        theirs = int(hf_config.get("vocab_size", 0))
        if ours > theirs:
            raise ValueError(
                f"the tokenizer has {ours} tokens, the pretrained model only {theirs}: use the model's own tokenizer, "
                f"data.tokenizer.kind=pretrained data.tokenizer.path={config.model.path}"
            )
        return theirs
    return ours or ASSUMED_VOCAB[tokenizer.kind]
