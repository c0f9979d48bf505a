"""Stage 1, text to shards: the manifest of a shard folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from training.facts.cures import Cure
from training.facts.formats import Kind
from training.records.record import Record
from training.records.text_encoding import TextEncoding
from training.records.words import counted

# A mixture's lie in other folders, of drawn corpora anywhere; no name is absolute or turns back on its way.
SHARD_NAME = r"^((\.\./)+([\w.-]*\w[\w.-]*/)+)?(train|validation)/[0-9-]+$"
LOST_SHARE = 0.001  # of the characters; more is a warning
SKIPPED_SHARE = 0.01  # of the bytes; more is a warning
FILES_KEPT = 10  # in the manifest, of those in which text was skipped
FILES_NAMED = 5
GARBLED_SHARE = 0.001  # of the characters
GARBLED_STRETCH = 256
FOLD = 3  # more or less of the text than is asked for is a warning


class SourceFile(Record):
    """A file of the corpus, or a data set of the Hugging Face hub."""

    name: str
    """Path within the corpus, in a mixture behind the source's name; for the hub: data set, config and split."""
    num_bytes: int
    """Size of the file as it is stored, before decompression; 0 for a data set of the hub."""
    sha256: str
    """SHA-256 of the file's content, or an object store's own hash of it; for the hub the commit of the data set."""


class Stretch(Record):
    """Consecutive tokens that were read from one file."""

    source: int
    """Number of the file in the manifest's `sources`, from 0."""
    tokens: int
    """Number of tokens in the stretch."""
    text_bytes: int
    """UTF-8 bytes of the stretch's text, without those that the tokenizer lost."""


class Shard(Record):
    """One token file of one split."""

    name: Annotated[str, Field(pattern=SHARD_NAME)]
    """Path of the shard's files relative to the manifest's folder, without suffix, such as train/00007."""
    split: Literal["train", "validation"]
    """Whether the shard is for training or held out for validation."""
    tokens: int
    """Number of tokens in the shard."""
    documents: int
    """Number of documents that end in the shard."""
    text_bytes: int
    """UTF-8 bytes of the shard's text, without those that the tokenizer lost."""
    sha256: str
    """SHA-256 over both files of the shard: NAME.bin, then NAME.docs.npy."""
    part: int | None = None
    """Number of the shard's source in the `parts` of a mixture, from 0; None where the corpus is no mixture."""
    stretches: tuple[Stretch, ...] = ()
    """Files from which the tokens of a validation shard were read, in order; empty for training shards."""

    @property
    def chunk(self) -> int:
        """Return the number of the chunk that it was made of."""
        return int(PurePath(self.name).name.partition("-")[0])


class SkippedDocument(Record):
    """A document that could not be read."""

    source: int
    """Number of the document's file in the manifest's `sources`, from 0."""
    number: int
    """Place in the file at which the document begins, counted in `unit`."""
    unit: Literal["", "byte", "line", "row", "item"]
    """What `number` counts; empty if nothing of the whole file could be read."""
    problem: str
    """Why the document could not be read."""


class SkippedFile(Record):
    """A file in which text could not be read."""

    name: str
    """Name of the file within the corpus, in a mixture behind the source's name."""
    num_bytes: int
    """Bytes of the text that could not be read, or of the whole file."""


class LeftOut(Record):
    """The files of one kind, most often of one suffix, that a corpus has and that are not read."""

    kind: str
    """What the files have in common, most often their suffix."""
    files: int
    """Number of files of this kind."""
    num_bytes: int
    """Size of all files of this kind together, in bytes."""
    example: str
    """Name of one file of this kind."""
    why: str
    """What files of this kind are, or how they can be read."""
    refused: bool = False
    """Whether files of this kind end the run where data.on_error=stop."""
    asked: bool = False
    """Whether data.include or data.exclude left these files out."""


class Ledger(Record):
    """The counts of what was read, left out and lost while text became tokens."""

    repeated: int = 0
    """Documents left out because an earlier one has the same text (data.deduplicate)."""
    filtered: int = 0
    """Rows left out because data.where is false for them."""
    skipped: int = 0
    """Documents that could not be read, with all that was lost to the same fault."""
    skipped_bytes: int = 0
    """Bytes in the files of the text that could not be read."""
    skipped_files: int = 0
    """Number of files with text that could not be read."""
    characters: int = 0
    """Characters of the text that was encoded."""
    nul_characters: int = 0
    """NUL characters in the text that was encoded."""
    garbled: int = 0
    """Stretches of 256 characters that seem to have been read in a wrong encoding."""
    lost_characters: int = 0
    """Characters without a token, or with the unknown token only; white space between words does not count."""
    unknown_tokens: int = 0
    """How often the tokenizer gave its unknown token."""
    special_as_tokens: int = 0
    """How often the text holds a special token of the tokenizer that was encoded as that token."""
    special_as_text: int = 0
    """How often the text holds a special token of the tokenizer that was encoded like any other text."""

    @staticmethod
    def total(ledgers: Iterable[Ledger]) -> dict[str, int]:
        """Return the sums of all counts, by name."""
        every = list(ledgers)
        return {name: sum(getattr(ledger, name) for ledger in every) for name in Ledger.model_fields}


class FinishedChunk(Ledger):
    """The result of one chunk of a corpus: its shards, and the documents that were left out of them."""

    FORMAT: ClassVar[Kind] = "shards"

    shards: tuple[Shard, ...]
    """The chunk's shards, those for training first."""
    skipped_examples: tuple[SkippedDocument, ...] = ()
    """The first documents that could not be read; later ones are only counted."""
    bytes_by_file: dict[str, int] = Field(default_factory=dict)
    """Bytes of the text that could not be read, by the file's name."""
    garbled_example: SkippedDocument | None = None
    """First text, quoted in `problem`, that seems to have been read in a wrong encoding; None if there is none."""


class TokenShards(Ledger):
    """The manifest of a shard folder. No paths, times or hosts: equal inputs give equal bytes."""

    FORMAT: ClassVar[Kind] = "shards"

    fingerprint: str
    """Hash of all that determines the tokens: the content of files and the settings, but neither paths nor workers."""
    parts: tuple[str, ...] = ()
    """Names of a mixture's sources, in order, whose shards lie in folders beside this one; empty for one corpus."""
    sources: tuple[SourceFile, ...]
    """The files that were read, in the order of their tokens; a Stretch and a SkippedDocument name them by number."""
    tokenizer: str
    """Kind of the tokenizer, or `pretrained` and its name, with its number of tokens."""
    tokenizer_sha256: str
    """SHA-256 of the tokenizer.json beside the shards."""
    vocab_size: int
    """Number of tokens in the tokenizer's vocabulary."""
    end_id: int
    """Token that ends each document."""
    mask_id: int | None
    """Token that hides another one from a masked language model; None for causal models."""
    text_encoding: TextEncoding
    """How special tokens in the text were encoded, and what stands before each document."""
    dtype: Literal["uint16", "uint32"]
    """Type of the numbers in the shards: uint16 if the vocabulary allows it."""
    split_rule: str
    """How text was divided into training and validation, as a sentence; for a mixture that of each source."""
    shards: tuple[Shard, ...]
    """All shards, in the order in which training and validation read their tokens."""
    skipped_examples: tuple[str, ...]
    """The first documents that could not be read, each as its place and the problem."""
    largest_skipped: tuple[SkippedFile, ...] = ()
    """Files of which most bytes were skipped, the largest first; at most FILES_KEPT."""
    garbled_example: str = ""
    """First characters that seem to have been read in a wrong encoding, with their place; empty if none."""
    asked_fraction: float = 0.0
    """Share of the text that was to be held out, where whole documents are; otherwise 0, and in a mixture."""
    left_out: tuple[LeftOut, ...] = ()
    """Files of the corpus that were not read, by kind."""
    hints: tuple[str, ...] = ()
    """Sentences about files that may be meant otherwise than they were read."""

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    def tokens_of_part(self, part: int, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if (shard.part or 0) == part and shard.split == split)

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.shards if shard.split == split)

    def text_bytes(self, split: str) -> int:
        return sum(shard.text_bytes for shard in self.shards if shard.split == split)

    def ledger_lines(self, *, read: str = "", read_bytes: int = 0) -> list[str]:
        """Return what of the corpus was left out, skipped or lost, a sentence each; warnings are `ledger_warnings`.

        `read`: words for the part of the text that the counts are of, `read_bytes`: its size in the files; 0: all.
        """
        return [line for line, _ in sorted(self._ledger(read, read_bytes), key=lambda each: each[1])]

    def ledger_warnings(self) -> list[str]:
        """Return what was lost and should not have been."""
        return [line for line, is_warning in self._ledger() if is_warning]

    def text_line(self) -> str:
        """Return what the text is, in a sentence. A document that is cut between both splits is one in each."""
        size = sum(map(self.text_bytes, ("train", "validation"))) / 1e6
        train, held_out = (
            f"{self.tokens(split):,} tokens of {counted(self.documents(split), 'document')}"
            for split in ("train", "validation")
        )
        return f"text: {size:,.1f} MB; {train} to train on, {held_out} held out"

    def _ledger(self, read: str = "", read_bytes: int = 0) -> Iterator[tuple[str, bool]]:
        """Yield sentences, and whether each is a warning."""
        file_bytes = sum(source.num_bytes for source in self.sources)
        yield from files_left_out(self.left_out, read_bytes=file_bytes)
        yield from self._documents_left_out(read, read_bytes or file_bytes)
        yield from characters_lost(self, read=read)
        yield from garbled_text(self, self.garbled_example, read=read)
        for line in self.special_tokens_lines():
            yield line, True
        for hint in (*self.hints, *self.split_hints()):
            yield f"text: {hint}", True

    def _documents_left_out(self, read: str, read_bytes: int) -> Iterator[tuple[str, bool]]:
        if self.repeated:
            repeated = counted(self.repeated, "document")
            yield f"text: {read}left out {repeated} whose text repeats an earlier one", False
        if self.filtered:
            yield f"text: {read}left out {counted(self.filtered, 'row')} for which data.where is false", False
        if self.skipped:
            yield self._skipped(read, read_bytes)
        if self.nul_characters:
            nuls = counted(self.nul_characters, "NUL character")
            yield f"text: {read}the documents, and so the tokens, hold {nuls}", True

    def _skipped(self, read: str, read_bytes: int) -> tuple[str, bool]:
        """Return how much was skipped, of all that was read or skipped, and of which files most."""
        of_text = sum(map(self.text_bytes, ("train", "validation"))) + self.skipped_bytes
        share = min(1.0, self.skipped_bytes / max(1, read_bytes or of_text))
        largest = self.largest_skipped[:FILES_NAMED]
        names = [f"{file.name} ({file.num_bytes / 1e6:,.1f} MB)" for file in largest]
        names += [f"{self.skipped_files - len(largest):,} more"] if self.skipped_files > len(largest) else []
        line = (
            f"text: {read}skipped {counted(self.skipped, 'document')} in {counted(self.skipped_files, 'file')}, "
            f"{self.skipped_bytes / 1e6:,.1f} MB, {format_share(share)} of the bytes (data.on_error=skip): "
            f"{', '.join(names)}; the first: {'; '.join(self.skipped_examples[:3])}"
        )
        return line, share > SKIPPED_SHARE

    def split_hints(self) -> list[str]:
        """Return that the parts differ from what was asked for, if they do."""
        held_out, train = self.text_bytes("validation"), self.text_bytes("train")
        return unlike_parts(held_out, held_out + train, asked=self.asked_fraction)

    def special_tokens_lines(self) -> list[str]:
        """Return a sentence about the special tokens that the text holds, if it does."""
        found = self.text_encoding.on_special(as_tokens=self.special_as_tokens, as_text=self.special_as_text)
        return [f"text: {line}" for line in found]

    def made_by(self, rule: TextEncoding) -> bool:
        """Whether the rule gives these tokens of their text."""
        holds_none = not self.special_as_tokens + self.special_as_text
        same = {*self.text_encoding.special_tokens} == {*rule.special_tokens}
        return self.text_encoding.bos == rule.bos and (same or holds_none)


def characters_lost(ledger: Ledger, *, read: str = "") -> Iterator[tuple[str, bool]]:
    """Yield a sentence, if the tokenizer has lost characters, and whether it is a warning.

    `read`: words for the part of the text that the counts are of.
    """
    lost, characters = ledger.lost_characters, ledger.characters
    if not lost and not ledger.unknown_tokens:
        return
    share = lost / max(1, characters)
    yield (
        f"text: {read}{format_share(share)} of the characters ({lost:,} of "
        f"{characters:,}) are lost: the tokenizer does not know them ({counted(ledger.unknown_tokens, 'unknown token')}"
        f"); take one that is byte-level or has a byte fallback, or {Cure.TRAIN_TOKENIZER}",
        share > LOST_SHARE,
    )


def format_share(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 else "below 0.01%"


def largest_files(bytes_by_file: Mapping[str, int]) -> tuple[SkippedFile, ...]:
    """Return the files of which most was skipped, the largest first."""
    order = sorted(bytes_by_file.items(), key=lambda each: (-each[1], each[0]))
    return tuple(SkippedFile(name=name, num_bytes=num_bytes) for name, num_bytes in order[:FILES_KEPT])


def garbled_text(ledger: Ledger, example: str, *, read: str = "") -> Iterator[tuple[str, bool]]:
    """Yield a sentence, if text seems to have been read in a wrong encoding, and whether it is a warning.

    `read`: words for the part of the text that the counts are of.
    """
    if ledger.garbled:
        size = f"{ledger.garbled * GARBLED_STRETCH:,} characters"
        yield (
            f"text: {read}up to {size} look as if they had been read in a wrong encoding, such as {example}: "
            f"{Cure.MEND}",
            ledger.garbled * GARBLED_STRETCH > GARBLED_SHARE * ledger.characters,
        )


def unlike_parts(held_out: int, whole: int, *, asked: float) -> list[str]:
    """Return that the text that is held out is threefold what was asked for, or a third of it; empty if it is not."""
    share = held_out / max(1, whole)
    if not asked or not whole or asked / FOLD <= share <= FOLD * asked:
        return []
    return [
        f"{share:.2%} of the text is held out, and data.validation_fraction asks for {asked:.2%}: documents are few "
        f"or of unlike lengths; {Cure.TAIL} to cut by characters"
    ]


def files_left_out(left_out: Iterable[LeftOut], *, read_bytes: int) -> Iterator[tuple[str, bool]]:
    """Yield a sentence for each kind of files, and whether it is a warning: of archives, or of more than is read."""
    for each in left_out:
        files, size = counted(each.files, "file"), f"{each.num_bytes / 1e6:,.1f} MB"
        if each.refused or (not each.asked and each.num_bytes > read_bytes):
            read = f"{max(1, read_bytes) / 1e6:,.1f} MB are read"
            yield (
                f"text: left out {files} ({each.kind}, {size}, while {read}), such as {each.example}: {each.why}",
                True,
            )
        else:
            yield f"text: left out {files} ({each.kind}, {size}, such as {each.example}): {each.why}", False
