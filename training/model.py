"""The model: a Hugging Face class from the plan, and the loss that every strategy and evaluation shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.records import RunPlan

IGNORED = -100  # target of a position that is not predicted, as in torch.nn.functional.cross_entropy


class LanguageModel(nn.Module):
    """A Hugging Face model with its summed cross-entropy.

    Sums, not means: ranks and micro-batches may hold unequal numbers of targets, and only sums add up.
    """

    def __init__(self, hf: nn.Module, *, precision: str) -> None:
        super().__init__()
        self.hf = hf
        self.autocast_dtype = torch.bfloat16 if precision == "bf16" else None

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [batch, context] twice -> fp32 loss summed over targets [], logits [batch, context, vocab]."""
        with torch.autocast(inputs.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            output = self.hf(input_ids=inputs)
        logits = output.logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, logits


def build_model(plan: RunPlan) -> LanguageModel:
    """Fresh weights from the plan's seed (the same on every rank), or pretrained ones."""
    config = plan.config
    if config.model.init == "pretrained":
        hf = _auto_class(config.objective).from_pretrained(config.model.path, dtype=torch.float32)
    else:
        torch.manual_seed(config.train.seed)
        hf = _auto_class(config.objective).from_config(hf_config(plan), dtype=torch.float32)
    hf.config.use_cache = False  # set again on export; a cache is dead weight in training
    return LanguageModel(hf, precision=plan.precision)


def load_model(folder: Path, plan: RunPlan) -> LanguageModel:
    """The model of a checkpoint or export folder in Hugging Face layout, ready to evaluate."""
    hf = _auto_class(plan.config.objective).from_pretrained(folder, dtype=torch.float32)
    return LanguageModel(hf.eval(), precision=plan.precision)


def _auto_class(objective: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if objective == "masked" else AutoModelForCausalLM


def hf_config(plan: RunPlan) -> Any:
    """The transformers config of the plan's model."""
    from transformers import AutoConfig

    model, shape = plan.config.model, plan.shape
    if model.architecture == "path":
        ends = {"bos_token_id": plan.end_id, "eos_token_id": plan.end_id, "pad_token_id": plan.end_id}
        return AutoConfig.from_pretrained(model.path, vocab_size=plan.vocab_size, **ends)
    common = {
        "vocab_size": plan.vocab_size,
        "bos_token_id": plan.end_id,
        "eos_token_id": plan.end_id,
        "tie_word_embeddings": shape.tied,
    }
    if model.architecture == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            n_layer=shape.layers,
            n_embd=shape.width,
            n_head=shape.heads,
            n_inner=shape.mlp_width,
            n_positions=shape.context,
            resid_pdrop=model.dropout,
            embd_pdrop=model.dropout,
            attn_pdrop=model.dropout,
            **common,
        )
    sizes = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.mlp_width,
        "max_position_embeddings": shape.context,
        **common,
    }
    if model.architecture == "bert":
        dropout = {"hidden_dropout_prob": model.dropout, "attention_probs_dropout_prob": model.dropout}
        return AutoConfig.for_model("bert", pad_token_id=plan.end_id, **sizes, **dropout)
    return AutoConfig.for_model(
        "llama",
        num_key_value_heads=shape.kv_heads,
        attention_dropout=model.dropout,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        **sizes,
    )
