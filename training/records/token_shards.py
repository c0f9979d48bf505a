"""Stage 1, text to shards: the manifest of a shard folder."""

from __future__ import annotations

from typing import Literal

from training.records.record import Record


class SourceFile(Record):
    """A file of the corpus."""

    name: str
    num_bytes: int
    sha256: str


class Stretch(Record):
    """Consecutive tokens that were read from one file: the manifest's `sources[source]`."""

    source: int
    tokens: int
    text_bytes: int


class Shard(Record):
    """One token file of one split; `name` is relative to the shard folder, without suffix.

    `part`: the number of its source in a mixture's `parts`. `stretches`: the sources of a validation shard, in order;
    None for train shards and in older folders.
    """

    name: str
    split: Literal["train", "validation"]
    tokens: int
    documents: int
    text_bytes: int
    sha256: str
    part: int | None = None
    stretches: tuple[Stretch, ...] | None = None


class SkippedDocument(Record):
    """A document that could not be read: where it begins in its file (the manifest's `sources[source]`), and why.

    `number` counts `unit`s: bytes, lines, rows or items; the empty unit is the whole file.
    """

    source: int
    number: int
    unit: Literal["", "byte", "line", "row", "item"]
    problem: str


class FinishedChunk(Record):
    """The result of one chunk of a corpus: its shards, and the documents that were left out of them."""

    shards: tuple[Shard, ...]
    repeated: int = 0
    filtered: int = 0
    skipped: int = 0
    skipped_examples: tuple[SkippedDocument, ...] = ()


class TokenShards(Record):
    """The manifest of a shard folder. No paths, times or hosts: equal inputs give equal bytes.

    `parts`: the names of a mixture's sources, in order; its shards lie in the folders of the sources, beside this one.
    """

    fingerprint: str
    parts: tuple[str, ...] = ()
    sources: tuple[SourceFile, ...]
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_id: int
    mask_id: int | None
    dtype: Literal["uint16", "uint32"]
    split_rule: str
    shards: tuple[Shard, ...]
    repeated: int = 0  # documents left out since an earlier one has the same text
    filtered: int = 0  # rows left out by data.where
    skipped: int
    skipped_examples: tuple[str, ...]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.shards if shard.split == split)

    def text_bytes(self, split: str) -> int:
        return sum(shard.text_bytes for shard in self.shards if shard.split == split)
