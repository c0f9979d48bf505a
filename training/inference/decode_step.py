"""One step of text: token ids in, the logits of the next token out, by the part of a model that a rank has.

A step is a list of integers, so that it travels as one tensor: what to do, with which batch, and the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from training.checkpoint.safetensors_files import TensorFiles
from training.inference.kv_cache import KeyValues
from training.models.architectures import ARCHITECTURES, layers_of
from training.models.language_model import LanguageModel
from training.strategies.pipeline import keep_stages
from training.strategies.tensor import shard_matrices

SKIPPED = -1  # position of a row that is not to be extended


class Do(IntEnum):
    PREFILL = 1  # batch, row, then the row's tokens: gives logits [1, vocab]
    EXTEND = 2  # batch, rows, then a token and a position of each row: gives logits [rows, vocab]
    MOVE = 3  # batch, from row, to row, tokens in it
    IDLE = 4  # so that ranks which wait do not take the silence for a fault
    STOP = 5


Step = Sequence[int]


def prefill(batch: int, row: int, ids: Sequence[int]) -> Step:
    return [Do.PREFILL, batch, row, *ids]


def extend(batch: int, tokens: Sequence[int], positions: Sequence[int]) -> Step:
    return [Do.EXTEND, batch, len(tokens), *tokens, *positions]


def move(batch: int, source: int, target: int, *, length: int) -> Step:
    return [Do.MOVE, batch, source, target, length]


def hidden_shape(step: Step) -> tuple[int, int]:
    """Sequences and tokens of each that pass through the layers."""
    return (1, len(step) - 3) if step[0] == Do.PREFILL else (step[2], 1)


class Part:
    """Some of a described model's layers, or of its heads, with their keys and values for `batches` batches."""

    def __init__(self, model: LanguageModel, *, batches: int, rows: int, context: int, first: bool, last: bool) -> None:
        self.model, self.first, self.last = model, first, last
        self.own = layers_of(model.hf)
        self.caches = [KeyValues(rows=rows, context=context) for _ in range(batches)]
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.width: int = model.hf.config.hidden_size  # type: ignore[union-attr,assignment]

    @torch.inference_mode()
    def run(self, step: Step, hidden: Tensor | None = None) -> Tensor | None:
        """Hidden states, or fp32 logits of the next tokens from the last stage, of its words; None of a MOVE.

        `hidden`: what the stage before gave; the first stage has none.
        """
        cache = self.caches[step[1]]
        if step[0] == Do.MOVE:
            cache.move(step[2], step[3], length=step[4])
            return None
        ids, positions, mask = self._inputs(step, cache)
        if hidden is None:
            hidden = self.model.embed(ids, positions)
        assert self.model.architecture is not None
        arguments = self.model.architecture.arguments(self.model.hf, hidden, positions)
        for layer in self.own:
            hidden = layer(hidden, attention_mask=mask, past_key_values=cache, **arguments)
        if not self.last:
            return hidden
        weight, bias = self.model.output()
        return F.linear(self.model.finish(hidden[:, -1]), weight, bias).float()

    def _inputs(self, step: Step, cache: KeyValues) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens and positions [n, new], and which columns each row sees; None: all, or causal in a prefill."""
        if step[0] == Do.PREFILL:
            ids = torch.tensor([step[3:]], device=self.device)
            cache.fill(step[2], length=ids.shape[1])
            return ids, torch.arange(ids.shape[1], device=self.device)[None], None
        count = step[2]
        places = [max(place, 0) for place in step[3 + count :]]  # what a skipped row gives, nobody reads
        end = max(places) + 1
        ids, positions = torch.tensor([step[3 : 3 + count], places], device=self.device)
        cache.extend(positions, end=end)
        mask = None
        if min(places) + 1 < end:
            mask = (torch.arange(end, device=self.device) <= positions[:, None])[:, None, None, :]
        return ids[:, None], positions[:, None], mask


class AnyClass:
    """A whole model of any class, whose attention is its own affair: a cache for each row, one row after another."""

    first = last = True

    def __init__(self, hf: Any, *, vocab_size: int) -> None:
        self.hf, self.vocab_size, self.device = hf, vocab_size, next(hf.parameters()).device
        self.caches: dict[int, Any] = {}

    @torch.inference_mode()
    def run(self, step: Step, hidden: Tensor | None = None) -> Tensor | None:
        if step[0] == Do.MOVE:
            self.caches[step[3]] = self.caches.pop(step[2])
            return None
        if step[0] == Do.PREFILL:
            self.caches.pop(step[2], None)
            return self._row(step[2], step[3:])
        count = step[2]
        rows = zip(step[3 : 3 + count], step[3 + count :], strict=True)
        return torch.cat(
            [
                self._row(row, [token]) if place != SKIPPED else torch.zeros(1, self.vocab_size, device=self.device)
                for row, (token, place) in enumerate(rows)
            ]
        )

    def _row(self, row: int, ids: Sequence[int]) -> Tensor:
        given = torch.tensor([ids], device=self.device)
        result = self.hf(input_ids=given, past_key_values=self.caches.get(row), use_cache=True)
        self.caches[row] = result.past_key_values
        logits: Tensor = result.logits[:, -1].float()
        return logits


def load_whole(folder: Path, *, dtype: torch.dtype) -> Any:
    """A whole model of any class. `use_safetensors`: nothing is ever unpickled."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
    ).eval()


def load_part(
    folder: Path, *, dtype: torch.dtype, tensor: DeviceMesh | None = None, stage: int = 0, stages: int = 1
) -> LanguageModel:
    """A described class on the CPU, with the weights of this rank only: its pieces of matrices, or its layers.

    Raises ValueError if the folder lacks a weight, or has it in another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    settings = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with no_init_weights():  # memory that was asked for and is never touched costs nothing
        hf = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    hf.tie_weights()
    model = LanguageModel(hf.eval(), precision="fp32")
    if tensor is not None:
        shard_matrices(model, tensor)
    keep_stages(model, owned=[stage], stages=stages)
    weights = TensorFiles(folder, "model")
    with torch.no_grad():
        for name, saved, parameter in _named(model):
            saved = saved if saved in weights else saved.removeprefix(f"{hf.base_model_prefix}.")  # as the hub has gpt2
            if saved not in weights:
                raise ValueError(f"{folder} has no {saved}, which its config.json asks for: it is no whole model")
            whole, cut = weights[saved], model.cuts.get(name)
            piece = whole if cut is None or tensor is None else cut.take(whole, tensor)
            if piece.shape != parameter.shape:
                raise ValueError(
                    f"{saved} in {folder} is {list(piece.shape)}, its config.json means {list(parameter.shape)}"
                )
            parameter.copy_(piece)
    return model


def _named(model: LanguageModel) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Name here, name in the files and parameter; the last stage's copy of a tied embedding is saved as the first's."""
    assert model.architecture is not None
    for name, parameter in model.hf.named_parameters():
        tied = model.tied and name == f"{model.architecture.output}.weight"
        yield name, f"{model.architecture.embedding}.weight" if tied else name, parameter


def is_described(folder: Path) -> bool:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type in ARCHITECTURES
