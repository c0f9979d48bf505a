"""Module names and calls of the embedding, layers and output of the Hugging Face classes that can be split over ranks.

Pipelines cut a model between its layers, tensor parallelism splits the matrices inside them, and the loss needs the
hidden states before the output layer. Llama, GPT-2 and BERT are described here; every other class runs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """One class of models.

    Names are relative to the Hugging Face model; those of `column`, `row`, `attention`, `mlp` and `fused`, to a layer.
    """

    layers: str  # the ModuleList
    embedding: str  # token embedding, [vocab, width]
    output: str  # the Linear that makes logits
    first: tuple[str, ...]  # modules that only the first pipeline stage needs
    last: tuple[str, ...]  # modules that only the last pipeline stage needs
    embed: Callable[[Any, Tensor, Tensor], Tensor]  # model, inputs, positions -> hidden [batch, context, width]
    arguments: Callable[[Any, Tensor, Tensor], dict[str, Any]]  # model, hidden, positions -> arguments of each layer
    finish: Callable[[Any, Tensor], Tensor]  # model, hidden of the last layer -> input of the output layer
    column: tuple[str, ...]  # linear layers split by outputs
    row: tuple[str, ...]  # linear layers split by inputs; their results are summed
    attention: str  # the module that computes attention
    mlp: str  # the other module that passes hidden states to linear layers of `column`
    added: tuple[str, ...] = ()  # embeddings that are added to the token embedding
    fused: str | None = None  # the layer of `column` that computes q, k and v with one matrix


ARCHITECTURES = {
    "llama": Architecture(
        layers="model.layers",
        embedding="model.embed_tokens",
        output="lm_head",
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head"),
        embed=lambda hf, inputs, positions: hf.model.embed_tokens(inputs),
        arguments=lambda hf, hidden, positions: {
            "position_embeddings": hf.model.rotary_emb(hidden, position_ids=positions)
        },
        finish=lambda hf, hidden: hf.model.norm(hidden),
        column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        row=("self_attn.o_proj", "mlp.down_proj"),
        attention="self_attn",
        mlp="mlp",
    ),
    "gpt2": Architecture(
        layers="transformer.h",
        embedding="transformer.wte",
        output="lm_head",
        first=("transformer.wte", "transformer.wpe"),
        last=("transformer.ln_f", "lm_head"),
        embed=lambda hf, inputs, positions: hf.transformer.drop(
            hf.transformer.wte(inputs) + hf.transformer.wpe(positions)
        ),
        arguments=lambda hf, hidden, positions: {},
        finish=lambda hf, hidden: hf.transformer.ln_f(hidden),
        column=("attn.c_attn", "mlp.c_fc"),
        row=("attn.c_proj", "mlp.c_proj"),
        attention="attn",
        mlp="mlp",
        added=("transformer.wpe",),
        fused="attn.c_attn",
    ),
    "bert": Architecture(
        layers="bert.encoder.layer",
        embedding="bert.embeddings.word_embeddings",
        output="cls.predictions.decoder",
        first=("bert.embeddings",),
        last=("cls",),
        embed=lambda hf, inputs, positions: hf.bert.embeddings(input_ids=inputs, position_ids=positions),
        arguments=lambda hf, hidden, positions: {},
        finish=lambda hf, hidden: hf.cls.predictions.transform(hidden),
        column=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
        row=("attention.output.dense", "output.dense"),
        attention="attention.self",
        mlp="intermediate",
        added=("bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings"),
    ),
}


def architecture_of(hf: nn.Module) -> Architecture | None:
    """Return None for a class that is not described here: it works with single, ddp, fsdp and zero1-3, not tp or pp."""
    return ARCHITECTURES.get(hf.config.model_type)  # type: ignore[union-attr,arg-type]


def layers_of(hf: nn.Module) -> list[nn.Module]:
    """Return this rank's transformer layers, for any class: the units that are sharded, compiled and checkpointed.

    A pipeline stage has nn.Identity in place of other stages' layers.
    """
    architecture = architecture_of(hf)
    if architecture is not None:
        return [
            layer for layer in hf.get_submodule(architecture.layers).children() if not isinstance(layer, nn.Identity)
        ]
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
