"""The model section of the config: architecture, sizes and initial weights."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from training.config.section import Section
from training.config.size_rule import SIZE


class ModelConfig(Section):
    """The shape of the model, and where its initial weights come from."""

    architecture: Literal["llama", "gpt2", "bert", "path"] = "llama"
    """Architecture of the model. path: any Hugging Face model of the next word whose config.json is at `path`. bert: a
    model of masked words; with `path`, any Hugging Face class of them, such as RoBERTa.
    """
    path: str = ""
    """Folder, URL (s3:// …) or Hugging Face hub name of a model. It is used with architecture=path, architecture=bert
    or init=pretrained.
    """
    init: Literal["random", "pretrained"] = "random"
    """Initial weights. random: freshly initialized. pretrained: loaded from the model at `path`."""
    size: str = ""
    """Number of parameters, such as 124M or 1.1B. It chooses layers, width, heads, steps, batch and learning rate by
    published rules, where these are not given. Empty: each is as its own field says.
    """
    layers: int = Field(4, ge=1, le=1000)
    """Number of transformer layers."""
    width: int = Field(256, ge=8, le=65_536)
    """Hidden size: the number of features of each token between layers."""
    heads: int = Field(8, ge=1, le=1024)
    """Number of attention heads."""
    kv_heads: int = Field(0, ge=0, le=1024)
    """Number of key/value heads, for llama only; 0 means as many as attention heads."""
    mlp_width: int = Field(0, ge=0, le=1_000_000)
    """Width of the hidden layer of each MLP; 0 means 4 x width, or for llama 8/3 x width rounded up to a multiple of
    64.
    """
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability during training; 0 disables dropout. For llama it applies to attention only. It also
    overrides the config.json of a model at `path`.
    """
    tie_embeddings: bool = True
    """Use one matrix for both the input embedding and the output layer."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary position embedding, for llama only."""

    @model_validator(mode="after")
    def check(self) -> ModelConfig:
        kv_heads, from_path = self.kv_heads or self.heads, bool(self.path)
        needs_path = self.architecture == "path" or self.init == "pretrained"
        if needs_path and not self.path:
            raise ValueError("model.path is empty: set it to a Hugging Face model's folder or hub name")
        if self.path and not needs_path and self.architecture != "bert":
            raise ValueError(
                f"model.path = {self.path!r} would not be used: set model.init=pretrained for its weights, "
                "or model.architecture=path for its shape"
            )
        if self.size and not re.fullmatch(SIZE, self.size):
            raise ValueError(
                f"model.size = {self.size!r} is not a number of parameters: write it with K, M or B, such as 124M"
            )
        if self.size and from_path:
            raise ValueError(
                f"model.size = {self.size} would not be used, the model at {self.path!r} has its own sizes: leave out "
                "model.size or model.path"
            )
        if not from_path and self.width % self.heads:
            raise ValueError(
                f"model.width = {self.width} is not divisible by model.heads = {self.heads}: "
                f"change model.width to a multiple of {self.heads}, or model.heads"
            )
        if not from_path and self.architecture == "llama" and (self.width // self.heads) % 2:
            raise ValueError(
                f"model.width / model.heads = {self.width // self.heads} is odd, rotary positions need an even "
                "head size: change model.width or model.heads"
            )
        if self.heads % kv_heads:
            raise ValueError(
                f"model.heads = {self.heads} is not divisible by model.kv_heads = {kv_heads}: change one of them"
            )
        return self
