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

    `part`: the number of its source in a mixture's `parts`. `stretches`: the sources of a validation shard, in order.
    """

    name: Annotated[str, Field(pattern=SHARD_NAME)]
    split: Literal["train", "validation"]
    tokens: int
    documents: int
    text_bytes: int
    sha256: str
    part: int | None = None
    stretches: tuple[Stretch, ...] = ()

    @property
    def chunk(self) -> int:
        """Return the number of the chunk that it was made of."""
        return int(PurePath(self.name).name.partition("-")[0])


class SkippedDocument(Record):
    """A document that could not be read: where it begins in its file (the manifest's `sources[source]`), and why.

    `number` counts `unit`s: bytes, lines, rows or items; the empty unit is the whole file.
    """

    source: int
    number: int
    unit: Literal["", "byte", "line", "row", "item"]
    problem: str


class SkippedFile(Record):
    """A file in which text could not be read, and the bytes of that text, or of the whole file."""

    name: str
    num_bytes: int


class LeftOut(Record):
    """The files of one kind, most often of one suffix, that a corpus has and that are not read.

    `why`: what they are, or how they can be read. `refused`: with data.on_error=stop they end the run. `asked`: by
    data.include or data.exclude.
    """

    kind: str
    files: int
    num_bytes: int
    example: str
    why: str
    refused: bool = False
    asked: bool = False


class Ledger(Record):
    """The counts of what was read, left out and lost while text became tokens.

    `repeated`: documents left out because an earlier one has the same text. `filtered`: rows left out by data.where.
    `skipped`: documents that could not be read, with all that was lost to the same fault; `skipped_bytes`: their size
    in the files, `skipped_files`: how many files they are in. `characters`: of the text that was encoded,
    `nul_characters` and `lost_characters` among them: for a lost one the tokenizer has nothing, or only its unknown
    token (white space between words does not count). `unknown_tokens`: how often it gave that token.
    `special_as_tokens`, `special_as_text`: how often the text holds special tokens that were encoded as such, and as
    text. `garbled`: stretches of 256 characters that seem to have been read in a wrong encoding.
    """

    repeated: int = 0
    filtered: int = 0
    skipped: int = 0
    skipped_bytes: int = 0
    skipped_files: int = 0
    characters: int = 0
    nul_characters: int = 0
    garbled: int = 0
    lost_characters: int = 0
    unknown_tokens: int = 0
    special_as_tokens: int = 0
    special_as_text: int = 0

    @staticmethod
    def total(ledgers: Iterable[Ledger]) -> dict[str, int]:
        """Return the sums of all counts, by name."""
        every = list(ledgers)
        return {name: sum(getattr(ledger, name) for ledger in every) for name in Ledger.model_fields}


class FinishedChunk(Ledger):
    """The result of one chunk of a corpus: its shards, and the documents that were left out of them.

    `bytes_by_file`: what was skipped of each file, by its name.
    """

    FORMAT: ClassVar[Kind] = "shards"

    shards: tuple[Shard, ...]
    skipped_examples: tuple[SkippedDocument, ...] = ()
    bytes_by_file: dict[str, int] = Field(default_factory=dict)
    garbled_example: SkippedDocument | None = None


class TokenShards(Ledger):
    """The manifest of a shard folder. No paths, times or hosts: equal inputs give equal bytes.

    `parts`: the names of a mixture's sources, in order; its shards lie in the folders of the sources, beside this one.
    `largest_skipped`: the files of which most was skipped, FILES_KEPT at most.
    `left_out`: the files that were not read. `hints`: sentences about files that may be meant otherwise.
    `asked_fraction`: how much of the text was to be held out, if whole documents are; otherwise 0. `garbled_example`:
    characters and the place of the first.
    """

    FORMAT: ClassVar[Kind] = "shards"

    fingerprint: str
    parts: tuple[str, ...] = ()
    sources: tuple[SourceFile, ...]
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_id: int
    mask_id: int | None
    text_encoding: TextEncoding
    dtype: Literal["uint16", "uint32"]
    split_rule: str
    shards: tuple[Shard, ...]
    skipped_examples: tuple[str, ...]
    largest_skipped: tuple[SkippedFile, ...] = ()
    garbled_example: str = ""
    asked_fraction: float = 0.0
    left_out: tuple[LeftOut, ...] = ()
    hints: tuple[str, ...] = ()

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
