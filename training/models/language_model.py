"""The model: a Hugging Face class from the plan, and the loss that every strategy and evaluation shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.data.batch import IGNORED, Batch
from training.facts.families import adds_loss, can, types_counting_from_pad
from training.facts.model_config import read_settings
from training.models import hugging_face
from training.models.auxiliary_loss import AuxiliaryLoss
from training.models.context import ContextPieces, attend_over
from training.models.document_attention import (
    attend_by_document,
    document_blocks,
    document_bounds,
    way_to_attend,
)
from training.models.family import Ended, Family, Passed, Zeros, family_of, head_input, layers_of, layers_run
from training.models.freezing import freeze
from training.models.hidden_matrices import HiddenMatrix
from training.models.init_weights import FreshWeights, fill
from training.models.linear_cross_entropy import Softmax, ZLoss, linear_cross_entropy, linear_scores, softmax_
from training.models.pretrained import auto_class_of, load_pretrained
from training.models.state import state_of
from training.planner.model_shape import dropout_fields
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
        self.family: Family | None = None
        self.why_whole = "its config.json asks for a loss beside cross-entropy" if adds_loss(vars(hf.config)) else ""
        if not self.why_whole:
            try:
                self.family = family_of(hf)
            except ValueError as error:
                self.why_whole = str(error)
        self.causal = not type(hf).__name__.endswith("ForMaskedLM")
        self.tied = self.family is not None and self.output()[0] is hf.get_submodule(self.family.embedding).weight
        self.num_words = 0 if self.family is None else len(self.output()[0])
        self.auxiliary = AuxiliaryLoss(hf)
        self.z_loss: ZLoss | None = None  # set for training with train.z_loss
        self.softmax: Softmax = softmax_  # of the loss; compiled if layers are compiled for GPUs
        # Set by strategies/pipeline.py: this rank's layers, by stage and number, and stand-ins for all layers.
        self.stages: dict[int, dict[int, nn.Module]] = {}
        self.passed: list[Passed] = []
        self.matrices: dict[str, HiddenMatrix] = {}  # by parameter name; set for Muon alone, before ranks cut the model
        # Set by strategies/tensor.py, if ranks split matrices and the vocabulary:
        self.cuts: dict[str, Cut] = {}  # by parameter name
        self.partial: set[str] = set()  # names of whole parameters whose gradient is summed over the ranks
        self.first_token_id = 0
        self.tp_group: dist.ProcessGroup | None = None
        self.sequence_pieces = 1  # the number of tp ranks that split each sequence between blocks
        self.gathers_before_head = False  # whether the class's forward joins these pieces
        self.context: ContextPieces | None = None  # set if cp ranks split each sequence
        self.compiled = False  # whether layers are compiled
        self.residual: torch.dtype | None = None  # of hidden states between layers; None: the embedding's
        self.model_type: str = hf.config.model_type  # type: ignore[assignment,union-attr]
        self.by_document = self.family is not None and can(self.model_type, "documents")
        if self.by_document:
            attend_by_document(hf)

    def known_family(self, *, cure: str = "set parallel.tp=1 parallel.pp=1 parallel.cp=1") -> Family:
        """Return what the model is made of. Raises ValueError if that was not found, although its type is admitted."""
        if self.family is None:
            raise ValueError(
                f"{type(self.hf).__name__} with this config.json runs only whole: {self.why_whole}: {cure}"
            )
        return self.family

    def compute_in(self, precision: str) -> None:
        """Compute matrix products in this precision from now on."""
        self.dtype = DTYPES[precision]

    def carry_bf16(self) -> None:
        """Pass bf16 from layer to layer from now on; norms, whose weights stay fp32, return their input's dtype."""
        assert self.family is not None, "the plan refuses residual=bf16 for such models"
        self.residual = torch.bfloat16
        for module in self.hf.modules():
            if type(module).__name__.endswith("Norm"):
                module.register_forward_hook(lambda module, args, result: result.to(args[0].dtype))
        if not isinstance(embedding := self.hf.get_submodule(self.family.embedding), Zeros):
            embedding.register_forward_hook(lambda module, args, rows: rows.to(torch.bfloat16))
        layers_of(self.hf)[0].register_forward_pre_hook(_in_bf16, with_kwargs=True)

    def share_context(self, group: dist.ProcessGroup) -> None:
        """Compute only this rank's tokens of each sequence from now on; callers still pass whole sequences."""
        self.known_family()
        self.context = ContextPieces(group)
        attend_over(self.hf, self.context)

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self.context is None else self.context.take(whole)

    def forward(
        self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the loss fp32 [], summed over targets; the arguments are int64 [batch, context], as in Batch.

        If cp ranks split sequences, the sum is over the targets of this rank's tokens. In training it includes what
        is added to cross-entropy, which `take_added` returns; in evaluation it is cross-entropy alone.
        """
        with self.autocast(inputs.device):
            if self.family is not None:
                return self.loss_from(self.hidden(inputs, positions, documents), self._own(targets))
            if not self.hf.training:
                return _losses(self._logits(inputs, positions, documents), targets.flatten()).sum()
            logits, added = self.auxiliary.call(self.hf, targets, **self._whole_inputs(inputs, positions, documents))
            flat = logits.flatten(0, 1).float()
            loss = _losses(flat, targets.flatten()).sum()
            if self.z_loss is not None:
                loss = loss + self.z_loss.add(flat.logsumexp(-1), targets.flatten() != IGNORED)
            return loss if added is None else loss + added

    def take_added(self, device: torch.device) -> dict[str, Tensor]:
        """Return what was added to cross-entropy since the last call, by its metric: sums fp32 [] over targets.

        All ranks return the same metrics.
        """
        auxiliary = self.auxiliary.take()
        added = {} if auxiliary is None else {"auxiliary_loss": auxiliary}
        return added if self.z_loss is None else added | {"z_loss": self.z_loss.take(device)}

    @torch.no_grad()
    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each token's loss, fp32, and whether its target is the likeliest word, bool: [batch x context] each.

        Tokens of other cp ranks get zeros.
        """
        with self.autocast(batch.inputs.device):
            if self.family is not None:
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
            if self.family is not None:
                return self.next_logits_from(self.hidden(self.padded(inputs), None, None), places)
            return _at(self._logits(inputs, None, None).unflatten(0, inputs.shape), places)

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def hidden(
        self,
        inputs: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        *,
        stage: int | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """Run the class's own forward; return the output layer's input for this rank's tokens, [batch, context, width].

        `stage`: run only this pipeline stage's layers, on what the stage before made (`received`); without the last
        layer, return what the next stage receives.
        """
        assert self.family is not None
        own = {} if stage is None else self.stages[stage]
        run = nullcontext() if stage is None else layers_run(self.hf, self.family.layers, own, self.passed, received)
        with run, head_input(self.hf, self.family.head) as seen:
            try:
                self.hf(**self._inputs(inputs, positions, documents))
            except Ended as ended:
                return ended.hidden
        return seen[0]

    def _inputs(self, inputs: Tensor, positions: Tensor | None, documents: Tensor | None) -> dict[str, Any]:
        """Return the arguments of the class's forward for this rank's tokens."""
        assert self.family is not None
        given: dict[str, Any] = {"input_ids": self._own(inputs)}
        if "use_cache" in self.family.arguments:
            given["use_cache"] = False
        if "position_ids" in self.family.arguments:
            if positions is None and (self.context is not None or self.sequence_pieces > 1):
                positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
            given["position_ids"] = None if positions is None else self._own(positions)
        if documents is not None:
            given["attention_mask"] = self.document_mask(documents) if self.by_document else _is_text(documents)
        return given

    def padded(self, inputs: Tensor) -> Tensor:
        """Pad `inputs` to a length that ranks can split; in causal models, padding does not change tokens before it."""
        pieces = self.sequence_pieces
        if self.context is not None:
            pieces = self.context.group.size() * math.lcm(2, pieces)
        return nn.functional.pad(inputs, (0, -inputs.shape[1] % pieces))

    def document_mask(self, documents: Tensor) -> Any:
        """Return the mask, or the documents' bounds, that attention takes for this rank's tokens."""
        shape: Any = self.hf.config.get_text_config()  # type: ignore[operator,union-attr]
        context, take = documents.shape[1], self._own
        way = way_to_attend(
            documents.device,
            self.dtype,
            context=context,
            head_width=_head_width(shape),
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

    def output(self) -> tuple[Tensor, Tensor | None]:
        """Return the output layer's weight [vocab, width] and bias [vocab]; under tp, of this rank's words only."""
        assert self.family is not None
        layer = self.hf.get_submodule(self.family.head)
        return layer.weight, getattr(layer, "bias", None)  # type: ignore[return-value]

    def loss_from(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return `forward`'s loss, from the hidden states before the output layer."""
        hidden = self._for_output(hidden)
        z_loss = self.z_loss if self.training else None
        loss: Tensor = self._over_vocabulary(linear_cross_entropy, hidden, targets, softmax=self.softmax, z_loss=z_loss)
        return loss

    def scores_from(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `scores`, from the hidden states before the output layer."""
        scores: tuple[Tensor, Tensor] = self._over_vocabulary(linear_scores, self._for_output(hidden), targets)
        return scores

    def next_logits_from(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Return the result of `next_logits`, from the hidden states: all words' logits, on every tp rank."""
        assert self.family is not None
        weight, bias = self.output()
        whole = self._for_output(hidden)
        whole = whole if self.context is None else self.context.gather(whole)
        own = (_at(whole, places).to(self.dtype) @ weight.to(self.dtype).t()).float()
        own = self.family.tail(own if bias is None else own + bias)
        if self.tp_group is None:
            return own
        logits = own.new_zeros(len(own), self.num_words)
        logits[:, self.first_token_id : self.first_token_id + own.shape[1]] = own
        dist.all_reduce(logits, group=self.tp_group)
        return logits

    def _for_output(self, hidden: Tensor) -> Tensor:
        """Return hidden states of whole sequences; under tp, their gradient is summed over the ranks' words."""
        if self.tp_group is None or self.gathers_before_head:
            return hidden
        collect = gather_sequence if self.sequence_pieces > 1 else copy_to_group
        return collect(hidden, self.tp_group)

    def _over_vocabulary(self, function: Callable[..., Any], hidden: Tensor, targets: Tensor, **options: Any) -> Any:
        """Call a function of training/models/linear_cross_entropy.py with the words that this rank holds."""
        assert self.family is not None
        weight, bias = self.output()
        return function(
            hidden.flatten(0, 1),
            weight,
            bias,
            targets.flatten(),
            dtype=self.dtype,
            first_token_id=self.first_token_id,
            group=self.tp_group,
            tail=self.family.tail,
            **options,
        )

    def _logits(self, inputs: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Return logits fp32 [tokens, vocab] of a class that runs whole."""
        logits: Tensor = self.hf(**self._whole_inputs(inputs, positions, documents)).logits
        return logits.flatten(0, 1).float()

    def _whole_inputs(self, inputs: Tensor, positions: Tensor | None, documents: Tensor | None) -> dict[str, Tensor]:
        """Return the arguments of a class that runs whole: it makes its own mask, and is told only what is padding."""
        if positions is not None:
            self.known_family(cure="set train.packing=padded, or stream")
        given = {"input_ids": inputs}
        return given if documents is None else given | {"attention_mask": _is_text(documents)}


def _is_text(documents: Tensor) -> Tensor:
    """Return transformers' mask of padding, int64 [batch, context].

    Where all tokens are padding, as they predict nothing, none is called so: a mean over no tokens would be NaN.
    """
    is_text = documents != PADDING
    return (is_text | ~is_text.any()).long()


def _in_bf16(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (args[0].to(torch.bfloat16), *args[1:]), named
    return args, named | {"hidden_states": named["hidden_states"].to(torch.bfloat16)}


def _head_width(shape: Any) -> int:
    """Return the width of attention heads; 1, for which no kernel is, if layers differ in it."""
    try:
        return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    except AttributeError:
        raise
    except Exception:
        return 1


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
    config, auto_class = plan.config, auto_class_of(plan.config.objective)
    settings = hf_config(plan)
    if config.model.init == "pretrained":
        path = plan.local(config.model.path)
        hf = load_pretrained(auto_class, path, dtype=torch.float32, settings=settings)
    elif can(settings.model_type, "fresh"):
        with hugging_face.without_weights():
            hf = auto_class.from_config(settings, dtype=torch.float32)
        hf.tie_weights()
    else:  # the class may initialize weights in ways that cannot be repeated layer by layer
        torch.manual_seed(config.train.seed)
        hf = auto_class.from_config(settings, dtype=torch.float32)
    hf.config.use_cache = False  # set again on export; training needs no cache
    _let_every_word_learn(hf)
    freeze(hf, config.train.freeze)
    weights: Mapping[str, Tensor] = {name: tensor.detach() for name, tensor in state_of(hf).items()}
    model = LanguageModel(hf, precision=plan.precision)
    if config.train.z_loss:
        model.z_loss = ZLoss(config.train.z_loss)
    if config.model.init != "pretrained" and can(settings.model_type, "fresh"):
        with torch.device("meta"):
            template = auto_class.from_config(settings, dtype=torch.float32)
        _let_every_word_learn(template)
        weights = FreshWeights(template, seed=config.train.seed)
    return model, weights


def import_model(plan: RunPlan) -> None:
    """Import the modules that building the plan's model needs (3 s of a core), without making its weights.

    A class whose fresh weights are not made layer by layer is not built (unfilled_model).
    """
    settings, auto_class = hf_config(plan), auto_class_of(plan.config.objective)
    if can(settings.model_type, "fresh"):
        with hugging_face.without_weights(), torch.device("meta"):
            auto_class.from_config(settings)


def _let_every_word_learn(hf: Any) -> None:
    """Train the pad token's row too: it is the end token, which begins documents; transformers would keep it at zero.

    Also freeze what modules around the output layer hold beside it, such as BERT's bias if embeddings are not tied: it
    is unused then and gets no gradient.
    """
    hf.get_input_embeddings().padding_idx = None
    head = hf.get_output_embeddings()
    used = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    for module in hf.modules():
        if module is not head and head is not None and any(child is head for child in module.children()):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(id(parameter) in used)


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
        return with_dropout(read_settings(path), model.dropout)
    if model.path:
        ends = {"bos_token_id": plan.end_id, "eos_token_id": plan.end_id, "pad_token_id": plan.end_id}
        settings = read_settings(path, vocab_size=plan.vocab_size)
        if settings.model_type in types_counting_from_pad():
            settings.max_position_embeddings += plan.end_id - settings.pad_token_id
        settings.update(ends)
        return with_dropout(settings, model.dropout)
    own: dict[str, Any] = {"n_inner" if model.architecture == "gpt2" else "intermediate_size": shape.mlp_width}
    if model.architecture == "bert":
        own["pad_token_id"] = plan.end_id
    if model.architecture == "llama":
        own["num_key_value_heads"] = shape.kv_heads
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta}
    settings = AutoConfig.for_model(
        model.architecture,
        vocab_size=plan.vocab_size,
        bos_token_id=plan.end_id,
        eos_token_id=plan.end_id,
        tie_word_embeddings=shape.tied,
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.context,
        **own,
    )
    return with_dropout(settings, model.dropout)


def with_dropout(settings: Any, dropout: float) -> Any:
    """Set every dropout of a transformers config to `dropout`, because its config.json's would be used unnoticed."""
    for field in dropout_fields(vars(settings)):
        setattr(settings, field, dropout)
    return settings
