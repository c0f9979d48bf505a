"""The model: a Hugging Face class from the plan, and the loss that every strategy and evaluation shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.data.batch import IGNORED, Batch
from training.models.architectures import ARCHITECTURES, architecture_of, layers_of
from training.models.auxiliary_loss import AuxiliaryLoss
from training.models.context import ContextPieces, attend_over
from training.models.document_attention import (
    attend_by_document,
    document_blocks,
    document_bounds,
    way_to_attend,
)
from training.models.freezing import freeze
from training.models.init_weights import FreshWeights, fill
from training.models.linear_cross_entropy import Softmax, linear_cross_entropy, linear_scores, softmax_
from training.models.pretrained import auto_class_of, load_pretrained
from training.models.state import state_of
from training.planner.model_shape import COUNT_FROM_PAD, dropout_fields
from training.records.plan import RunPlan
from training.runtime.mesh import copy_to_group, gather_sequence
from training.runtime.tensor_cut import Cut
from training.shards.packing import PADDING

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


class LanguageModel(nn.Module):
    """A Hugging Face model with its summed cross-entropy.

    Sums, not means: ranks and micro-batches may hold unequal numbers of targets, and only sums add up.
    """

    def __init__(self, hf: nn.Module, *, precision: str) -> None:
        super().__init__()
        self.hf = hf
        self.state_shapes = {name: tensor.shape for name, tensor in state_of(hf).items()}  # whole, before ranks cut it
        self.compute_in(precision)
        self.architecture = architecture_of(hf)
        self.causal = not type(hf).__name__.endswith("ForMaskedLM")
        self.tied = (
            self.architecture is not None and self.output()[0] is hf.get_submodule(self.architecture.embedding).weight
        )
        self.num_words = 0 if self.architecture is None else len(self.output()[0])
        self.auxiliary = AuxiliaryLoss(hf)
        self.softmax: Softmax = softmax_  # of the loss; compiled if layers are compiled for GPUs
        self.stages: dict[int, list[nn.Module]] = {}  # set by strategies/pipeline.py: this rank's layers by stage
        # Set by strategies/tensor.py, if ranks split matrices and the vocabulary:
        self.cuts: dict[str, Cut] = {}  # by parameter name
        self.first_token_id = 0
        self.tp_group: dist.ProcessGroup | None = None
        self.sequence_pieces = 1  # the number of tp ranks that split each sequence between blocks
        self.context: ContextPieces | None = None  # set if cp ranks split each sequence
        self.compiled = False  # whether layers are compiled
        self.residual: torch.dtype | None = None  # of hidden states between layers; None: the embedding's
        if self.architecture is not None:
            attend_by_document(hf)

    def compute_in(self, precision: str) -> None:
        """Compute matrix products in this precision from now on."""
        self.dtype = DTYPES[precision]

    def carry_bf16(self) -> None:
        """Pass bf16 from layer to layer from now on; norms, whose weights stay fp32, return their input's dtype."""
        self.residual = torch.bfloat16
        for module in self.hf.modules():
            if type(module).__name__.endswith("Norm"):
                module.register_forward_hook(lambda module, args, result: result.to(args[0].dtype))

    def share_context(self, group: dist.ProcessGroup) -> None:
        """Compute only this rank's tokens of each sequence from now on; callers still pass whole sequences."""
        assert self.architecture is not None, "the plan refuses cp for such models"
        self.context = ContextPieces(group)
        attend_over(self.hf, self.architecture, self.context)

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self.context is None else self.context.take(whole)

    def forward(
        self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the loss fp32 [], summed over targets; the arguments are int64 [batch, context], as in Batch.

        If cp ranks split sequences, the sum is over the targets of this rank's tokens. In training it includes what the
        class adds to cross-entropy, which `self.auxiliary` counts; in evaluation it is cross-entropy alone.
        """
        with self.autocast(inputs.device):
            if self.architecture is not None:
                return self.loss_from(self.hidden(inputs, positions, documents), self._own(targets))
            if not self.hf.training:
                return _losses(self._logits(inputs, positions, documents), targets.flatten()).sum()
            logits, added = self.auxiliary.call(self.hf, targets, **self._generic_inputs(inputs, positions, documents))
            loss = _losses(logits.flatten(0, 1).float(), targets.flatten()).sum()
            return loss if added is None else loss + added

    @torch.no_grad()
    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each token's loss, fp32, and whether its target is the likeliest word, bool: [batch x context] each.

        Tokens of other cp ranks get zeros.
        """
        with self.autocast(batch.inputs.device):
            if self.architecture is not None:
                hidden, targets = self.hidden(batch.inputs, batch.positions, batch.documents), self._own(batch.targets)
                losses, right = self.scores_from(hidden, targets)
                if self.context is None:
                    return losses, right
                whole = [self.context.put(each.view_as(targets)).flatten() for each in (losses, right)]
                return whole[0], whole[1]
            logits, targets = self._logits(batch.inputs, batch.positions, batch.documents), batch.targets.flatten()
            return _losses(logits, targets), logits.argmax(-1) == targets

    @torch.no_grad()
    def next_logits(self, inputs: Tensor, places: Tensor) -> Tensor:
        """Return the logits fp32 [batch, vocab] of the word after each place: int64 [batch, length] and [batch]."""
        with self.autocast(inputs.device):
            if self.architecture is not None:
                return self.next_logits_from(self.hidden(self.padded(inputs), None, None), places)
            return _at(self._logits(inputs, None, None).unflatten(0, inputs.shape), places)

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def hidden(self, inputs: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Return the output layer's input for this rank's tokens, [batch, context, width]."""
        positions = self._own(self.positions(inputs, positions))
        hidden = self.layers(self.embed(self._own(inputs), positions), layers_of(self.hf), positions, documents)
        return self.finish(hidden)

    def positions(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return positions of whole sequences: the given ones, or from 0 on.

        `x`: token ids, or hidden states, which may be this rank's piece of each sequence.
        """
        if positions is not None:
            return positions
        length = x.shape[1] * (self.sequence_pieces if x.is_floating_point() else 1)
        return torch.arange(length, device=x.device)[None]

    def padded(self, inputs: Tensor) -> Tensor:
        """Pad `inputs` to a length that ranks can split; in causal models, padding does not change tokens before it."""
        pieces = self.sequence_pieces
        if self.context is not None:
            pieces = self.context.group.size() * math.lcm(2, pieces)
        return nn.functional.pad(inputs, (0, -inputs.shape[1] % pieces))

    def embed(self, inputs: Tensor, positions: Tensor) -> Tensor:
        assert self.architecture is not None
        hidden = self.architecture.embed(self.hf, inputs, positions)
        return hidden if self.residual is None else hidden.to(self.residual)

    def layers(self, hidden: Tensor, layers: list[nn.Module], positions: Tensor, documents: Tensor | None) -> Tensor:
        """Run `hidden` through these layers; if `documents` are given, tokens attend only to their own document."""
        assert self.architecture is not None
        mask = None if documents is None else self.document_mask(documents)
        arguments = self.architecture.arguments(self.hf, hidden, positions)
        for layer in layers:
            hidden = layer(hidden, attention_mask=mask, **arguments)
        return hidden

    def document_mask(self, documents: Tensor) -> Any:
        """Return the mask, or the documents' bounds, that attention takes for this rank's tokens."""
        shape: Any = self.hf.config
        context, take = documents.shape[1], self._own
        way = way_to_attend(
            documents.device,
            self.dtype,
            context=context,
            head_width=shape.hidden_size // shape.num_attention_heads,
            compiled=self.compiled,
            dropout=self.training and any(vars(shape)[field] for field in dropout_fields(vars(shape))),
        )
        if way == "dense":
            return attention_mask(documents, causal=self.causal, rows=None if self.context is None else take)
        if way == "flex":
            places = take(torch.arange(context, device=documents.device)[None])[0]
            return document_blocks(documents, places, causal=self.causal)
        pieces = [slice(0, context)] if self.context is None else self.context.slices(context)
        return document_bounds(documents, pieces, causal=self.causal)

    def finish(self, hidden: Tensor) -> Tensor:
        assert self.architecture is not None
        return self.architecture.finish(self.hf, hidden)

    def output(self) -> tuple[Tensor, Tensor | None]:
        """Return the output layer's weight [vocab, width] and bias [vocab]; under tp, of this rank's words only."""
        assert self.architecture is not None
        layer = self.hf.get_submodule(self.architecture.output)
        return layer.weight, layer.bias  # type: ignore[return-value]

    def loss_from(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return `forward`'s loss, from the hidden states before the output layer."""
        hidden = self._for_output(hidden)
        loss: Tensor = self._over_vocabulary(linear_cross_entropy, hidden, targets, softmax=self.softmax)
        return loss

    def scores_from(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `scores`, from the hidden states before the output layer."""
        scores: tuple[Tensor, Tensor] = self._over_vocabulary(linear_scores, self._for_output(hidden), targets)
        return scores

    def next_logits_from(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Return the result of `next_logits`, from the hidden states: all words' logits, on every tp rank."""
        weight, bias = self.output()
        whole = self._for_output(hidden)
        whole = whole if self.context is None else self.context.gather(whole)
        own = (_at(whole, places).to(self.dtype) @ weight.to(self.dtype).t()).float()
        own = own if bias is None else own + bias
        if self.tp_group is None:
            return own
        logits = own.new_zeros(len(own), self.num_words)
        logits[:, self.first_token_id : self.first_token_id + own.shape[1]] = own
        dist.all_reduce(logits, group=self.tp_group)
        return logits

    def _for_output(self, hidden: Tensor) -> Tensor:
        """Return hidden states of whole sequences; under tp, their gradient is summed over the ranks' words."""
        if self.tp_group is None:
            return hidden
        collect = gather_sequence if self.sequence_pieces > 1 else copy_to_group
        return collect(hidden, self.tp_group)

    def _over_vocabulary(self, function: Callable[..., Any], hidden: Tensor, targets: Tensor, **options: Any) -> Any:
        """Call a function of training/models/linear_cross_entropy.py with the words that this rank holds."""
        weight, bias = self.output()
        return function(
            hidden.flatten(0, 1),
            weight,
            bias,
            targets.flatten(),
            dtype=self.dtype,
            first_token_id=self.first_token_id,
            group=self.tp_group,
            **options,
        )

    def _logits(self, inputs: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Return logits fp32 [tokens, vocab] of a class without an Architecture, which may cap or scale them."""
        logits: Tensor = self.hf(**self._generic_inputs(inputs, positions, documents)).logits
        return logits.flatten(0, 1).float()

    def _generic_inputs(self, inputs: Tensor, positions: Tensor | None, documents: Tensor | None) -> dict[str, Tensor]:
        """Return the arguments of a class without an Architecture.

        Such a class makes its own attention mask (windows, biases), so it is told only which tokens are padding. Where
        all are, as they predict nothing, none is called so: a mean over no tokens would be NaN.
        """
        assert positions is None, "the plan refuses packings with positions for such classes"
        if documents is None:
            return {"input_ids": inputs}
        is_text = documents != PADDING
        return {"input_ids": inputs, "attention_mask": (is_text | ~is_text.any()).long()}


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")


def _at(rows: Tensor, places: Tensor) -> Tensor:
    """Return each row at its own place: [batch, length, width] and int64 [batch] -> [batch, width]."""
    return rows[torch.arange(len(places), device=places.device), places]


def attention_mask(documents: Tensor, *, causal: bool, rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return bool [batch, 1, context, context] of documents [batch, context]: True where row attends to column.

    `rows`: selects the tokens that have rows; by default all.
    """
    own = documents if rows is None else rows(documents)
    mask = own[:, None, :, None] == documents[:, None, None, :]
    if not causal:
        return mask
    if rows is None:
        return mask.tril()
    places = torch.arange(documents.shape[1], device=documents.device)
    return mask & (rows(places[None])[0][:, None] >= places)


def build_model(plan: RunPlan) -> LanguageModel:
    """Return the whole model, with pretrained weights, or with fresh ones from the plan's seed, equal on all ranks."""
    model, weights = unfilled_model(plan)
    fill(model.hf, weights)
    return model


def unfilled_model(plan: RunPlan) -> tuple[LanguageModel, Mapping[str, Tensor]]:
    """Return the model, and its initial weights by name, of which each rank takes its part.

    Until a fresh model is filled, its parameters are allocated but never touched, so they occupy no memory: otherwise
    8 ranks on a host would hold 8 whole models (8B in fp32: 32 GB each) to keep an eighth each.
    """
    from transformers.initialization import no_init_weights

    config, auto_class = plan.config, auto_class_of(plan.config.objective)
    settings = hf_config(plan)
    if config.model.init == "pretrained":
        path = plan.local(config.model.path)
        hf = load_pretrained(auto_class, path, dtype=torch.float32, settings=settings)
    elif settings.model_type in ARCHITECTURES:
        with no_init_weights():
            hf = auto_class.from_config(settings, dtype=torch.float32)
        hf.tie_weights()
    else:  # the class may initialize weights in ways that cannot be repeated layer by layer
        torch.manual_seed(config.train.seed)
        hf = auto_class.from_config(settings, dtype=torch.float32)
    hf.config.use_cache = False  # set again on export; training needs no cache
    _let_every_word_learn(hf)
    freeze(hf, config.train.freeze)
    weights: Mapping[str, Tensor] = {name: tensor.detach() for name, tensor in state_of(hf).items()}
    if config.model.init != "pretrained" and settings.model_type in ARCHITECTURES:
        with torch.device("meta"):
            template = auto_class.from_config(settings, dtype=torch.float32)
        _let_every_word_learn(template)
        weights = FreshWeights(template, ARCHITECTURES[settings.model_type], seed=config.train.seed)
    return LanguageModel(hf, precision=plan.precision), weights


def import_model(plan: RunPlan) -> None:
    """Import the modules that building the plan's model needs (3 s of a core), without making its weights.

    A class without an Architecture is not built: it may make weights that are not parameters (unfilled_model).
    """
    from transformers.initialization import no_init_weights  # noqa: F401

    settings, auto_class = hf_config(plan), auto_class_of(plan.config.objective)
    if settings.model_type in ARCHITECTURES:
        with torch.device("meta"):
            auto_class.from_config(settings)


def _let_every_word_learn(hf: Any) -> None:
    """Train the pad token's row too: it is the end token, which begins documents; transformers would keep it at zero.

    Also freeze BERT's `cls.predictions.bias` if embeddings are not tied: it is unused then and gets no gradient.
    """
    hf.get_input_embeddings().padding_idx = None
    if hf.config.model_type == "bert" and not hf.config.tie_word_embeddings:
        hf.cls.predictions.bias.requires_grad_(False)


def load_model(folder: Path, plan: RunPlan, *, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Return the model of a checkpoint or export folder in Hugging Face layout, ready to evaluate."""
    hf = load_pretrained(auto_class_of(plan.config.objective), folder, dtype=dtype)
    return LanguageModel(hf.eval(), precision=plan.precision)


def hf_config(plan: RunPlan) -> Any:
    """Return the transformers config of the plan's model."""
    from transformers import AutoConfig

    model, shape = plan.config.model, plan.shape
    path = plan.local(model.path)
    if model.init == "pretrained":
        return with_dropout(AutoConfig.from_pretrained(path, trust_remote_code=False), model.dropout)
    if model.path:
        ends = {"bos_token_id": plan.end_id, "eos_token_id": plan.end_id, "pad_token_id": plan.end_id}
        settings = AutoConfig.from_pretrained(path, vocab_size=plan.vocab_size, trust_remote_code=False)
        if settings.model_type in COUNT_FROM_PAD:
            settings.max_position_embeddings += plan.end_id - settings.pad_token_id
        settings.update(ends)
        return with_dropout(settings, model.dropout)
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


def with_dropout(settings: Any, dropout: float) -> Any:
    """Set every dropout of a transformers config to `dropout`, because its config.json's would be used unnoticed."""
    for field in dropout_fields(vars(settings)):
        setattr(settings, field, dropout)
    return settings
