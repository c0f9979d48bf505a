"""Counts the text of a corpus before it is tokenized: for a split by characters, and to find repeated documents.

Each chunk's documents are written as a table, FOLDER/00007.npy, which is also the mark that it is done.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tasks.data.chunks import Chunk, read_chunk
from tasks.data.engine import Engine, run_chunks
from tasks.data.sources import SkippedDocuments
from tasks.data.split import TextCounts, split_of
from training.config.data import DataConfig
from training.records.record import write_atomically
from training.shards.format import SPLITS

# One row for each document, or part of one that is cut between chunks. high and low: 16 bytes of its sha256, which are
# 0 unless data.deduplicate asks for them. ends: it has no other part.
DOCUMENTS = np.dtype([("high", "<u8"), ("low", "<u8"), ("characters", "<u8"), ("validation", "?"), ("ends", "?")])


@dataclass(frozen=True)
class SurveyWork:
    data: DataConfig
    folder: Path


def survey_chunk(work: SurveyWork, chunk: Chunk) -> None:
    """Write the table of a chunk's documents."""
    deduplicate = work.data.deduplicate != "off"
    digests: list[bytes] | None = [] if deduplicate else None
    rows: list[tuple[int, bool, bool]] = []
    characters = 0
    piece = None
    for piece in read_chunk(chunk, work.data, SkippedDocuments(work.data.on_error, digests=digests)):
        characters += len(piece.text)
        if piece.last:
            rows.append((characters, split_of(piece.name, work.data.validation_fraction) == "validation", True))
            characters = 0
    if characters and piece is not None:  # the document continues in the next chunk, and only that chunk counts it
        rows.append((characters, False, False))
    table = np.zeros(len(rows), DOCUMENTS)
    for number, name in enumerate(("characters", "validation", "ends")):
        table[name] = [row[number] for row in rows]
    if digests is not None:
        halves = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        table["high"], table["low"] = halves[:, 0], halves[:, 1]
    content = io.BytesIO()
    np.save(content, table)
    write_atomically(_table(work.folder, chunk.index), content.getvalue())


class Survey:
    """The tables of all chunks of a corpus, and which documents repeat an earlier one."""

    def __init__(
        self, tables: Sequence[np.ndarray], *, earlier: Sequence[Survey] = (), deduplicate: bool = False
    ) -> None:
        """`earlier`: surveys of other corpora, whose documents are left out of this one."""
        self.tables = list(tables)
        self.deduplicate = deduplicate
        self.earlier = tuple(earlier)

    @functools.cached_property
    def kept(self) -> list[np.ndarray]:
        """Return for each chunk which of its documents are kept."""
        if not self.deduplicate:
            return [np.ones(len(table), bool) for table in self.tables]
        before = [table for survey in self.earlier for table in survey.tables]
        halves = [np.concatenate([table[half] for table in (*before, *self.tables)]) for half in ("high", "low")]
        order = np.lexsort(halves)  # stable, so that the first of equal documents stays first
        same = np.ones(len(order), bool)
        same[:1] = False
        for half in halves:
            same[1:] &= half[order[1:]] == half[order[:-1]]
        kept = np.empty(len(order), bool)
        kept[order] = ~same
        own = kept[sum(map(len, before)) :]
        return np.split(own, np.cumsum([len(table) for table in self.tables])[:-1])

    def counts(self) -> TextCounts:
        rows = np.concatenate([table[kept] for table, kept in zip(self.tables, self.kept, strict=True)])
        whole = rows[rows["ends"]]
        present = {"validation": whole["validation"].any(), "train": (~whole["validation"]).any()}
        splits = frozenset(split for split in SPLITS if present[split])
        return TextCounts(int(rows["characters"].sum()), len(whole), splits)

    def applied_to(self, chunks: Sequence[Chunk], *, border: int) -> list[Chunk]:
        """Return the chunks without repeated documents. `border`: how many characters of the corpus are train."""
        made = []
        for chunk, table, kept in zip(chunks, self.tables, self.kept, strict=True):
            made.append(replace(chunk, repeated=tuple(np.flatnonzero(~kept).tolist()), train_characters=border))
            border = max(0, border - int(table["characters"][kept].sum()))
        return made


def survey_corpus(
    engine: Engine, data: DataConfig, chunks: Sequence[Chunk], folder: Path, *, earlier: Sequence[Survey] = ()
) -> Survey:
    """Survey the chunks that are not surveyed yet; write their tables to `folder`."""
    todo = [chunk for chunk in chunks if not _table(folder, chunk.index).exists()]
    for _ in run_chunks(engine, "count chunks", survey_chunk, SurveyWork(data, folder), todo):
        pass
    tables = [np.load(_table(folder, chunk.index)) for chunk in chunks]
    return Survey(tables, earlier=earlier, deduplicate=data.deduplicate != "off")


def _table(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.npy"
