"""Tiny configs of each type of models that transformers has, with every kind of layer that its class can make."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

LAYERS, VOCAB, WINDOW, POSITIONS = 4, 256, 5, 128
MOST_PARAMETERS = 100_000_000
MODELS = "transformers.models."

# A field of a config by its name's pattern, and its value; the first that matches counts.
RULES: list[tuple[str, Any]] = [
    (r"(num_hidden_layers|n_layers?|num_layers|num_decoder_layers|decoder_layers|encoder_layers)", LAYERS),
    (r"(hidden_size|n_embd|d_model|dim|embedding_size)", 64),
    (
        r"(num_(global_|swa_)?attention_heads|swa_num_attention_heads|n_heads?|num_heads|(de|en)coder_attention_heads)",
        4,
    ),
    (r"(num_(key_value|kv)_heads|n_head_kv|swa_num_key_value_heads|num_global_key_value_heads)", 2),
    (r"((global_|swa_|attention_)?head_dim|(swa_)?v_head_dim|qk_nope_head_dim)", 16),
    (r"(qk_rope_head_dim|rotary_dim)", 8),
    (r"qk_head_dim", 24),
    (r"((swa_)?q|kv|o|gate)_lora_rank", 32),
    (r"(intermediate_size(_mlp)?|ffn_dim|n_inner|d_ff|shared_intermediate_size|(expert_)?ffn_hidden_size)", 128),
    (r"(dense_intermediate_size|hidden_dim|(de|en)coder_ffn_dim)", 128),
    (r"(moe_|shared_expert_|moe_shared_expert_|expert_)intermediate_size|moe_ffn_hidden_size|moe_latent_size", 64),
    (r"vocab_size(_per_layer_input)?", VOCAB),
    (r"hidden_size_per_layer_input", 16),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_moe_experts)", 4),
    (r"(num_experts_per_tok(en|s)?|moe_k|moe_top_?k|top_k_experts|moe_num_active_primary_experts)", 2),
    (r"(n_group|topk_group|num_expert_group|n_groups_moe)", 1),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index|moe_first_k_dense|first_k_dense)", 1),
    (r"((original_)?max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx)", POSITIONS),
    (r"(sliding_window(_size)?|local_window|attention_window)", WINDOW),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r".*(dropout|pdrop|layerdrop)(_prob|_p|_rate)?", 0.0),
    (r"output_router_logits", False),
    (r".*z_loss.*|.*jitter_noise", 0.0),
    (r"linear_num_(value|key)_heads", 4),
    (r"linear_(key_|value_)?head_dim", 16),
    (r"num_kv_shared_layers", 2),
    (r"laurel_rank", 8),
    (r"(mamba_n_heads|mamba_num_heads)", 8),
    (r"(mamba_d_head|mamba_head_dim|mamba_d_state|ssm_state_size|state_size)", 16),
    (r"mamba_d_ssm", 128),
    (r"(mamba_n_groups|n_groups)", 1),
    (r"mamba_dt_rank", 4),
    (r"mamba_expand", 2),
    (r"(mamba_|attention_)?chunk_size", 8),
    (r"index_n_heads", 4),
    (r"index_head_dim", 16),
    (r"index_topk", 8),
    (r"(conv_dim|block_dim|conv_dim_out)", 64),
    (r"block_ff_dim", 128),
]
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}  # off by default
MIXED = ("layer_types", "mlp_layer_types", "layers_block_type", "ffn_layer_types", "hybrid_layer_pattern")
PER_TYPE: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 4, "num_hidden_layers": 8},
    "esmc": {"num_key_value_heads": 4},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "crop_size": 28,
            "image_size": 28,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "nemo_conv_channels": 32,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
        },
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "eos_token_id": 2,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": VOCAB,
        "split_ngram_parts": 1,
    },
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    **{
        name: {
            "num_key_value_heads": 4,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 32,
            "swa_head_dim": 24,
            "swa_qk_nope_head_dim": 16,
            "swa_qk_rope_head_dim": 8,
            "swa_v_head_dim": 16,
        }
        for name in ("dots3_note", "dots3_note_text")
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "layers_block_type": ["mamba", "attention"] * 2,
        "position_embedding_type": "rope",
    },
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "minicpm3": {"dim_model_base": 16},
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "cohere": {"use_qk_norm": True},
    "cohere2_moe": {"prefix_dense_intermediate_size": 128, "num_shared_experts": 1},
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ]
    },
    "electra": {"embedding_size": 32},
    "deberta-v2": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "gemma4_assistant": {  # takes a text_config without defaults of its own, whose layers all share keys and values
        "text_config": {
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": VOCAB},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
            **{"num_kv_shared_layers": LAYERS, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        }
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    **{name: {"use_qk_norm": True} for name in ("glm4_moe", "sarvam_moe")},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "layer_types": ["hybrid", "hybrid", "hybrid_sliding", "hybrid_sliding"],
    },
    **{name: {"moe_layers": [1, 3]} for name in ("llama4", "llama4_text")},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "stablelm": {"qk_layernorm": True},
    "zamba2": {"use_mem_rope": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "longformer": {"attention_window": [WINDOW - 1] * LAYERS},
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 3, "position_embedding_type": "rotary"},
}
# Fields of a second tiny config, where a class makes all its layers of one kind or all of another.
OTHERWISE: dict[str, dict[str, Any]] = {
    "cohere2_moe": {"rms_norm_eps": 1e-5},
    "convbert": {"num_groups": 2},
    "doge": {"is_moe": True},
    **{name: {"use_dsa": False} for name in ("dots3_note", "dots3_note_text")},
    "falcon_h1": {"mamba_rms_norm": True},
    "jamba": {"expert_layer_offset": 0},
    "trocr": {"use_learned_position_embeddings": False},
}
# Kinds that no layer of a model of text is: what reads an encoder's states, makes one vector of a text, or splits a
# codebook; other heads, which a run finds when it traces the class; and what a constructor only hands on.
NOT_OF_TEXT = re.compile(r".*(CrossAttention|Pooler|FlexibleLinear|FlashAttention2|Prompt|MLMHead)|ZambaModel makes .*")
# Words for masks and caches in classes whose layers are all hybrids.
NOT_OF_HYBRIDS = {"full_attention", "linear_attention", "sliding_attention", "conv"}


def all_types() -> list[str]:
    """Return every type with a class of the next word or of masked words."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES})


def is_masked(model_type: str) -> bool:
    """Whether a type predicts masked words; some have a class of the next word too, which must be made causal first."""
    if model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return False
    return not getattr(CONFIG_MAPPING[model_type](), "is_encoder_decoder", False)


def has_plan(model_type: str) -> bool:
    return bool(getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None))


def has_heads(model_type: str) -> bool:
    """Whether a type has attention, so that its config names heads."""
    try:
        return bool(re.search("heads?'", str(tiny_config(model_type).to_dict())))
    except Exception:  # it cannot be built tiny
        return True


def config_class(model_type: str) -> Any:
    """Return the class of a type's config, of the text alone."""
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    of_class = getattr(getattr(transformers, name, None), "config_class", None)
    return of_class if isinstance(of_class, type) and not is_masked(model_type) else CONFIG_MAPPING[model_type]


def tiny_configs(model_type: str) -> list[Any]:
    """Return the configs that have together every kind of layer of a type: one, or two if some exclude each other."""
    other = OTHERWISE.get(model_type)
    return [tiny_config(model_type), *([tiny_config(model_type, **other)] if other else [])]


def tiny_config(model_type: str, **more: Any) -> Any:
    kind, given = config_class(model_type), PER_TYPE.get(model_type, {})
    parts = {name: value for name, value in given.items() if isinstance(value, dict)}
    windows = {name: value for name, value in WINDOWS.items() if name in kind(**parts).to_dict()}
    fields, chosen = kind(**parts | windows).to_dict(), dict[str, Any]()
    for name, value in fields.items():
        if name.startswith("_") or (isinstance(value, (bool, dict)) and name != "output_router_logits"):
            continue
        tiny = next(((wanted,) for rule, wanted in RULES if re.fullmatch(rule, name)), None)
        optional = re.fullmatch(r"(num_key_value_heads|head_dim|intermediate_size|q_lora_rank|pad_token_id)", name)
        if tiny is not None and (value is not None or optional):
            chosen[name] = [tiny[0]] * (LAYERS if len(value) > 1 else 1) if isinstance(value, list) else tiny[0]
    for name in MIXED:
        if isinstance(value := fields.get(name), list):
            kinds = list(dict.fromkeys(value))
            if kinds == ["full_attention"] and chosen.get("sliding_window"):
                kinds = ["sliding_attention", "full_attention"]
            chosen[name] = [kinds[number % len(kinds)] for number in range(LAYERS)]
            if name == "mlp_layer_types":
                kinds = ["dense", "sparse"] if {*kinds} <= {"dense", "sparse"} else kinds
                chosen[name] = [kinds[0]] + [kinds[-1]] * (LAYERS - 1)
    if "mlp_only_layers" in fields:
        chosen["mlp_only_layers"] = [0]
    if fields.get("kv_lora_rank") and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = chosen.get("num_attention_heads", 4)
        if "head_dim" in chosen:
            chosen["head_dim"] = chosen.get("qk_rope_head_dim", 8)
    return kind(**chosen | windows | given | more)


def auto_class_of(model_type: str) -> Any:
    return AutoModelForMaskedLM if is_masked(model_type) else AutoModelForCausalLM


def on_meta(model_type: str, config: Any) -> Any:
    with torch.device("meta"):
        return auto_class_of(model_type).from_config(config, attn_implementation="eager", dtype=torch.float32)


def tiny_model(model_type: str, config: Any = None) -> Any:
    """Return a tiny model in training mode, whose weights are unlike enough that no two of them may be mistaken."""
    torch.manual_seed(0)
    config = tiny_config(model_type) if config is None else config
    size = sum(p.numel() for p in on_meta(model_type, config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"what it has beside its decoder makes {size:,} parameters")
    hf = auto_class_of(model_type).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
        for name, buffer in hf.named_buffers():
            if "e_score" in name:
                buffer.add_(0.05 * torch.randn(buffer.shape))
    hf.config.use_cache = False
    return hf.train()


# Which kinds of layers a tiny config lacks


def missing_kinds(model_type: str) -> list[str]:
    """Return the kinds of layers that a type's class can make and its tiny configs do not.

    A kind is a class of modules in another ("Qwen2MoeDecoderLayer makes Qwen2MoeMLP"), as the constructors' source
    names it or as the class's default config, built on the meta device, has it; or a word of layer_types.
    """
    models = [on_meta(model_type, config) for config in tiny_configs(model_type)]
    have = {pair for hf in models for pair in _pairs(hf)}
    owners = {type(module) for hf in models for module in hf.modules()}
    named = {(owner, child) for owner in owners for child in _constructed(owner)}
    missing = {
        f"{owner.__name__} makes {child.__name__}"
        for owner, child in named | _default_pairs(model_type)
        if not any(maker is owner and issubclass(made, child) for maker, made in have)
    }
    words = {word for hf in models for field in MIXED for word in _words_of(hf.config, field)}
    source = ast.parse(inspect.getsource(sys.modules[type(models[0]).__module__]))
    literals = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}
    lacking = (literals & {*ALLOWED_LAYER_TYPES}) - words if words & literals else set()
    if any("hybrid" in word for word in words):
        lacking -= NOT_OF_HYBRIDS
    return sorted(
        {each for each in missing if not NOT_OF_TEXT.fullmatch(each)} | {f"layers {each}" for each in lacking}
    )


def _words_of(config: Any, field: str) -> list[str]:
    value = getattr(config, field, None)
    return [str(each) for each in value] if isinstance(value, (list, tuple)) else []


def _default_pairs(model_type: str) -> set[tuple[type, type]]:
    """Return what the type's default config makes; some defaults cannot be built."""
    try:
        return _pairs(on_meta(model_type, config_class(model_type)()))
    except Exception:
        return set()


def _pairs(hf: nn.Module) -> set[tuple[type, type]]:
    """Return the classes of a model's modules with those of their parents, lists of modules left out."""

    def walk(module: nn.Module, owner: type) -> Iterator[tuple[type, type]]:
        for child in module.children():
            is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
            if not is_list:
                yield owner, type(child)
            yield from walk(child, owner if is_list else type(child))

    return {*walk(hf, type(hf))}


@functools.cache
def _constructed(owner: type) -> frozenset[type]:
    """Return the classes of modules of transformers that a class's constructor names, in tables too."""
    makers = [cls for cls in owner.__mro__ if "__init__" in vars(cls) and cls.__module__.startswith(MODELS)]
    if not makers:
        return frozenset()
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(makers[0])["__init__"])))
    values = [getattr(sys.modules[makers[0].__module__], n.id, None) for n in ast.walk(tree) if isinstance(n, ast.Name)]
    named = [each for value in values for each in (value.values() if isinstance(value, dict) else [value])]
    return frozenset(
        each
        for each in named
        if isinstance(each, type)
        and issubclass(each, nn.Module)
        and each.__module__.startswith(MODELS)
        and not issubclass(owner, each)
    )
