"""The data section of the config: where text comes from, and how it becomes tokens."""

from __future__ import annotations

import codecs
from typing import Literal

from pydantic import Field, field_validator, model_validator

from training.config.section import Section


class TokenizerConfig(Section):
    """The tokenizer that turns text into tokens."""

    kind: Literal["bpe", "pretrained", "characters", "bytes"] = Field(
        "bpe",
        description="The kind of tokenizer. bpe: a byte-level BPE is trained on the corpus. pretrained: a tokenizer "
        "is loaded from `path`. characters: each character of the corpus is a token. bytes: each UTF-8 "
        "byte is a token.",
    )
    path: str = Field(
        "",
        description="Folder or Hugging Face hub name of a pretrained tokenizer. It is used only with kind=pretrained.",
    )
    vocab_size: int = Field(
        0,
        ge=0,
        le=2_000_000,
        description="Number of tokens in the vocabulary of a trained BPE; 0 means 4096. With kind=pretrained, the "
        "number that the tokenizer must have; 0 accepts any.",
    )
    sample_mib: int = Field(
        64, ge=1, le=10_000, description="Amount of training text, in MiB, that a BPE tokenizer is trained on."
    )

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
    """The corpus: where text comes from, and which part of it is held out."""

    path: str = Field(
        "",
        description="The corpus: `stdlib` (the standard library of this Python), a file or a folder (.txt .md .py "
        ".jsonl .csv .parquet …), or `hub:OWNER/NAME` for a Hugging Face dataset.",
    )
    column: str = Field("text", description="Name of the column or JSON key that holds the text.")
    text_unit: Literal["file", "line", "paragraph"] = Field(
        "file",
        description="What counts as one document in a plain-text file: the whole file, each line, or each paragraph.",
    )
    encoding: str = Field(
        "utf-8",
        description="Encoding of the text, JSON and CSV files, under a name that Python knows: utf-8, gb18030, utf-16, "
        "latin-1. Parquet files and the hub have their own.",
    )
    hub_config: str = Field("", description="Configuration name of a Hugging Face dataset; empty means its default.")
    hub_revision: str = Field("", description="Commit or tag of a Hugging Face dataset; empty means its newest commit.")
    hub_split: str = Field("train", description="Split of a Hugging Face dataset to read.")
    streaming: bool = Field(
        False, description="Read a Hugging Face dataset as a stream instead of downloading it whole."
    )
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="The tokenizer that turns text into tokens.")
    split: Literal["auto", "documents", "tail", "all"] = Field(
        "auto",
        description="How the held-out validation text is chosen. documents: whole documents, by a hash of their "
        "name or position. tail: the last characters of the corpus. auto: documents if there are at "
        "least 20, else tail. all: everything is held out, for evaluation without training.",
    )
    validation_fraction: float = Field(
        0.1,
        gt=0.0,
        lt=0.9,
        description="Fraction of the documents (of the characters, with split=tail) that is held out for validation.",
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description="What to do with a document that cannot be read. stop: fail and say where it is. skip: leave it "
        "out and count it.",
    )
    deduplicate: Literal["off", "exact"] = Field(
        "off",
        description="Whether a document whose text is that of an earlier one, from whatever file, is left out and "
        "counted. exact: the same to the last character; it takes about 100 bytes of memory for each document.",
    )
    shard_mib: int = Field(8, ge=1, le=4096, description="Amount of text, in MiB, in one token shard.")
    processes: int = Field(
        0, ge=0, le=512, description="Number of processes that tokenize the corpus; 0 means one per core."
    )

    @field_validator("encoding")
    @classmethod
    def check_encoding(cls, name: str) -> str:
        try:
            "text".encode(name)
        except LookupError:
            raise ValueError(
                f"data.encoding={name} is no encoding that Python knows: give utf-8, gb18030, utf-16, latin-1 or "
                "another one of docs.python.org/3/library/codecs.html"
            ) from None
        return codecs.lookup(name).name
