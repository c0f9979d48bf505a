"""What a file is, its bytes say, whatever its name; the same file twice counts once; parts unlike what was asked."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tasks.data.contents import recognize
from tests.support.text_cases import STORIES, json_lines, parquet_of, write_texts
from tests.support.tiny_corpus import (
    all_documents,
    assert_read,
    assert_refused,
    decoded,
    estimated,
    prepare,
    web_server,
    write_files,
)
from training.facts.cures import Cure

LINES = json_lines(STORIES).encode()
ARRAY = json.dumps([{"text": text} for text in STORIES], indent=1).encode()
LONG = json_lines([text * 200 for text in STORIES]).encode()  # the first line is longer than what is looked at


def arrow() -> bytes:
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, pa.schema({"text": "string"})) as stream:
        stream.write_table(pa.table({"text": STORIES}))
    return buffer.getvalue()


NAMES = ["corpus.jsonlines", "corpus.jl", "corpus.jsonl.1", "corpus", "corpus.gz", "wiki_00", "a.csv", "a.log", "x.dat"]
CONTENT: dict[str, Callable[[], bytes]] = {
    "lines": lambda: LINES,
    "mark and blank lines": lambda: b"\xef\xbb\xbf\n\n" + LINES.replace(b"\n", b"\r\n\r\n"),
    "gzip": lambda: gzip.compress(LINES),
    "bzip2": lambda: bz2.compress(LINES),
    "xz": lambda: lzma.compress(LINES),
    "array": lambda: ARRAY,
    "packed array": lambda: gzip.compress(ARRAY),
    "parquet": lambda: parquet_of(STORIES),
    "arrow": arrow,
}


@pytest.mark.parametrize(
    ("name", "content"),
    [*((name, "lines") for name in NAMES), *((name, each) for each in CONTENT for name in ("corpus", "a.txt"))],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_bytes_tell_what_a_file_is_whatever_its_name(tmp_path: Path, name: str, content: str, is_listed: bool) -> None:
    root = write_files(tmp_path / "corpus", {name: CONTENT[content]()})
    shards = assert_read(STORIES, tmp_path, root if is_listed else root / name, split="all")
    assert not shards.left_out


@pytest.mark.parametrize("name", ["corpus", "corpus.json", "corpus.jl"])
def test_a_first_line_that_is_longer_than_what_is_looked_at(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LONG)
    assert_read((text * 200 for text in STORIES), tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.py", b'{"a": 1}\nprint("code")\nprint("more code")\n'),
        ("a.jl", b"module A\nf(x) = 2x\nend\n"),
        ("a.ipynb", b'{\n "cells": [],\n "metadata": {}\n}\n'),
        ("a.md", b"[link](there) and {braces}\n"),
        ("a.toml", b'[package]\nname = "a"\n'),
        ("a.js", b'{"use strict"; let a = {"b": 1}}\n'),
        ("a.txt", b'{"text": "an example of JSON"}\nis what the first line was.\nThis is prose.\n'),
        ("a.tex", b"{\\bf bold} [1]\n"),
        ("a.txt", b"PAR1 is how parquet begins"),
        ("a.html", b"<html>{}</html>"),
    ],
)
def test_text_that_only_begins_like_json_stays_text(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    folder, _ = prepare(tmp_path, tmp_path / name, split="tail")
    assert "".join(all_documents(folder)).encode() == content


def zip_of(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "<xml/>")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("novel.docx", zip_of("word/document.xml", "word/styles.xml"), "an Office file (.docx)"),
        ("table.xlsx", zip_of("[Content_Types].xml", "xl/workbook.xml"), "an Office file"),
        ("letter.odt", zip_of("mimetype", "content.xml"), "an OpenDocument file"),
        ("book.epub", zip_of("mimetype", "META-INF/container.xml"), "an e-book"),
        ("old.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 99, "an old Office file"),
        ("letter.rtf", b"{\\rtf1 hello}", "RTF"),
    ],
)
def test_office_files_are_named_with_how_to_save_their_text(
    tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    root = write_texts(tmp_path / "corpus")
    (root / name).write_bytes(content)
    assert_refused(rf"^{name} is {re.escape(what)}.*{re.escape(Cure.SAVE_AS_TEXT)}$", tmp_path, root / name)
    (left_out,) = prepare(tmp_path, root)[1].left_out
    assert Cure.SAVE_AS_TEXT in left_out.why
    renamed = (root / name).rename(root / "renamed.txt")
    assert_refused(rf"^renamed\.txt is {re.escape(what)}", tmp_path, root)
    assert renamed.exists()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    with web_server(tmp_path / "web") as url:
        yield tmp_path / "web", url


@pytest.mark.parametrize(
    ("name", "query", "content"),
    [
        ("x.jsonl", "?download=true", LINES),
        ("x.gz", "", gzip.compress(LINES, mtime=0)),
        ("resolve", "?file=x.jsonl", LINES),
        ("x.bin", "?raw=1", parquet_of(STORIES)),
        ("x.json", "", ARRAY),
    ],
)
def test_bytes_tell_what_a_file_behind_a_url_is(
    web: tuple[Path, str], tmp_path: Path, name: str, query: str, content: bytes
) -> None:
    root, url = web
    (root / name).write_bytes(content)
    shards = assert_read(STORIES, tmp_path, f"{url}/{name}{query}", split="all")
    assert [source.name for source in shards.sources] == [name]


def test_settings_beside_a_corpus_are_left_out_and_said(tmp_path: Path) -> None:
    settings = {"name": "a", "contributors": [{"name": "b"}]}
    files = {
        "code/package.json": json.dumps(settings, indent=2),
        "code/dataset_infos.json": json.dumps({"default": {}}),
        "article.json": json.dumps({"id": 1, "text": "an article"}, indent=2),
    }
    root = write_files(write_texts(tmp_path / "corpus"), files)
    (left_out,) = assert_read([*STORIES, "an article"], tmp_path, root).left_out
    assert (left_out.files, left_out.refused) == (2, False)
    alone = write_files(tmp_path / "alone", {"package.json": '{\n "name": "a"\n}'})
    assert_refused(r"has no key 'text' but 'name'; set data\.column", tmp_path, alone)


# The same file twice


BEGINNING = LINES[: len(LINES) // 2 + 9].rpartition(b"\n")[0]
COPIES: dict[str, Callable[[Path], object]] = {
    "link": lambda root: os.symlink("notes.jsonl", root / "other.jsonl"),
    "hard link": lambda root: os.link(root / "notes.jsonl", root / "other.jsonl"),
    "copy": lambda root: write_files(root, {"deep/other.jsonl": LINES}),
    "gzip": lambda root: write_files(root, {"notes.jsonl.gz": gzip.compress(LINES)}),
    "xz elsewhere": lambda root: write_files(root, {"deep/notes.jsonl.xz": lzma.compress(LINES)}),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_file_that_is_there_twice_counts_once_and_that_is_said(tmp_path: Path, how: str) -> None:
    root = write_files(tmp_path / "corpus", {"notes.jsonl": LINES})
    COPIES[how](root)
    shards = assert_read(STORIES, tmp_path, root)
    (left_out,) = shards.left_out
    assert (left_out.kind, left_out.files) == ("copies", 1)
    planned = estimated({"path": str(root)})
    assert sum(shard.documents for shard in planned.shards.shards) == 40
    for lines in (shards.ledger_lines(), planned.lines()):
        assert "which counts once" in "\n".join(lines)


def test_two_compressions_of_a_file_count_once(tmp_path: Path) -> None:
    both = {"a.jsonl.gz": gzip.compress(BEGINNING), "a.jsonl.xz": lzma.compress(BEGINNING)}
    _, shards = prepare(tmp_path, write_files(tmp_path / "corpus", {"other.jsonl": LINES} | both))
    assert [source.name for source in shards.sources] == ["a.jsonl.gz", "other.jsonl"]


def test_a_log_that_grew_beside_its_compressed_beginning_is_read_whole(tmp_path: Path) -> None:
    files = {"a.jsonl": LONG, "a.jsonl.gz": gzip.compress(LONG.rpartition(b"\n{")[0])}
    assert len(prepare(tmp_path, write_files(tmp_path / "corpus", files))[1].sources) == 2


@pytest.mark.parametrize("links", [os.symlink, os.link])
def test_a_link_to_a_text_counts_once_and_equal_texts_are_said(tmp_path: Path, links: Any) -> None:
    root = write_texts(tmp_path / "corpus")
    links(root / "1.txt", root / "z.txt")
    (root / "copy.txt").write_text(STORIES[7])
    folder, shards = prepare(tmp_path, root)
    assert len(all_documents(folder)) == 41
    assert any("1 file has the text of another one, such as copy.txt that of 7.txt" in line for line in shards.hints)
    assert not prepare(tmp_path, root, deduplicate="exact")[1].hints


def test_what_is_held_out_is_not_trained_on_in_a_copy(tmp_path: Path) -> None:
    root = write_files(tmp_path / "corpus", {"a.jsonl": LINES.replace(b"fox", b"cat"), "b.jsonl": LINES})
    held = write_files(tmp_path, {"held.jsonl": LINES}) / "held.jsonl"
    folder, shards = prepare(tmp_path, root, validation_path=str(held))
    assert all("cat" in text for text in decoded(folder)["train"])
    assert (shards.documents("train"), shards.documents("validation")) == (40, 40)


# Parts unlike what was asked for


@pytest.mark.parametrize(
    ("lengths", "fraction", "is_unlike"),
    [([1] * 400, 0.1, False), ([1] * 25 + [2000], 0.1, True), ([2000] + [1] * 25, 0.1, True), ([1] * 60, 0.2, False)],
)
@pytest.mark.parametrize("kind", ["files", "rows"])
def test_parts_that_differ_threefold_are_warned_of_in_run_and_plan(
    tmp_path: Path, lengths: list[int], fraction: float, is_unlike: bool, kind: str
) -> None:
    texts = [f"{number}: {STORIES[number % 40]}" * length for number, length in enumerate(lengths)]
    files = {"a.jsonl": json_lines(texts)} if kind == "rows" else {f"{n:03}.txt": text for n, text in enumerate(texts)}
    root = write_files(tmp_path / "corpus", files)
    _, shards = prepare(tmp_path, root, validation_fraction=fraction)
    held_out = shards.text_bytes("validation") / sum(map(shards.text_bytes, ("train", "validation")))
    assert (not fraction / 3 <= held_out <= 3 * fraction) == is_unlike
    planned = estimated({"path": str(root), "validation_fraction": fraction})
    for lines in (shards.ledger_warnings(), list(planned.lines())):
        assert (
            any(f"{held_out:.2%} of the text is held out" in line and Cure.TAIL in line for line in lines) == is_unlike
        )
    _, cured = prepare(tmp_path, root, validation_fraction=fraction, split="tail")
    assert not cured.ledger_warnings()


def test_a_json_name_without_json_is_left_to_its_reader() -> None:
    assert recognize(b"broken\n", "a.jsonl").format == "json lines"
    assert recognize(b"broken\n", "a.csv.3").format == "csv"
    assert recognize(b"broken\n", "a").format == "text"
