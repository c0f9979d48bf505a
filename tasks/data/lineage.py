"""Finds the file and line that a document of the training split was read from, by reading its chunk of text again.

Shards keep no places. A shard's name has the number of its chunk, and chunks follow from the files' sizes alone, so
only the chunks of the wanted documents are read. A document is known again by its text, without white space.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tasks.data.chunks import cut_chunks
from tasks.data.readers import read_spans
from tasks.data.sources import SkippedDocuments, find_sources
from training.config.data import SHARDS, DataConfig
from training.records.token_shards import Shard, TokenShards

KEY = 32  # characters that documents are looked up by


def places_of(data: DataConfig, manifest: TokenShards, documents: Mapping[int, tuple[Shard, str]]) -> dict[int, str]:
    """Return FILE:LINE of each document, or why that is not known.

    `documents`: by number, the shard in which each begins, and its text as the tokenizer gives it back.
    """
    by_part = defaultdict[int | None, dict[int, tuple[Shard, str]]](dict)
    for number, (shard, text) in documents.items():
        by_part[shard.part][number] = (shard, text)
    found: dict[int, str] = {}
    for part, wanted in by_part.items():
        own = data if part is None else data.of_source(data.sources[part])
        prefix = "" if part is None else f"{manifest.parts[part]}/"
        found |= _places_in(own, prefix, manifest, wanted)
    return found


def _places_in(
    data: DataConfig, prefix: str, manifest: TokenShards, wanted: Mapping[int, tuple[Shard, str]]
) -> dict[int, str]:
    if data.path.startswith(SHARDS):
        return dict.fromkeys(wanted, f"not known: data.path = {data.path} holds tokens, not text")
    try:
        sources = find_sources(data, SkippedDocuments("skip"))
    except (ValueError, OSError) as error:
        return dict.fromkeys(wanted, f"not known: {error}")
    recorded = {(file.name, file.sha256) for file in manifest.sources}
    changed = [source.name for source in sources if (prefix + source.record.name, source.record.sha256) not in recorded]
    if changed:
        return dict.fromkeys(wanted, f"not known: {changed[0]} has changed since it was tokenized")
    chunks = cut_chunks(sources, data)
    by_chunk = defaultdict[int, dict[int, str]](dict)
    for number, (shard, text) in wanted.items():
        by_chunk[shard.chunk][number] = text
    found: dict[int, str] = {}
    for index, texts in by_chunk.items():
        files = ", ".join(dict.fromkeys(span.source.name for span in chunks[index].spans[:3]))
        found |= dict.fromkeys(texts, f"in one of {files}{' …' if len(chunks[index].spans) > 3 else ''}")
        pieces = read_spans(chunks[index].spans, data, SkippedDocuments("skip"))
        found |= recognized(((str(piece.place), piece.text) for piece in pieces if not piece.before), texts)
    return found


def recognized(candidates: Iterable[tuple[str, str]], texts: Mapping[int, str]) -> dict[int, str]:
    """Return the first place whose text is a document's, else the only one that begins it, or that it begins.

    The split may have cut a document. If several places begin alike, none is returned.
    """
    found = {
        number: "not known: the document has only white space" for number, text in texts.items() if not text.strip()
    }
    by_key = defaultdict[str, dict[int, str]](dict)
    for number, text in texts.items():
        if dense := "".join(text.split()):
            by_key[dense[:KEY]][number] = dense
    begun = defaultdict[int, list[str]](list)
    for place, text in candidates:
        if not (wanted := by_key.get("".join(text[: 8 * KEY].split())[:KEY])):
            continue
        dense = "".join(text.split())
        for number, own in list(wanted.items()):
            if dense == own:
                found[number] = place
                del wanted[number]
            elif dense.startswith(own) or own.startswith(dense):
                begun[number].append(place)
    return {number: places[0] for number, places in begun.items() if len(places) == 1} | found
