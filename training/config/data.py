"""The corpus section of the config: where text comes from, and how it becomes tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training.config.section import Section


class TokenizerConfig(Section):
    kind: Literal["bpe", "pretrained", "characters", "bytes"] = Field(
        "bpe",
        description="bpe: a byte-level BPE trained on the corpus. pretrained: loaded from `path`. "
        "characters: one token per character of the corpus. bytes: one token per UTF-8 byte.",
    )
    path: str = Field("", description="Folder or hub name of a pretrained tokenizer; only for kind=pretrained.")
    vocab_size: int = Field(
        0,
        ge=0,
        le=2_000_000,
        description="Size of the trained BPE vocabulary; 0: 4096. For kind=pretrained the size to expect; 0: any.",
    )
    sample_mib: int = Field(64, ge=1, le=10_000, description="MiB of training text that a BPE is trained on.")

    @property
    def bpe_size(self) -> int:
        return self.vocab_size or 4096

    @model_validator(mode="after")
    def check(self) -> TokenizerConfig:
        if self.kind == "pretrained" and not self.path:
            raise ValueError("data.tokenizer.path is empty: set it to a tokenizer's folder or hub name")
        if self.kind == "bpe" and self.bpe_size < 258:
            raise ValueError(
                f"data.tokenizer.vocab_size = {self.vocab_size} is below 258 (256 bytes + 2 special tokens): "
                "raise it, or use data.tokenizer.kind=bytes"
            )
        return self


class DataConfig(Section):
    path: str = Field(
        "",
        description="The corpus: `stdlib` (this Python's own library), a file or a folder "
        "(.txt .md .py .jsonl .csv .parquet …), or `hub:OWNER/NAME` for a Hugging Face data set.",
    )
    column: str = Field("text", description="Column or JSON key that holds the text.")
    text_unit: Literal["file", "line", "paragraph"] = Field(
        "file", description="What counts as one document in plain-text files."
    )
    hub_config: str = Field("", description="Configuration name of a hub data set.")
    hub_revision: str = Field("", description="Commit or tag of a hub data set; empty: its newest commit.")
    hub_split: str = Field("train", description="Split of a hub data set to read.")
    streaming: bool = Field(False, description="Read a hub data set as a stream, without downloading it whole.")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="How text becomes tokens.")
    split: Literal["auto", "documents", "tail", "all"] = Field(
        "auto",
        description="Held-out part. documents: whole documents, by a hash of their name or place. "
        "tail: the last characters of the corpus. auto: documents if there are at least 20, else tail. "
        "all: everything, to evaluate on and not to train on.",
    )
    validation_fraction: float = Field(
        0.1, gt=0.0, lt=0.9, description="Share of documents (or of characters, for tail) held out for validation."
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="A document that cannot be read: stop with its place, or skip it and count it."
    )
    shard_mib: int = Field(8, ge=1, le=4096, description="MiB of text per token shard.")
    processes: int = Field(0, ge=0, le=512, description="Tokenizing processes; 0: one per core.")
