"""The admission test: which types of models, of all that transformers can build, train right under every mesh.

    python -m tests.support.families [TYPE …] [--write]

Each type is built tiny, in training mode, and its loss and every gradient are compared with those of the class's own
forward and cross-entropy: as stages of a pipeline (unequal and interleaved, in one process), on two tp ranks, with
both, with both under fsdp on four ranks, with sequence and context parallelism, with several documents in a sequence,
and compiled. It prints a table and, as its last line, one JSON object. `--write`: write their rows of
training/facts/families.json, from which plans refuse what failed; by default what the file admits is compared with
what was found.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import inspect
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tasks.workspace.processes import free_port
from training.facts.families import TABLE, Ability, can
from training.inference.model_shard import ModelShard
from training.inference.steps import Extend, Prefill
from training.models import document_attention, hugging_face
from training.models.document_attention import attend_by_document
from training.models.init_weights import FreshWeights
from training.models.language_model import LanguageModel
from training.models.state import state_of
from training.strategies.activation_checkpointing import compile_layers
from training.strategies.pipeline import Stage, keep_stages
from training.strategies.tensor import shard_matrices

LAYERS, VOCAB, ROWS, CONTEXT, WINDOW, POSITIONS = 4, 256, 2, 16, 5, 128
TOLERANCE = 2e-4  # of a gradient's largest number: fp32 sums are taken in another order
SMALLEST = 1e-6  # … and of this share of the largest of all: a key's bias has no effect, its gradient is rounding
TIMEOUT_S, COMPILED_IN_S = 60, 300
MOST_PARAMETERS = 100_000_000
ALL, PAIR = range(4), range(2)
CHECKS = {  # the ranks of each check: those that need one rank run beside each other
    **dict.fromkeys(("alone", "documents"), ALL),
    **dict.fromkeys(("pp", "tp", "pp_tp", "sp", "cp"), PAIR),
    **dict.fromkeys(("fresh", "cached"), range(2, 3)),
    "compile": range(3, 4),
    "fsdp_tp_pp": ALL,
}
NEEDED = {"pp_tp": ("pp", "tp"), "sp": ("tp",), "fsdp_tp_pp": ("pp", "tp", "pp_tp")}
ABILITIES: tuple[Ability, ...] = get_args(Ability)
UNLIKE = (  # a dozen that have little in common, for CI
    "llama",
    "gpt2",
    "bert",
    "gemma3_text",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "cohere2",
    "granite",
    "nemotron_h",
    "phi3",
    "modernbert",
)

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
    (r"num_kv_shared_layers", 0),
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
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "layers_block_type": ["mamba", "attention"] * 2},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "minicpm3": {"dim_model_base": 16},
    "gemma3_text": {"final_logit_softcapping": 30.0},
}


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


def tiny_config(model_type: str) -> Any:
    kind = CONFIG_MAPPING[model_type]
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    of_class = getattr(getattr(transformers, name, None), "config_class", None)
    kind = of_class if isinstance(of_class, type) and not is_masked(model_type) else kind  # of the text alone
    windows = {name: value for name, value in WINDOWS.items() if name in kind().to_dict()}
    fields, chosen = kind(**windows).to_dict(), dict[str, Any]()
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
            if name == "mlp_layer_types" and len(kinds) == 2:
                chosen[name] = [kinds[0]] + [kinds[1]] * (LAYERS - 1)
    if fields.get("kv_lora_rank") and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = chosen.get("num_attention_heads", 4)
        if "head_dim" in chosen:
            chosen["head_dim"] = chosen.get("qk_rope_head_dim", 8)
    return kind(**chosen | windows | PER_TYPE.get(model_type, {}))


def tiny_model(model_type: str) -> Any:
    """Return a tiny model in training mode, whose weights are unlike enough that no two of them may be mistaken."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    auto = AutoModelForMaskedLM if is_masked(model_type) else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config, attn_implementation="eager").parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"what it has beside its decoder makes {size:,} parameters")
    hf = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
        for name, buffer in hf.named_buffers():
            if "e_score" in name:
                buffer.add_(0.05 * torch.randn(buffer.shape))
    hf.config.use_cache = False
    return hf.train()


class Whole:
    """The class's own loss and gradients, and the data they are of."""

    def __init__(self, model_type: str) -> None:
        self.hf, self.own_attention = tiny_model(model_type), False
        self.ids, self.targets = torch.randint(3, VOCAB - 6, (2, ROWS, CONTEXT))
        self.documents = torch.tensor([[0] * 6 + [1] * 10, [0] * 11 + [1] * 2 + [2] * 3])
        self.loss, self.grads = self._compute([(slice(0, CONTEXT), row) for row in (slice(0, ROWS),)])
        self.tied = self.hf.get_input_embeddings().weight is self.hf.get_output_embeddings().weight

    def of_documents(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and gradients of documents read one by one."""
        spans = []
        for row, numbers in enumerate(self.documents.tolist()):
            ends = [
                place for place in range(1, CONTEXT + 1) if place == CONTEXT or numbers[place] != numbers[place - 1]
            ]
            spans += [(slice(a, b), slice(row, row + 1)) for a, b in zip([0, *ends], ends, strict=False)]
        return self._compute(spans)

    def _compute(self, spans: list[tuple[slice, slice]]) -> tuple[Tensor, dict[str, Tensor]]:
        hf = copy.deepcopy(self.hf)
        total = torch.zeros(())
        for tokens, rows in spans:
            logits = hf(input_ids=self.ids[rows, tokens]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets[rows, tokens].flatten(), reduction="sum")
            loss.backward()
            total += loss.detach()
        return total, {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}

    def model(self, *, own_attention: bool | None = None) -> LanguageModel:
        own_attention = self.own_attention if own_attention is None else own_attention
        model = LanguageModel(copy.deepcopy(self.hf), precision="fp32")
        if model.by_document and not own_attention:
            hugging_face.set_attention(model.hf, "eager")
        model.by_document = own_attention
        if own_attention:
            attend_by_document(model.hf)
        return model


def differs(
    loss: Tensor, grads: dict[str, Tensor], wanted: tuple[Tensor, dict[str, Tensor]], cuts: Any = None, mesh: Any = None
) -> str | None:
    """Return how a loss and gradients differ from those of the whole model; None if they do not."""
    if not torch.isclose(loss.detach(), wanted[0], rtol=1e-5, atol=0):
        return f"its loss is {loss.item():.4f} instead of {wanted[0].item():.4f}"
    largest = max(grad.abs().max().item() for grad in wanted[1].values())
    for name, whole in wanted[1].items():
        own = grads.get(name)
        piece = cuts[name].take(whole, mesh) if cuts and name in cuts else whole
        if own is None or own.shape != piece.shape:
            return f"{name} has no such gradient"
        if (own - piece).abs().max().item() > TOLERANCE * whole.abs().max().item() + SMALLEST * largest:
            return f"the gradient of {name} differs"
    return None


def grads_of(model: LanguageModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.hf.named_parameters() if p.grad is not None}


def in_stages(
    whole: Whole, prepare: Callable[[LanguageModel], None], rows: slice = slice(ROWS), fsdp: DeviceMesh | None = None
) -> Any:
    """Return loss, gradients and cuts of three stages on two ranks: the first rank has the first and the last.

    Under fsdp they are of these rows, and gradients of all ranks' rows.
    """
    models = [whole.model(), whole.model()]
    numbers = {0: range(1), 1: range(1, LAYERS - 1), 2: range(LAYERS - 1, LAYERS)}
    stages: dict[int, Stage] = {}
    for model, own in zip(models, ((0, 2), (1,)), strict=True):
        prepare(model)
        keep_stages(model, {stage: numbers[stage] for stage in own}, last=2)
        stages |= {stage: Stage(model, stage, last=stage == 2, dtype=torch.float32) for stage in own}
    for stage in stages.values() if fsdp else ():
        stage.shard(mesh=fsdp)
    ids, sent, received = whole.ids[rows], list[Tensor](), list[Tensor]()
    hidden = ids
    for number in range(3):
        hidden = stages[number](hidden, ids)
        if number < 2:
            sent.append(hidden)
            hidden = hidden.detach().requires_grad_()
            received.append(hidden)
    loss = models[0].loss_from(hidden, whole.targets[rows])
    (loss * (fsdp.size() if fsdp else 1)).backward()  # fsdp takes the mean over ranks
    for out, back in zip(reversed(sent), reversed(received), strict=True):
        out.backward(back.grad)
    grads = {name: whole_of(grad) for model in reversed(models) for name, grad in grads_of(model).items()}
    if whole.tied and fsdp:  # each stage has its own copy of the matrix
        family = models[0].known_family()
        grads[f"{family.embedding}.weight"] += grads[f"{family.head}.weight"]
    return loss.detach(), grads, models[0].cuts | models[1].cuts


def whole_of(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def sum_partial(model: LanguageModel, group: Any, *, all_whole: bool = False) -> dict[str, Tensor]:
    grads = grads_of(model)
    for name, grad in grads.items():
        if name not in model.cuts and (all_whole or name in model.partial):
            dist.all_reduce(grad, group=group)
    return grads


class Admission:
    """The checks, each a method that returns why a type fails, or None."""

    def __init__(self, model_type: str, mesh: DeviceMesh) -> None:
        self.type, self.fsdp, self.mesh, self.group = model_type, mesh["fsdp"], mesh["tp"], mesh["tp"].get_group()
        self.whole = Whole(model_type)
        self.wanted = self.whole.loss, self.whole.grads
        self.family = self.whole.model().family

    def alone(self) -> str | None:
        if self.family is None:
            return "its layers are no chain, or its logits are not its head's: it runs whole"
        model = self.whole.model()
        loss = model(self.whole.ids, self.whole.targets)
        loss.backward()
        return differs(loss, grads_of(model), self.wanted)

    def pp(self) -> str | None:
        assert self.family is not None
        stages = tuple(f"{name}." for name in (self.family.layers, *self.family.before, *self.family.after))
        if outside := [name for name, _ in self.whole.hf.named_parameters() if not name.startswith(stages)]:
            return f"its {outside[0]} belongs to no stage"
        loss, grads, _ = in_stages(self.whole, lambda model: None)
        return differs(loss, grads, self.wanted)

    def tp(self) -> str | None:
        return self._tp()

    def sp(self) -> str | None:
        return self._tp(sequence_parallel=True)

    def _tp(self, *, sequence_parallel: bool = False) -> str | None:
        assert self.family is not None
        if not self.family.styles:
            return "transformers has no tensor-parallel plan for it"
        model = self.whole.model()
        shard_matrices(model, self.mesh, sequence_parallel=sequence_parallel)
        loss = model(self.whole.ids, self.whole.targets)
        loss.backward()
        grads = sum_partial(model, self.group, all_whole=sequence_parallel)
        return differs(loss, grads, self.wanted, model.cuts, self.mesh)

    def pp_tp(self) -> str | None:
        return self._pp_tp()

    def fsdp_tp_pp(self) -> str | None:
        row = self.fsdp.get_local_rank()
        return self._pp_tp(slice(row, row + 1), self.fsdp)

    def _pp_tp(self, rows: slice = slice(ROWS), fsdp: DeviceMesh | None = None) -> str | None:
        names: set[str] = set()

        def prepare(model: LanguageModel) -> None:
            shard_matrices(model, self.mesh)
            names.update(model.partial)

        loss, grads, cuts = in_stages(self.whole, prepare, rows, fsdp)
        if fsdp:
            dist.all_reduce(loss, group=fsdp.get_group())
        for name in sorted(names & grads.keys()):
            dist.all_reduce(grads[name], group=self.group)
        return differs(loss, grads, self.wanted, cuts, self.mesh)

    def documents(self) -> str | None:
        wanted, shortest = self.whole.of_documents(), document_attention.CPU_CONTEXT
        places = torch.arange(CONTEXT)
        numbers = self.whole.documents
        begins = torch.stack([torch.stack([(row == n).nonzero()[0, 0] for n in row]) for row in numbers])
        try:
            for document_attention.CPU_CONTEXT in (0, CONTEXT + 1):  # document by document, then with a dense mask
                model = self.whole.model(own_attention=True)
                assert model.family is not None
                if "position_ids" not in model.family.arguments:
                    return "its forward takes no positions"
                loss = model(self.whole.ids, self.whole.targets, places - begins, numbers)
                loss.backward()
                if why := differs(loss, grads_of(model), wanted):
                    return why
        finally:
            document_attention.CPU_CONTEXT = shortest
        self.whole.own_attention = True  # as in training
        return None

    def cp(self) -> str | None:
        for documents in (None, self.whole.documents):
            wanted = self.wanted if documents is None else self.whole.of_documents()
            positions = None
            if documents is not None:
                firsts = torch.stack([torch.stack([(row == n).nonzero()[0, 0] for n in row]) for row in documents])
                positions = torch.arange(CONTEXT) - firsts
            model = self.whole.model(own_attention=True)
            assert model.family is not None
            if "position_ids" not in model.family.arguments:
                return "its forward takes no positions"
            model.share_context(self.group)
            loss = model(self.whole.ids, self.whole.targets, positions, documents)
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=self.group)
            if why := differs(total, sum_partial(model, self.group, all_whole=True), wanted):
                return why
        return None

    @torch.no_grad()
    def fresh(self) -> str | None:
        """Whether initial weights can be made layer by layer, and models without initialization have right buffers."""
        config, kind = copy.deepcopy(self.whole.hf.config), type(self.whole.hf)
        with torch.device("meta"):
            template = kind(config)
        with _nan_memory():
            weights = FreshWeights(template, seed=1)
            for name, whole in state_of(self.whole.hf).items():
                if name not in weights or not weights[name].isfinite().all():
                    return f"its {name} is not made by its class's _init_weights"
                if weights[name].shape != whole.shape:
                    return f"its {name} has another shape"
            initialized = kind(config)
            with hugging_face.without_weights():
                bare = kind(config)
        saved = state_of(bare)
        for (name, one), (_, other) in zip(bare.named_buffers(), initialized.named_buffers(), strict=True):
            if name not in saved and not torch.equal(one, other):
                return f"its {name} is set only when weights are initialized"
        return None

    @torch.no_grad()
    def cached(self) -> str | None:
        """Whether decoding with our cache gives the class's logits, further than a window reaches."""
        if type(self.whole.hf).__name__.endswith("ForMaskedLM"):
            return "it predicts masked words"
        model = self.whole.model(own_attention=True)
        keep_stages(model, {0: range(LAYERS)}, last=0)
        shard = ModelShard(model, batches=1, rows=1, context=CONTEXT, first=True, last=True)
        ids = self.whole.ids[:1]
        wanted = copy.deepcopy(self.whole.hf)(input_ids=ids).logits[0]
        for place in range(CONTEXT // 2, CONTEXT):
            if place == CONTEXT // 2:
                got = shard.run(Prefill(batch=0, row=0, ids=tuple(ids[0, : place + 1].tolist())))
            else:
                got = shard.run(Extend(batch=0, tokens=(int(ids[0, place]),), positions=(place,)))
            if not torch.allclose(got[0], wanted[place], rtol=1e-3, atol=1e-4):
                return "with our cache its logits differ"
        return None

    def compile(self) -> str | None:
        """Whether each layer becomes one graph, and a second step needs no other; torch's compiler writes no kernels,
        which would take it minutes."""
        torch._dynamo.reset()
        model = self.whole.model()
        compile_layers(model, one_shape=True, device_kind="cpu", backend="aot_eager")
        for torch._dynamo.config.error_on_recompile in (False, True):
            try:
                loss = model(self.whole.ids, self.whole.targets)
                loss.backward()
                why = differs(loss, grads_of(model), self.wanted)
            finally:
                torch._dynamo.config.error_on_recompile = False
            if why:
                return why
            model.zero_grad()
        return None


@contextmanager
def _nan_memory() -> Iterator[None]:
    """Fill new tensors with NaN, so that what nobody initializes is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def examined(model_type: str, mesh: DeviceMesh) -> dict[str, str]:
    """Return why a type fails, by check. All ranks call this; ranks that share a check fail together."""
    try:
        admission = Admission(model_type, mesh)
    except Exception as error:
        return {"alone": f"it cannot be built tiny ({_words(error)})"}
    found: dict[str, str] = {}
    for check, ranks in CHECKS.items():
        if check == "fsdp_tp_pp":
            found = _of_all_ranks(found)
        if dist.get_rank() not in ranks or "alone" in found or any(needed in found for needed in NEEDED.get(check, ())):
            continue
        try:
            why = getattr(admission, check)()
        except Exception as error:
            why = _words(error)
        failed = torch.tensor([float(why is not None)])
        if len(ranks) > 1:
            dist.all_reduce(failed, group=admission.group if ranks == PAIR else None)
        if failed:
            admission.whole.own_attention &= check != "documents"
            found[check] = why or "it fails on another rank"
    return found


def _of_all_ranks(found: dict[str, str]) -> dict[str, str]:
    every = [found] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return {check: why for one in reversed(every) for check, why in one.items()}  # the first rank's words count


def _words(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:100]}"


def _rank(rank: int, port: int, types: list[str], write: bool) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4"}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=COMPILED_IN_S))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for axis in ("fsdp", "tp"):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), mesh[axis].get_group())
    found: dict[str, dict[str, str]] = {}
    for model_type in types:
        start = time.monotonic()
        found[model_type] = examined(model_type, mesh)
        if rank == 0:
            failed = "; ".join(f"{check}: {why}" for check, why in found[model_type].items()) or "equal"
            print(f"{model_type:24} {time.monotonic() - start:5.1f} s  {failed}", flush=True)
    if rank == 0:
        report(found, write=write)
    dist.destroy_process_group()


def refusals(found: dict[str, str]) -> dict[str, str]:
    """Return why a type is refused, by ability, from what its checks found."""
    if alone := found.get("alone"):
        return dict.fromkeys(ABILITIES, alone)
    given = {"sp": found["tp"]} | found if "tp" in found else found
    return {ability: _in_its_test(given[ability]) for ability in ABILITIES if ability in given}


def _in_its_test(why: str) -> str:
    what_differs = why.startswith(("its loss is", "the gradient of", "with our cache"))
    if what_differs:
        return f"in its test {why}"
    return f"its test ended in {why}" if re.match(r"\w+: ", why) else why


def counts_from_pad(model_type: str) -> bool:
    """Whether a type counts positions from its pad token's ID + 1 on, so that its table has fewer than it says."""
    try:
        hf = tiny_model(model_type)
        hf(input_ids=torch.full((1, POSITIONS - 1), 7))
    except Exception:
        return False
    try:
        hf(input_ids=torch.full((1, POSITIONS), 7))
    except (IndexError, RuntimeError) as error:
        return "out of" in str(error)
    return False


def write_table(table: dict[str, dict[str, str]]) -> None:
    """Write the rows of these types into the table; rows of another release go."""
    known = json.loads(TABLE.read_text())
    rows = known["types"] | table if known["transformers"] == transformers.__version__ else table
    masked = [model_type for model_type in rows if is_masked(model_type)]
    whole = {
        "transformers": transformers.__version__,
        "masked": sorted(masked),
        "counts_from_pad": sorted(model_type for model_type in masked if counts_from_pad(model_type)),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in whole.items()]
    types = [f"  {json.dumps(name)}: {json.dumps(_in_short(row))}" for name, row in sorted(rows.items())]
    TABLE.write_text("{\n" + ",\n".join([*lines, ' "types": {\n' + ",\n".join(types) + "\n }"]) + "\n}\n")


def _in_short(refused: dict[str, str]) -> dict[str, str]:
    """Return one entry in place of all abilities' if these are refused for one reason."""
    reasons = set(refused.values())
    return {"*": reasons.pop()} if len(refused) == len(ABILITIES) and len(reasons) == 1 else refused


def report(found: dict[str, dict[str, str]], *, write: bool) -> None:
    table = {model_type: refusals(checks) for model_type, checks in found.items()}
    wrong = [
        f"{model_type} {ability}"
        for model_type, refused in table.items()
        for ability in ABILITIES
        if not write and can(model_type, ability) and ability in refused
    ]
    if write:
        write_table(table)
    if wrong:
        print("admitted by the table, and not equal: " + ", ".join(wrong), file=sys.stderr)
    counts = counted(table, lambda model_type, ability: ability not in table[model_type])
    print(json.dumps(counts | {"silently_wrong": len(wrong)}))


def counted(types: Iterable[str], may: Callable[[str, Ability], bool]) -> dict[str, int]:
    """Count those of these types that have a tp plan, by what they can do."""
    planned = [model_type for model_type in types if has_plan(model_type)]

    def equal(*abilities: Ability) -> int:
        return sum(all(may(model_type, ability) for ability in abilities) for model_type in planned)

    return {
        "types": len(planned),
        "equal_pp": equal("pp"),
        "equal_tp": equal("tp"),
        "equal_pp_tp": equal("pp", "tp", "pp_tp"),
        "equal_fsdp_tp_pp": equal("pp", "tp", "pp_tp", "fsdp_tp_pp"),
        "equal_sp": equal("sp"),
        "equal_cp": equal("cp"),
        "equal_documents": equal("documents"),
        "refused": len(planned) - equal("pp", "tp", "pp_tp", "cp", "documents"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("types", nargs="*", help="types of models; by default all that transformers has")
    parser.add_argument("--write", action="store_true", help="write the table that plans read")
    given = parser.parse_args()
    arguments = free_port(), given.types or all_types(), given.write
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=len(ALL), start_method="fork")  # imports are done


if __name__ == "__main__":
    main()
