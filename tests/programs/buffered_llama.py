"""Trains, then evaluates, a Llama with persistent buffers: in each layer, as Gemma 4 has them, and one outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from training import evaluate, train


def main(plan_path: Path) -> None:
    with_buffers()
    train.main(plan_path)
    evaluate.main(plan_path)


def with_buffers() -> None:
    """Change transformers' class in this process."""
    make_layer, run_layer, make_model = LlamaDecoderLayer.__init__, LlamaDecoderLayer.forward, LlamaModel.__init__

    def layer(self: Any, *arguments: Any, **named: Any) -> None:
        make_layer(self, *arguments, **named)
        self.layer_scalar = nn.Buffer(torch.ones(1))

    def scaled(self: Any, *arguments: Any, **named: Any) -> Tensor:
        return run_layer(self, *arguments, **named) * self.layer_scalar

    def model(self: Any, *arguments: Any, **named: Any) -> None:
        make_model(self, *arguments, **named)
        self.outside = nn.Buffer(torch.zeros(3))

    LlamaDecoderLayer.__init__, LlamaModel.__init__ = layer, model  # type: ignore[method-assign]
    LlamaDecoderLayer.forward = scaled  # type: ignore[method-assign]
