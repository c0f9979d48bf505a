"""A run's initial weights, made layer by layer, so that a rank which holds part of a model never holds all of it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from training.models import hugging_face
from training.models.family import layers_name
from training.models.state import state_of


class FreshWeights(Mapping[str, Tensor]):
    """Initial weights by the class's own `_init_weights`. A module's seed is hashed from the run's seed and its name.

    So a tensor does not depend on which tensors are read, in which order, or on how many ranks. Only the layer that was
    made last is kept in memory. `template` is the model on the meta device.
    """

    def __init__(self, template: Any, *, seed: int) -> None:
        self.template, self.layers, self.seed = template, layers_name(template), seed
        self.shapes = {name: tensor.shape for name, tensor in state_of(template).items()}
        self.unit, self.made = "", nn.Module()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        unit = self._unit(name)
        if unit != self.unit:
            self.unit, self.made = unit, self._make(unit)
        tensor: Tensor = attrgetter(name.removeprefix(f"{unit}."))(self.made)
        return tensor.detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _unit(self, name: str) -> str:
        """Return the name of the layer that a parameter belongs to; outside the layers, of the module that holds it."""
        if name.startswith(f"{self.layers}."):
            number = name.removeprefix(f"{self.layers}.").partition(".")[0]
            return f"{self.layers}.{number}"
        return name.rpartition(".")[0]

    @torch.no_grad()
    def _make(self, unit: str) -> nn.Module:
        module = copy.deepcopy(self.template.get_submodule(unit)).to_empty(device="cpu")
        inner = list(module.named_modules()) if unit.startswith(f"{self.layers}.") else [("", module)]
        with torch.random.fork_rng(devices=[]):
            for name, child in reversed(inner):  # children first, as in transformers: a parent may change its children
                digest = hashlib.sha256(f"{self.seed}:{unit}.{name}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                hugging_face.initialize(self.template, child)
        return module


@torch.no_grad()
def fill(hf: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole weights, buffers among them, into a whole model."""
    for name, tensor in state_of(hf).items():
        tensor.copy_(weights[name])
