"""Loads the model that a rank decodes with: a shard of it, or a whole one of any class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from training.checkpoint.safetensors_files import TensorFiles
from training.exports.arguments import cache_argument
from training.facts.families import adds_loss, can
from training.facts.model_config import read_settings
from training.inference.kv_cache import KeyValues
from training.inference.steps import SKIPPED, Extend, Forward, Move, Prefill
from training.models import hugging_face
from training.models.family import layers_of
from training.models.language_model import LanguageModel
from training.models.pretrained import auto_class_of, load_pretrained
from training.models.state import state_of
from training.records.model_state import check_state, saved_shapes
from training.records.plan import even_stages, layer_numbers
from training.strategies.pipeline import keep_stages
from training.strategies.tensor import shard_matrices


class StepRunner(Protocol):
    """A model, or a shard of one, with its cache."""

    device: torch.device

    def run(self, step: Forward, hidden: Tensor | None = None) -> Tensor:
        """Return hidden states [sequences, tokens, width]; with the last layers, fp32 logits [sequences, vocab].

        `hidden`: the result of the shard with the previous layers; None for the first layers.
        """

    def move(self, step: Move) -> None:
        """Copy one row of the cache to another."""


class ModelShard:
    """Some layers of a model, or some heads of each, and the caches of `batches` batches."""

    def __init__(self, model: LanguageModel, *, batches: int, rows: int, context: int, first: bool, last: bool) -> None:
        self.model, self.first, self.last = model, first, last
        (self.stage,) = model.stages
        self.caches = [KeyValues(rows=rows, context=context) for _ in range(batches)]
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.width: int = model.hf.config.hidden_size  # type: ignore[union-attr,assignment]
        self.given: dict[str, Any] = {}  # what layers get, in place of what the class gives them
        for layer in model.stages[self.stage].values():
            layer.forward = functools.partial(self._call, layer.forward, cache_argument(layer.forward))

    def _call(self, forward: Any, cache_argument: str, *args: Any, **named: Any) -> Any:
        bound = inspect.signature(forward).bind(*args, **named)
        mask, cache = self.given["mask"], self.given["cache"]
        bound.arguments |= {"attention_mask": mask, cache_argument: cache}
        return forward(*bound.args, **bound.kwargs)

    @torch.inference_mode()
    def run(self, step: Forward, hidden: Tensor | None = None) -> Tensor:
        """Run a step as in StepRunner; logits are those of this shard's words."""
        cache = self.caches[step.batch]
        ids, positions, mask = self._prefill(step, cache) if isinstance(step, Prefill) else self._extend(step, cache)
        self.given = {"mask": mask, "cache": cache}
        hidden = self.model.hidden(ids, positions, None, stage=self.stage, received=hidden)
        if not self.last:
            return hidden
        assert self.model.family is not None
        weight, bias = self.model.output()
        return self.model.family.tail(F.linear(hidden[:, -1], weight, bias).float())

    @torch.inference_mode()
    def move(self, step: Move) -> None:
        self.caches[step.batch].move(step.source, step.target, length=step.length)

    def _prefill(self, step: Prefill, cache: KeyValues) -> tuple[Tensor, Tensor, None]:
        """Return tokens and positions [1, new], and no mask: attention is causal without one."""
        ids = torch.tensor([step.ids], device=self.device)
        cache.fill(step.row, length=ids.shape[1])
        return ids, torch.arange(ids.shape[1], device=self.device)[None], None

    def _extend(self, step: Extend, cache: KeyValues) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return tokens and positions [rows, 1], and the mask of columns that each row sees; None: all columns."""
        columns = [max(position, 0) for position in step.positions]  # the result of a skipped row is not used
        end = max(columns) + 1
        ids, positions = torch.tensor([step.tokens, columns], device=self.device)
        cache.extend(positions, end=end)
        mask = None
        if min(columns) + 1 < end:
            mask = (torch.arange(end, device=self.device) <= positions[:, None])[:, None, None, :]
        return ids[:, None], positions[:, None], mask


class WholeModel:
    """A whole model of any class, with the class's own cache for each row: rows are run one after another.

    A class without such a cache (GPT; Mamba before transformers 5.24) reads the whole text again for each token: a
    row's cache holds its IDs.
    """

    def __init__(self, hf: Any, *, vocab_size: int) -> None:
        self.hf, self.vocab_size, self.device = hf, vocab_size, next(hf.parameters()).device
        self.cache_argument = cache_argument(hf.forward)
        self.caches: dict[int, Any] = {}

    @torch.inference_mode()
    def run(self, step: Forward, hidden: Tensor | None = None) -> Tensor:
        if isinstance(step, Prefill):
            self.caches.pop(step.row, None)
            return self._row(step.row, step.ids)
        skipped = torch.zeros(1, self.vocab_size, device=self.device)
        rows = enumerate(zip(step.tokens, step.positions, strict=True))
        return torch.cat(
            [self._row(row, [token]) if position != SKIPPED else skipped for row, (token, position) in rows]
        )

    def move(self, step: Move) -> None:
        self.caches[step.target] = self.caches.pop(step.source)

    def _row(self, row: int, ids: Sequence[int]) -> Tensor:
        if name := self.cache_argument:
            result = self.hf(
                input_ids=torch.tensor([ids], device=self.device), use_cache=True, **{name: self.caches.get(row)}
            )
            self.caches[row] = result[name]
        else:
            self.caches[row] = [*self.caches.get(row, ()), *ids]
            result = self.hf(input_ids=torch.tensor([self.caches[row]], device=self.device))
        logits: Tensor = result.logits[:, -1].float()
        return logits


def load_whole(folder: Path, *, dtype: torch.dtype) -> Any:
    """Load a whole model of any class. Raises ValueError if the folder does not have its tensors."""
    return load_pretrained(auto_class_of("causal"), folder, dtype=dtype).eval()


def load_shard(
    folder: Path, *, dtype: torch.dtype, tensor: DeviceMesh | None = None, stage: int = 0, stages: int = 1
) -> LanguageModel:
    """Load only this rank's weights of a model, on the CPU: pieces of matrices, or some layers.

    Raises ValueError if the folder does not have the model's tensors, or the model cannot be split.
    """
    settings = read_settings(folder)
    with hugging_face.without_weights():  # allocated memory that is never touched costs nothing
        hf = auto_class_of("causal").from_config(settings, dtype=dtype)
    hf.tie_weights()
    model = LanguageModel(hf.eval(), precision="fp32")
    family = model.known_family(cure="serve it with inference.engine=onnx, or vllm")
    saved = saved_shapes(folder)
    short = {name: name.removeprefix(f"{hf.base_model_prefix}.") for name in model.state_shapes}  # in the hub's gpt2
    names = {name: name if name in saved else short[name] for name in model.state_shapes}
    whole_names = {name: whole for whole, name in names.items()}
    check_state(
        {whole_names.get(name, name): shape for name, shape in saved.items()},
        model.state_shapes,
        where=str(folder),
        cure="pass the model's whole folder",
    )
    if tensor is not None:
        shard_matrices(model, tensor)
    keep_stages(model, {stage: layer_numbers(even_stages(len(layers_of(hf)), stages))[stage]}, last=stages - 1)
    # A tied embedding is saved once: the last stage's copy has the embedding's name in the files.
    weights, embedding = TensorFiles(folder, "model"), names[f"{family.embedding}.weight"]
    with torch.no_grad():
        for name, target in state_of(hf).items():
            whole, cut = weights[names.get(name, embedding)], model.cuts.get(name)
            target.copy_(whole if cut is None or tensor is None else cut.take(whole, tensor))
    return model


def is_admitted(folder: Path) -> bool:
    """Return whether this model can be split and decoded with our cache."""
    settings = read_settings(folder)
    return can(settings.model_type, "cached") and not adds_loss(vars(settings))
