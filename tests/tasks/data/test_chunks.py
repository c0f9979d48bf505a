"""Chunks are read apart from each other, and hold together exactly what a reader of the whole files finds."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.chunks import Chunk, cut_chunks
from tasks.data.corpus import prepare_corpus
from tasks.data.engine import LocalProcesses, Task, check_of_worker, run_chunks, tasks_of
from tasks.data.readers import Piece, Span, read_spans
from tasks.data.sources import SkippedDocuments, Source, find_sources
from tasks.data.survey import SurveyWork
from tests.support.tiny_corpus import all_documents, assert_refused, contents, decoded, prepare, write_json_lines
from tests.support.waiting import until
from training.config.data import DataConfig
from training.shards.format import SPLITS
from training.shards.stream import TokenStream

PARTS = [
    "word",
    "two words",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\r\n\r\n",
    "甲乙",
    "é",
    "👩‍🚀",
    "\u3000",
    "\t",
    "x" * 40,
]


def source_of(path: Path, unit: Any) -> tuple[Source, DataConfig]:
    data = DataConfig(path=str(path), text_unit=unit)
    (source,) = find_sources(data, SkippedDocuments("stop"))
    return source, data


def documents(spans: Sequence[Span], data: DataConfig) -> list[tuple[str, str]]:
    """Name and text of each document; the parts of one are put together."""
    pieces: Iterator[Piece] = read_spans(spans, data, SkippedDocuments("stop"))
    found, text = [], ""
    for piece in pieces:
        text += piece.text
        if piece.last:
            found.append((piece.name, text))
            text = ""
    assert not text, "the last part of a document is its last"
    return found


@pytest.mark.parametrize("name", ["line.txt", "paragraph.txt", "file.txt", "line.jsonl"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_any_cut_gives_the_documents_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mark: bytes
) -> None:
    monkeypatch.setattr("tasks.data.readers.plain_text.BORDER_BYTES", 40)
    unit, _, suffix = name.partition(".")
    for seed in range(200):
        draw = random.Random(seed)
        text = "".join(draw.choices(PARTS, k=draw.randrange(1, 10 + seed)))
        if suffix == "jsonl":
            text = "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in text.split("\n"))
        size = (tmp_path / name).write_bytes(mark + text.encode())
        source, data = source_of(tmp_path / name, unit)
        cuts = draw.choices(range(size), k=draw.choice((1, 5, 50, size)))
        if unit == "file":  # whose pieces are longer than what is looked at for their border
            cuts = [*range(draw.randrange(1, 45), size, 45)]
        borders = sorted({0, size, *cuts})
        spans = [Span(0, source, start, stop) for start, stop in itertools.pairwise(borders)]
        assert documents(spans, data) == documents([Span(0, source)], data), f"seed {seed}"


def test_each_format_is_cut_where_it_can_be_and_stays_whole_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    line = json.dumps({"text": "some words " * 20}) + "\n"
    lines = line * (3 * 2**19 // len(line))  # 1.5 MiB
    (root / "a.txt").write_text("some words\n" * 150_000)
    (root / "b.jsonl").write_text(lines)
    (root / "c.json").write_text(line + lines)
    (root / "d.json").write_text("[" + ",".join(lines.splitlines()) + "]")
    (root / "e.csv").write_text("text\n" + "some words\n" * 150_000)
    packed = random.Random(0).randbytes(5 * 2**18).hex()
    (root / "f.txt.gz").write_bytes(gzip.compress(packed.encode() * 2))
    texts = [random.Random(number).randbytes(500).hex() for number in range(1500)]
    pq.write_table(pa.table({"text": texts}), root / "g.parquet", row_group_size=200, use_dictionary=False)
    (root / "small.txt").write_text("small")
    data = DataConfig(path=str(root), text_unit="line", shard_mib=1)
    sources = find_sources(data, SkippedDocuments("stop"))
    chunks = cut_chunks(sources, data)
    spans = [span for chunk in chunks for span in chunk.spans]
    number = {source.name: sum(span.source == source for span in spans) for source in sources}
    assert {name for name, count in number.items() if count > 1} == {"a.txt", "b.jsonl", "c.json", "g.parquet"}
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    whole = [Span(index, source) for index, source in enumerate(sources)]
    assert documents(spans, data) == documents(whole, data)
    (root / "a.txt").write_bytes("einige Wörter\n".encode("latin-1") * 150_000)
    latin = DataConfig(path=str(root / "a.txt"), text_unit="line", shard_mib=1, encoding="latin-1")
    assert len(cut_chunks(find_sources(latin, SkippedDocuments("stop")), latin)) == 1, "another encoding"


def test_small_files_are_not_cut_and_a_chunk_is_full_at_shard_mib(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_bytes(b"%02d" % number * 50_000)
    data = DataConfig(path=str(tmp_path), shard_mib=1)
    chunks = cut_chunks(find_sources(data, SkippedDocuments("stop")), data)
    assert [len(chunk.spans) for chunk in chunks] == [11, 11, 11, 7]
    assert [chunk.num_bytes for chunk in chunks] == [1_100_000] * 3 + [700_000]


def big_text(path: Path) -> Path:
    """Some 3.4 MiB: short and long lines of many scripts, one of them longer than two chunks."""
    draw = random.Random(7)
    words = ["some", "words", "甲乙丙丁", "naïve", "👩‍🚀", "кириллица"]
    lines = [" ".join(draw.choices(words, k=draw.randrange(30))) for _ in range(10_000)]
    lines.insert(4000, "long " * 440_000)
    path.write_text("\n".join(lines), newline="\r\n" if path.stem == "crlf" else "\n")
    return path


@pytest.mark.parametrize("name", ["a.txt", "crlf.txt"])
def test_a_document_that_is_cut_between_chunks_has_the_same_tokens(tmp_path: Path, name: str) -> None:
    source = big_text(tmp_path / name)
    options: dict[str, Any] = {"kind": "bpe", "tokenizer": {"vocab_size": 400}, "processes": 1}
    folder, shards = prepare(tmp_path, source, shard_mib=1, **options)
    assert len(shards.shards) >= 4
    whole, expected = prepare(tmp_path, source, shard_mib=64, **options)
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == (
        whole / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    for split in SPLITS:
        mine, other = TokenStream(folder, split), TokenStream(whole, split)
        assert np.array_equal(mine.read(0, len(mine)), other.read(0, len(other)))
        assert np.array_equal(mine.document_bounds(), other.document_bounds())
    assert shards.split_rule == expected.split_rule


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_the_split_does_not_depend_on_the_size_of_chunks(tmp_path: Path, unit: str) -> None:
    source = big_text(tmp_path / "a.txt")
    texts = [decoded(prepare(tmp_path, source, text_unit=unit, shard_mib=mib)[0]) for mib in (1, 2, 64)]
    assert texts[0] == texts[1] == texts[2]


class Backwards:
    """Does the tasks from the last to the first, as workers of unlike speed might."""

    workers, tasks_per_worker = 100, 4

    def __init__(self) -> None:
        self.titles: list[str] = []

    def run(self, tasks: Sequence[Task]) -> Iterator[list[tuple[int, Any]]]:
        for task in reversed(tasks):
            self.titles.append(task.title)
            yield task.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"split": "tail"},
        {"deduplicate": "exact", "text_unit": "line"},
        {"deduplicate": "exact", "text_unit": "line", "split": "tail"},
        {"on_error": "skip", "text_unit": "line", "split": "documents"},
        {"split": "all", "text_unit": "paragraph"},
    ],
)
def test_the_order_in_which_chunks_are_done_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    big_text(root / "a.txt")
    big_text(root / "b.txt")
    with (root / "b.txt").open("ab") as file:
        file.write(b"\nbad \xff line" * 3 if "on_error" in settings else b"\nfine")
    config = {"path": str(root), "tokenizer": {"kind": "bytes"}, "shard_mib": 1, "processes": 1} | settings
    data = DataConfig.model_validate(config)
    folder, shards = prepare_corpus(data, tokens_home=tmp_path / "one")
    engine = Backwards()
    other, same = prepare_corpus(data, tokens_home=tmp_path / "two", engine=engine)
    assert contents(folder) == contents(other)
    assert shards == same
    assert len(engine.titles) >= 6
    assert not list(folder.glob("survey")), "what was only needed on the way is gone"


def test_documents_are_repeated_across_chunks_and_files(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    lines = [f"{number} " + "some words " * 100 for number in range(3000)]
    write_json_lines(root / "a.jsonl", lines)
    write_json_lines(root / "b.jsonl", [*lines[2900:], *(f"{line}!" for line in lines[:1000]), *lines[:50]])
    folder, shards = prepare(tmp_path, root, deduplicate="exact", shard_mib=1, processes=1)
    assert shards.repeated == 150
    assert len(shards.shards) >= 8
    assert sorted(all_documents(folder)) == sorted([*lines, *(f"{line}!" for line in lines[:1000])])


def test_the_tail_is_cut_at_the_exact_character_of_any_chunk(tmp_path: Path) -> None:
    source = big_text(tmp_path / "a.txt")
    text = source.read_text()
    for fraction in (0.05, 0.62):
        folder, _ = prepare(tmp_path, source, shard_mib=1, split="tail", validation_fraction=fraction, processes=1)
        border = int(len(text) * (1 - fraction))
        assert decoded(folder) == {"train": [text[:border]], "validation": [text[border:]]}


def test_a_fault_in_a_late_chunk_is_named_with_its_line(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{number} " + "some words " * 100}).encode() for number in range(3000)]
    lines[2500] = b"{"
    source.write_bytes(b"\n".join(lines))
    assert_refused(r"a\.jsonl:2501: not valid JSON", tmp_path, source, shard_mib=1, processes=1)
    lines[17] = b"7"
    source.write_bytes(b"\n".join(lines))
    _, shards = prepare(tmp_path, source, shard_mib=1, processes=1, on_error="skip")
    assert [example.split(": ")[0] for example in shards.skipped_examples] == ["a.jsonl:18", "a.jsonl:2501"]
    text = tmp_path / "b.txt"
    text.write_bytes(b"fine\n" * 500_000 + b"b\xffd\n" + b"fine\n" * 100)
    assert_refused(r"b\.txt:500001: invalid UTF-8 \(byte 0xff\)", tmp_path, text, shard_mib=1, processes=1)


def test_what_was_skipped_is_known_after_a_resume(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": f"{number} " + "some words " * 100}) for number in range(3000)]
    rows[5] = rows[2000] = "{"
    source.write_text("\n".join(rows))
    folder, shards = prepare(tmp_path, source, shard_mib=1, processes=1, on_error="skip")
    (folder / "manifest.json").unlink()
    (folder / "00001.done.json").unlink()
    times = {path: path.stat().st_mtime_ns for path in folder.glob("train/*.bin")}
    assert prepare(tmp_path, source, shard_mib=1, processes=1, on_error="skip") == (folder, shards)
    changed = {path.stem for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert changed == {"00001"}
    assert shards.skipped == 2


def test_parquet_is_cut_between_row_groups_and_its_rows_keep_their_numbers(tmp_path: Path) -> None:
    texts: list[str | None] = [random.Random(number).randbytes(2000).hex() for number in range(1500)]
    texts[1234] = None
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), source, row_group_size=100, use_dictionary=False)
    assert_refused(r"a\.parquet:row 1235: the document is null", tmp_path, source, shard_mib=1, processes=1)
    folder, shards = prepare(tmp_path, source, shard_mib=1, processes=1, on_error="skip")
    assert shards.skipped_examples == ("a.parquet:row 1235: the document is null, not text",)
    assert len([shard for shard in shards.shards if shard.split == "train"]) >= 4
    assert sorted(all_documents(folder)) == sorted(text for text in texts if text)


def test_a_file_that_cannot_be_cut_becomes_several_shards(tmp_path: Path) -> None:
    lines = [f"{number} " + "some words " * 100 for number in range(4500)]
    write_json_lines(tmp_path / "a.jsonl", lines)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    folder, shards = prepare(tmp_path, packed, shard_mib=1, processes=1)
    names = [shard.name for shard in shards.shards if shard.split == "train"]
    assert names[:2] == ["train/00000", "train/00000-0001"]
    assert len(names) >= 4
    assert max(shard.text_bytes for shard in shards.shards) < 2 * 2**20
    assert sorted(all_documents(folder)) == sorted(lines)
    whole = contents(folder)
    (folder / "train" / "00000-0003.bin").write_bytes(b"cut")
    assert prepare(tmp_path, packed, shard_mib=1, processes=1) == (folder, shards)
    assert contents(folder) == whole


def test_a_corpus_of_any_size_is_thousands_of_tasks() -> None:
    def chunks(number: int, mib: int) -> list[Chunk]:
        return [Chunk(index, (), mib * 2**20) for index in range(number)]

    def sizes(number: int, mib: int, workers: int) -> list[int]:
        return [len(task.chunks) for task in tasks_of("", print, None, chunks(number, mib), least=16 * workers)]

    assert sizes(0, 8, 2) == []
    assert sizes(5, 8, 16) == [1] * 5, "little text: all workers have some"
    assert (len(sizes(1000, 8, 2)), max(sizes(1000, 8, 2))) == (125, 8), "64 MiB each"
    assert len(sizes(1000, 8, 10)) == 160
    assert len(sizes(100_000, 1024, 1000)) == 4096, "100 TB"
    (first, *_) = tasks_of("tokenize chunks", print, None, chunks(1000, 8), least=32)
    assert first.title == "tokenize chunks 0-7"


def test_a_line_may_hold_a_cr(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"10%\r100%")
    source, data = source_of(tmp_path / "a.txt", "line")
    assert [text for _, text in documents([Span(0, source)], data)] == ["10%\r100%"]


def _variable(name: str, chunk: Chunk) -> str | None:
    return os.environ.get(name)


def test_workers_have_the_environment_of_their_pool_not_of_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two", None):
        if value:
            monkeypatch.setenv("SHARDLINE_TEST_ENVIRONMENT", value)
        else:
            monkeypatch.delenv("SHARDLINE_TEST_ENVIRONMENT")
        chunks = [Chunk(index, (), 1) for index in range(3)]
        found = run_chunks(LocalProcesses(2), "", _variable, "SHARDLINE_TEST_ENVIRONMENT", chunks)
        assert dict(found) == dict.fromkeys(range(3), value)


def _end_elsewhere(work: tuple[int, Path, str], chunk: Chunk) -> None:
    """In the process that hands out the work wait for another one, which raises an error or is killed."""
    parent, mark, how = work
    if os.getpid() == parent:
        until(mark.exists, "another process has begun")
        return
    mark.touch()
    if how == "raises":
        raise EOFError("the file ended in its middle")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [("raises", EOFError, "in its middle"), ("is killed", RuntimeError, "was killed, most often")],
)
def test_a_workers_own_error_is_not_taken_for_its_death(
    tmp_path: Path, how: str, error: type[Exception], says: str
) -> None:
    chunks = [Chunk(index, (), 1) for index in range(3)]
    with pytest.raises(error, match=says):
        dict(run_chunks(LocalProcesses(2), "", _end_elsewhere, (os.getpid(), tmp_path / "begun", how), chunks))


def test_a_worker_that_sees_other_files_says_which(tmp_path: Path) -> None:
    source, data = source_of(big_text(tmp_path / "a.txt"), "line")
    (tmp_path / "shards").mkdir()
    task = Task("", print, SurveyWork(data, tmp_path / "shards"), tuple(cut_chunks([source], data)))
    check = check_of_worker(task)
    check.run()
    source.path.write_bytes(source.path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"sees ([\d,]+) of [\d,]+ bytes in .*a\.txt: put the corpus into a folder that"
    ):
        check.run()
    with pytest.raises(ValueError, match=r"and had [\d,]+ when the corpus was listed: all workers must see the same"):
        documents([Span(0, source)], data)
    check.work.mark.unlink()
    with pytest.raises(
        ValueError, match=r"does not see .*shards.*set SHARDLINE_HOME to a folder that all machines share"
    ):
        check.run()
