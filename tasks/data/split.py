"""Holds text out for validation: whole documents by a hash of their place, or the tail of the corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tasks.data.readers import Piece
from training.config.data import DataConfig
from training.facts.cures import Cure
from training.shards.format import Split

ENOUGH_DOCUMENTS = 20


@dataclass(frozen=True)
class SplitRule:
    """The rule by which a corpus is split, as its manifest records it. `why`: the reason for the rule.

    `border`: for tail, how many characters of the corpus are train; for given, how many of its sources are.
    """

    kind: Literal["documents", "tail", "given"]
    validation_fraction: float
    border: int
    why: str


class Passage(NamedTuple):
    """A piece of text in one split. `ends`: its document ends here, in this split. `whole`: it gets an end token.

    `begins`: its document begins here. `before`, `after`: the characters of the document around it, if it is a piece.
    """

    split: Split
    text: str
    ends: bool
    whole: bool
    source: int = 0
    begins: bool = True
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class TextCounts:
    """The amount of text in a corpus. `splits`: the splits that a split by documents would fill."""

    characters: int
    documents: int
    splits: frozenset[Split]


def choose_rule(data: DataConfig, first: Iterable[Piece], count: Callable[[], TextCounts]) -> SplitRule:
    """Choose the rule by the `first` pieces of the corpus, about 20 documents; if they are too few, `count` reads all.

    Raises ValueError if there is no text, or a split would be empty.
    """
    if data.split == "all" and any(True for _ in first):
        return SplitRule("tail", 1.0, 0, "all: everything is validation")
    if data.split in ("documents", "auto"):
        documents, seen = 0, set[Split]()
        for piece in first:
            if piece.last:
                documents += 1
                seen.add(split_of(piece.name, data.validation_fraction))
            if rule := _by_documents(data, documents, seen):
                return rule
    counts = count()
    characters, documents, fraction = counts.characters, counts.documents, data.validation_fraction
    if characters == 0:
        raise no_text(data, f"data.path={data.path}")
    if data.split == "all":
        return SplitRule("tail", 1.0, 0, "all: everything is validation")
    if rule := _by_documents(data, documents, counts.splits):
        return rule
    if data.split == "documents":
        (split,) = counts.splits
        raise ValueError(
            f"data.path={data.path}: of {documents} documents all fall into {split}, none into the other split; "
            f"change data.validation_fraction ({fraction:g}), or {Cure.TAIL} to cut by characters"
        )
    border = int(characters * (1 - fraction))
    if border in (0, characters):
        raise ValueError(
            f"data.path={data.path}: {characters} characters leave nothing to split with "
            f"data.validation_fraction={fraction:g}; give a longer corpus"
        )
    few = f"{documents} of {ENOUGH_DOCUMENTS} documents"
    cause = few if documents < ENOUGH_DOCUMENTS else f"all {documents} documents would be {min(counts.splits)}"
    reason = f" (auto: {cause})" if data.split == "auto" else ""
    return SplitRule("tail", fraction, border, f"tail: the first {border} of {characters} characters are train{reason}")


def no_text(data: DataConfig, what: str) -> ValueError:
    """Return the error for a corpus, or a part of one, whose documents are all left out."""
    why, cure = (f", or data.where={data.where} is false", " or condition") if data.where else ("", "")
    return ValueError(f"{what} holds no text: all documents are empty or skipped{why}; give another corpus{cure}")


def _by_documents(data: DataConfig, documents: int, seen: Collection[Split]) -> SplitRule | None:
    """Return the rule for whole documents, if this number of documents allows it."""
    enough = data.split == "documents" or (data.split == "auto" and documents >= ENOUGH_DOCUMENTS)
    if not enough or len(seen) < 2:
        return None
    fraction, auto = data.validation_fraction, f" (auto: at least {ENOUGH_DOCUMENTS} documents)"
    why = f"documents: {fraction:g} of them are validation, by a hash of their place"
    return SplitRule("documents", fraction, 0, why + (auto if data.split == "auto" else ""))


def split_of(name: str, validation_fraction: float) -> Split:
    """Return a document's split, by its place alone: adding or removing documents does not change others' splits."""
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
    return "validation" if draw < validation_fraction else "train"


def split_pieces(pieces: Iterable[Piece], rule: SplitRule, *, train_characters: int | None = None) -> Iterator[Passage]:
    """Assign pieces to splits. `train_characters`: for tail, how many characters from here on are train; None: all."""
    if rule.kind == "documents":
        for piece in pieces:
            yield _passage(piece, split_of(piece.name, rule.validation_fraction))
        return
    if rule.kind == "given":
        for piece in pieces:
            yield _passage(piece, "train" if piece.source < rule.border else "validation")
        return
    left = rule.border if train_characters is None else train_characters  # characters that still belong to train
    for piece in pieces:
        head, tail = piece.text[:left], piece.text[left:]
        left -= len(head)
        if head and tail:
            yield _passage(piece, "train")._replace(text=head, ends=True, whole=False, after="")
            yield _passage(piece, "validation")._replace(text=tail, begins=False, before="")
        elif head:
            yield _passage(piece, "train")._replace(ends=piece.last or left == 0)
        else:
            yield _passage(piece, "validation")


def _passage(piece: Piece, split: Split) -> Passage:
    begins = not piece.before
    return Passage(split, piece.text, piece.last, piece.last, piece.source, begins, piece.before, piece.after)
