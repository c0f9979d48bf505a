"""The model's numbers: its shape and parameters from a config or as they were counted, and its FLOPs per token."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from training.config.data import ASSUMED_VOCAB
from training.config.model import ModelConfig
from training.config.run import RunConfig
from training.facts.cures import Cure
from training.facts.families import adds_loss, masked_types, types_counting_from_pad, types_without_heads
from training.planner.precision import FP8_MULTIPLE
from training.records.model_sizes import LayersAlike, ModelSizes, Part
from training.records.plan import ModelShape
from training.records.token_shards import TokenShards

# attention_dropout, resid_pdrop, hidden_dropout_prob, ...: as transformers' classes spell it (5.23)
DROPOUT = re.compile(r"^(?!classifier|summary|seq_classif|qa|pooler|token).*(dropout|pdrop|dropout_prob|dropout_p)$")

# The experts that a token is sent to, as transformers' configs spell it (5.24).
CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "num_experts_per_toks",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "moe_num_active_primary_experts",
)
NUMBERS = re.compile(  # fields of a config.json with one whole number, or one for each layer
    r"^(vocab_size|hidden_size|n_embd|d_model|dim|intermediate_size|n_inner|d_ff|hidden_dim|decoder_ffn_dim"
    r"|max_position_embeddings|n_positions|(qk_nope_|qk_rope_|v_)?head_dim|\w*attention_heads|\w*key_value_heads"
    rf"|n_heads?|num_heads|{'|'.join(CHOSEN_EXPERTS)}|(?P<layers>(num_hidden|decoder|num|n)_layers?))$"
)
MOST_LAYERS, MOST = 10_000, 10**9  # a class is built with all its layers to count it
ATTENTION = re.compile(r"(?<!linear_)(attn|attention)")
QUERIES = re.compile(r"(?!.*linear)(.*\.)(q_proj|k_proj|qkv)\.")
COUNT_FROM_PAD_ID = 1  # the pad token's ID of these classes, where config.json names none


def model_shape(
    config: RunConfig,
    *,
    vocab_size: int,
    end_id: int = 0,
    hf_config: Mapping[str, Any] | None = None,
    hf_shape: ModelShape | None = None,
) -> ModelShape:
    """Return the shape of the model that the run trains, with its counted parameters.

    `hf_config`: the content of model.path's config.json; `hf_shape`: that model's shape as it was counted
    (training/models/sizes.py), None if nobody could. `end_id`: the end token. Raises ValueError for a model that cannot
    be planned, or is not counted.
    """
    model, context = config.model, config.train.context
    if not model.path:
        return own_shape(
            model.architecture,
            layers=model.layers,
            width=model.width,
            heads=model.heads,
            kv_heads=(model.kv_heads or model.heads) if model.architecture == "llama" else model.heads,
            mlp_width=model.mlp_width or default_mlp_width(model),
            vocab_size=vocab_size,
            context=context,
            tied=model.tie_embeddings,
        )
    if hf_config is None:
        raise ValueError(f"model.path = {model.path!r}: it has no config.json that can be read; check the path or name")
    check_kind(model, str(hf_config.get("model_type", "unknown")))
    _check_dropout(model, hf_config)
    shape = hf_shape or shape_of_hf(hf_config, vocab_size=vocab_size)
    if context > (shape.context or context):
        raise ValueError(
            f"train.context = {context} exceeds the {shape.context} positions of model.path: lower train.context"
        )
    if not shape.sizes.is_counted:
        raise ValueError(
            f"the parameters of model.path = {model.path}, of type {shape.architecture}, {shape.layers} layers x "
            f"{shape.width:,}, are not counted: there is no torch here, and no host has counted them yet. `shardline "
            "pretrain` lets the hosts do it before it plans; to plan here, install torch (shardline[train])"
        )
    sizes = shape.sizes.with_words(vocab_size - shape.vocab_size)
    if hf_config.get("model_type") in types_counting_from_pad() and model.init == "random":
        rows = shape.width * (end_id - pad_id(hf_config))
        more = {name: getattr(sizes.before, name) + rows for name in ("parameters", "used")}
        sizes = sizes.model_copy(update={"before": sizes.before.model_copy(update=more)})
    return shape.model_copy(update={"vocab_size": vocab_size, "context": context, "sizes": sizes})


def own_shape(
    architecture: str,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocab_size: int,
    context: int,
    tied: bool,
) -> ModelShape:
    """Return the shape of a llama, gpt2 or bert whose sizes are known, as transformers builds it (a test compares)."""
    w, m, words, kv_width = width, mlp_width, vocab_size * width, kv_heads * (width // heads)
    is_llama, is_bert = architecture == "llama", architecture == "bert"
    sides = [w, w, kv_width, kv_width, *[m] * (3 if is_llama else 2)]  # of the matrices, beside the width
    attention, multiplied = w * sum(sides[:4]), w * sum(sides)
    cut_biases, other = (0, 2 * w) if is_llama else (3 * w + m, 6 * w)  # other: norms, biases that are added to sums
    layer, cut = multiplied + cut_biases + other, multiplied + cut_biases
    added = 0 if is_llama else (context + (4 if is_bert else 0)) * w  # positions; bert: two types, and a norm
    head_bias = vocab_size if is_bert else 0
    cut_head = (0 if tied else words) + head_bias
    head = cut_head + (0 if tied else head_bias)  # without ties bert has a bias that nothing uses
    last = {"llama": w, "gpt2": 2 * w, "bert": w * w + 3 * w}[architecture]
    return ModelShape(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        mlp_width=mlp_width,
        vocab_size=vocab_size,
        context=context,
        tied=tied,
        sizes=ModelSizes(
            counted=f"added up from a {architecture}'s tensors",
            before=Part(parameters=words + added, used=words + added, cut=words, per_word=w),
            layers=(
                LayersAlike(
                    count=layers,
                    parameters=layer,
                    used=layer,
                    cut=cut,
                    multiplied=multiplied,
                    attention=attention,
                    for_fp8=w * sum(side for side in sides if not (w % FP8_MULTIPLE or side % FP8_MULTIPLE)),
                ),
            ),
            after=Part(parameters=last + head, used=last + head, cut=cut_head, per_word=head // vocab_size),
            looked_up=(0 if tied else words) + {"llama": 0, "gpt2": context, "bert": context + 2}[architecture] * w,
            tied=tied,
        ),
    )


def check_kind(model: ModelConfig, model_type: str) -> None:
    """Raise ValueError unless model.architecture, which decides the objective, is the kind of model in model.path."""
    fitting = {"bert"} if model_type in masked_types() else {"path", model_type}
    if model.architecture not in fitting:
        cure = "bert" if model_type in masked_types() else "path"
        raise ValueError(
            f"model.path = {model.path} holds a model of type {model_type}, model.architecture is "
            f"{model.architecture}: set model.architecture={cure}"
        )


def check_numbers(hf: Mapping[str, Any]) -> None:
    """Raise ValueError for a config.json that has no such number where a number belongs, so that all may read it."""
    if not isinstance(hf.get("model_type", ""), str):
        raise ValueError(f"the model's config.json has model_type = {str(hf['model_type'])[:80]}: a name belongs there")
    for name, value in hf.items():
        if isinstance(value, Mapping) and name.endswith("text_config"):
            check_numbers(value)
        if not (found := NUMBERS.match(name)) or value is None:
            continue
        most = MOST_LAYERS if found["layers"] else MOST
        for number in value if isinstance(value, list) else [value]:
            is_whole = isinstance(number, (int, float)) and not isinstance(number, bool) and number % 1 == 0
            if number is not None and not (is_whole and 0 <= number <= most):
                raise ValueError(
                    f"the model's config.json has {name} = {str(value)[:80]}: whole numbers up to {most:,} belong there"
                )


def _check_dropout(model: ModelConfig, hf: Mapping[str, Any]) -> None:
    if model.dropout and not dropout_fields(hf):
        kind = hf.get("model_type", "unknown")
        raise ValueError(
            f"model.dropout = {model.dropout:g}, but the model of type {kind} in model.path = {model.path} has no "
            "dropout anywhere: set model.dropout=0"
        )


def pad_id(hf: Mapping[str, Any]) -> int:
    return int(hf.get("pad_token_id") or COUNT_FROM_PAD_ID)


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


def shape_of_hf(hf: Mapping[str, Any], *, vocab_size: int) -> ModelShape:
    """Return the shape that a Hugging Face config.json describes, not counted. `context` 0: it names no limit."""
    check_numbers(hf)
    kind = hf.get("model_type", "unknown")

    def first(*names: str) -> int:
        found = next((hf[name] for name in names if hf.get(name)), None)
        if found is None:
            inside, cure = "", "choose a class of text alone"
            if "text_config" in hf:
                inside = " beside text_config, as classes have that read images or sound"
                cure = "save its text part (docs/tutorials/continue.md#1-fetch-it) and give that folder"
            raise ValueError(
                f"model.path holds a model of type {kind}, whose config.json has none of {', '.join(names)}{inside}: "
                f"such a model cannot be planned: {cure}"
            )
        return int(max(found) if isinstance(found, list) else found)  # of each layer: the widest

    width = first("hidden_size", "n_embd", "d_model", "dim")
    heads_fields = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
    heads = 1 if kind in types_without_heads() else first(*heads_fields)
    mlp_fields = ("intermediate_size", "n_inner", "d_ff", "hidden_dim", "decoder_ffn_dim")
    return ModelShape(
        architecture=str(kind),
        layers=first("decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        width=width,
        heads=heads,
        kv_heads=first("num_key_value_heads") if hf.get("num_key_value_heads") else heads,
        some_kv_heads=tuple(n for name, n in hf.items() if name.endswith("key_value_heads") and isinstance(n, int)),
        head_dim=_head_dim(hf) or width // heads,
        mlp_width=first(*mlp_fields) if any(hf.get(field) for field in mlp_fields) else 4 * width,
        vocab_size=vocab_size,
        context=int(hf.get("max_position_embeddings") or hf.get("n_positions") or 0),
        tied=bool(hf.get("tie_word_embeddings", kind in {"gpt2", "bert"})),
        adds_loss=adds_loss(hf),
    )


def experts_of_a_token(hf: Mapping[str, Any]) -> int:
    """Return the number of experts that each token is sent to; 0 if the config, or one in it, names none."""
    parts = [hf, *(part for part in hf.values() if isinstance(part, Mapping))]
    chosen = next((part[name] for part in parts for name in CHOSEN_EXPERTS if part.get(name)), 0)
    return int(max(chosen) if isinstance(chosen, list) else chosen)  # of each layer: the most


def attention_among(names: Collection[str]) -> set[str]:
    """Return those of a layer's parameters that belong to attention with scores, which linear attention has not.

    Some hybrids call attention a mixer, as they call what stands in its place: it is the one that makes queries.
    """
    asking = tuple(found[1] for name in names if (found := QUERIES.match(name)))
    return {name for name in names if ATTENTION.search(name) or name.startswith(asking)}


def _head_dim(hf: Mapping[str, Any]) -> int:
    """Return the mean of a head's keys and values (multi-head latent attention has two sizes); 0 if not named."""
    if hf.get("qk_nope_head_dim") and hf.get("v_head_dim"):
        return int(hf["qk_nope_head_dim"] + hf.get("qk_rope_head_dim", 0) + hf["v_head_dim"]) // 2
    return int(hf.get("head_dim") or 0)


def flops_per_token(shape: ModelShape) -> float:
    """Return training FLOPs per token: 6 per multiplied parameter, plus attention 12*L*H*Q*T (PaLM, appendix B).

    N has the experts that a token is sent to, and L the layers that have attention.
    """
    sizes = shape.sizes
    attention = 12.0 * sizes.attention_layers * shape.heads * shape.head_dim * shape.context
    return 6.0 * (sizes.used - sizes.looked_up) + attention


def vocab_size(config: RunConfig, shards: TokenShards | None, hf_config: Mapping[str, Any] | None) -> int:
    tokenizer = config.data.tokenizer
    ours = shards.vocab_size if shards else tokenizer.bpe_size if tokenizer.kind == "bpe" else tokenizer.vocab_size
    ours = ours or (ASSUMED_VOCAB["bytes"] if tokenizer.kind == "bytes" else 0)
    if config.model.init == "pretrained" and hf_config:
        theirs = int(hf_config.get("vocab_size", 0))
        if ours > theirs:
            is_own = tokenizer.kind == "pretrained" and tokenizer.path == config.model.path
            own = f"the model's own tokenizer, {Cure.ITS_TOKENIZER(path=config.model.path)}"
            rows = Cure.ROWS(tokens=ours)
            cure = rows if is_own else f"use {own}; if it is, {rows}"
            raise ValueError(f"the tokenizer has {ours:,} tokens, the embedding of the model {theirs:,} rows: {cure}")
        return theirs
    return ours or ASSUMED_VOCAB[tokenizer.kind]
