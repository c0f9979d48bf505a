import codecs
import gzip
import hashlib
import json
import logging
import os
import re
import sysconfig
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from tasks.data.readers import LONGEST_PIECE, Span, read_spans
from tasks.data.sources import SkippedDocuments, find_sources
from tests.support.text_cases import json_lines
from tests.support.tiny_corpus import all_documents, assert_read, assert_refused, decoded, prepare, write_files
from training.config.data import DataConfig
from training.facts.cures import Cure
from training.shards.format import SPLITS
from training.shards.stream import TokenStream

# Sources


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    folder, shards = prepare(tmp_path, "stdlib", kind="bpe", tokenizer={"vocab_size": 2048, "sample_mib": 1})
    names = [source.name for source in shards.sources]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not any(
        part in {"test", "tests", "idle_test", "site-packages"} for name in names for part in name.split("/")
    )
    assert shards.documents("train") > 4 * shards.documents("validation") > 0
    assert shards.skipped == 0
    assert shards.split_rule.startswith("documents")
    text = Path(sysconfig.get_path("stdlib"), names[0]).read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    starts = [tokenizer.decode(TokenStream(folder, split).read(0, 200).tolist()) for split in SPLITS]
    assert any(text.startswith(start[:150]) for start in starts)


def test_every_format_in_a_folder_is_read(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        ".hidden/no.txt": "hidden",
        "photo.png": b"\x89PNG\xff",
        "a.md": "from markdown",
        "deep/b.py": b"\xef\xbb\xbffrom = 'python'\r\n",
        "deep/er/c.txt.gz": gzip.compress(b"from gzip"),
        "e.csv": 'id,text\n1,"from, ""csv"""\n2,"two\nlines"\n3,NA\n',
        "f.tsv": "text\tid\nfrom tsv\t1\n",
        "empty.txt": "",
    }
    root = write_files(tmp_path / "corpus", files)
    with pa.CompressedOutputStream(str(root / "d.jsonl.zst"), "zstd") as file:
        file.write(b'{"text": "from zstd"}\n\n{"text": "from zstd, 2"}\n')
    pq.write_table(pa.table({"text": ["from parquet", "and row 2"], "id": [1, 2]}), root / "g[1].parquet")
    expected = ["from markdown", "from = 'python'\r\n", "from gzip", "from zstd", "from zstd, 2", 'from, "csv"']
    expected += ["two\nlines", "NA", "from tsv", "from parquet", "and row 2"]
    shards = assert_read(expected, tmp_path, root, validation_fraction=0.5, split="documents")
    assert [source.name for source in shards.sources][:3] == ["a.md", "d.jsonl.zst", "deep/b.py"]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("file", ["a\nb\n\n \n\nc\nd\n\ne"]), ("line", ["a", "b", "c", "d", "e"]), ("paragraph", ["a\nb", "c\nd", "e"])],
)
def test_the_unit_of_plain_text(tmp_path: Path, unit: str, expected: list[str]) -> None:
    source = tmp_path / "a.unknown"  # a file that is named is read as text whatever its suffix
    source.write_text("a\nb\n\n \n\nc\nd\n\ne")
    folder, _ = prepare(tmp_path, source, text_unit=unit, split="tail", validation_fraction=0.3)
    documents = decoded(folder)
    assert "".join(documents["train"] + documents["validation"]) == "".join(expected)


LINES = [f"line\n{i}" for i in range(40)]


@pytest.mark.parametrize(
    "rows", [[{"text": text, "id": [1, 1.5, 10**25]} for text in LINES], LINES], ids=["objects", "texts"]
)
@pytest.mark.parametrize("start", [b"", codecs.BOM_UTF8, b"\n  "])
def test_a_json_file_that_is_one_array(tmp_path: Path, rows: list[Any], start: bytes) -> None:
    source = tmp_path / "a.json"
    source.write_bytes(start + json.dumps(rows, indent=2).encode())
    assert_read(LINES, tmp_path, source)


def test_a_json_array_larger_than_memory_allows_is_streamed(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    text = "some words of a long line. " * 4000
    with source.open("w") as file:
        file.write("[" + ",".join(json.dumps({"text": f"{number} {text}"}) for number in range(600)) + "]")
    size = source.stat().st_size
    data = DataConfig(path=str(source))
    skipped = SkippedDocuments("stop")
    spans = [Span(number, source) for number, source in enumerate(find_sources(data, skipped))]
    next(read_spans(spans, data, skipped))  # imports
    tracemalloc.start()
    read = sum(len(piece.text) for piece in read_spans(spans, data, skipped))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 60e6
    assert read > 0.95 * size
    assert peak < size / 10


def test_bytes_that_do_not_fit_the_encoding_are_refused_and_the_encoding_is_named(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes("fine, then 山".encode("gb18030") + b"\xff\xff and more")
    assert_refused(r"a\.txt:1: invalid UTF-8 .*data\.encoding", tmp_path, source)
    named = r"a\.txt: cannot be read \(not gb18030 between bytes 0 and 24\)"
    assert_refused(named, tmp_path, source, encoding="gb18030")


# Repeated text


def test_documents_that_are_there_already_are_left_out_and_counted(tmp_path: Path) -> None:
    texts = [f"number {i}: " + "some words " * (10 if i else LONGEST_PIECE // 10) for i in range(24)]
    files: dict[str, str | bytes] = {
        "a.txt": texts[0],
        "b.txt.gz": gzip.compress(codecs.BOM_UTF8 + texts[0].encode()),
        "c.jsonl": json_lines([*texts, *texts[5:8]]),
        **dict.fromkeys(("empty.txt", "also empty.txt"), ""),
    }
    root = write_files(tmp_path / "corpus", files)
    options: dict[str, Any] = {"kind": "bpe", "tokenizer": {"vocab_size": 300}}
    whole, all_of_it = prepare(tmp_path, root, **options)
    shards = assert_read(texts, tmp_path, root, deduplicate="exact", **options)
    assert (shards.repeated, all_of_it.repeated) == (5, 0)
    assert len(all_documents(whole)) == 29


# Bad input


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nfine\nb\xffd\n", r"a\.txt:3: invalid UTF-8 \(byte 0xff\); .*data\.on_error=skip"),
        ("a.txt.gz", b"\x1f\x8b\x08 not gzip", r"a\.txt\.gz: cannot be read \("),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-9], r"a\.txt\.gz: cannot be read \(Truncated"),
        ("a.jsonl", b'{"text": "ok"}\n\n{"text": "b\xff"}\n', r"a\.jsonl:3: invalid UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: invalid UTF-8 \(U\+D800\)"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', r"a\.jsonl:2: not valid JSON \(.*one object per line"),
        (
            "a.json",
            b'{"text": "ok"},\n',
            r"a\.json:1: not valid JSON \(.*one object per line, one array",
        ),
        ("a.json", b'[{"text": "ok"}, 7]', r"a\.json:item 2: holds a number \(7\), not an object with the key 'text'"),
        ("a.json", b'[{"text": "ok"}, {"id": 7}]', r"a\.json:item 2: has no key 'text' but 'id'"),
        (
            "a.json",
            b'[{"text": "ok"}, {"text"',
            r"stopped after 1 documents, .*item 1 \(not valid JSON: .*never used in part",
        ),
        ("a.json", b'[{"text": "b\xff"}]', r"a\.json:item 1: invalid UTF-8 \(byte 0xff\)"),
        ("a.json", b'[{"text": "b\\ud800"}]', r"a\.json:item 1: invalid UTF-8 \(U\+D800\)"),
        ("a.json", b'[{"text": "ok"} {"text": "ok"}]', r"a\.json: cannot be read \(not valid JSON: line 1: '\{' after"),
        ("a.json", b'[{"text": "ok"}]\n[]', r"stopped after 1 documents, .* \(not valid JSON: '\[\]' after the array"),
        ("a.json", b"[]", r"holds no text"),
        ("a.jsonl", b'{"text": "ok"}\n[1]\n', r"a\.jsonl:2: holds a list of integers \(it is tokenized already"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"a\.jsonl:1: has no key 'text' but 'body', 'id'; set data\.column"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl:1: the document is a number \(7\), not text"),
        ("a.jsonl", b'{"text": null}\n', r"a\.jsonl:1: the document is null, not text"),
        ("a.jsonl", b'{"text": ["x"]}\n', r"a\.jsonl:1: the document is a list, not text"),
        ("a.csv", b"id,body\n1,x\n", r"a\.csv:1: has no column 'text' but 'id', 'body'; set data\.column"),
        ("a.csv", b'id,text\n1,"x\ny"\n2,a,b\n', r"a\.csv:4: broken row \(3 fields, the header has 2\)"),
        ("a.csv", b"id,text\n1,x\n2\n", r"a\.csv:3: broken row \(1 fields, the header has 2\)"),
        ("a.csv", b'id,text\n1,x\n2,"y\n', r"a\.csv:3: broken row \(unexpected end of data\)"),
        ("a.csv", b"id,text\n1,x\n2,b\xff\n", r"a\.csv:3: invalid UTF-8"),
        ("a.parquet", b"PAR1", r"a\.parquet: cannot be read \(not a whole parquet file"),
        ("a.txt", b"", r"holds no text"),
        ("a.jsonl", b'{"text": ""}\n', r"holds no text"),
    ],
)
def test_bad_input_is_named_with_its_line_and_the_cure(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(message, tmp_path, tmp_path / name)


def test_bad_parquet_rows_are_named(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"b\xffd", None], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], 1)
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": text, "id": [1, 2, 3]}), source)
    assert_refused(r"a\.parquet:row 2: invalid UTF-8", tmp_path, source)
    assert_refused(r"a\.parquet:row 1: the document is a number", tmp_path, source, column="id")
    assert_refused(r"a\.parquet: has no column 'body' but 'text', 'id'", tmp_path, source, column="body")
    _, shards = prepare(tmp_path, source, on_error="skip", split="tail", validation_fraction=0.5)
    assert shards.skipped == 2
    assert shards.skipped_examples[1] == "a.parquet:row 3: the document is null, not text"


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(r"data\.path is empty: set data\.path=FILE_OR_FOLDER", tmp_path, "")
    assert_refused(r"data\.path=.*nowhere does not exist", tmp_path, tmp_path / "nowhere")
    assert_refused(r"neither a file nor a folder", tmp_path, "/dev/null")
    pictures = write_files(tmp_path / "pictures", {"a.png": ""})
    assert_refused(r"holds no text, .* only \.png \(1\)", tmp_path, pictures)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.symlink_to(path.with_name("nowhere")), r"cannot be read \(No such file or directory\)"),
        (os.mkfifo, "neither a file nor a folder"),
        pytest.param(
            lambda path: (path.write_text("text"), path.chmod(0)),
            r"cannot be read \(Permission denied\)",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything"),
        ),
    ],
    ids=["gone", "pipe", "forbidden"],
)
def test_a_file_that_cannot_be_opened_is_named_or_skipped(tmp_path: Path, make: Any, why: str) -> None:
    root = write_files(tmp_path / "corpus", {"a.txt": "text " * 20})
    make(root / "odd.txt")
    assert_refused(rf"odd\.txt: {why}", tmp_path, root)
    _, shards = prepare(tmp_path, root, on_error="skip")
    (example,) = shards.skipped_examples
    assert re.match(rf"odd\.txt: {why}", example)


def write_broken_off(path: Path) -> None:
    """The first half of a gzip file of 20,000 numbered paragraphs of one line."""
    lines = (f"{i} {hashlib.sha256(str(i).encode()).hexdigest()}\n\n" for i in range(20_000))
    packed = gzip.compress("".join(lines).encode())
    path.write_bytes(packed[: len(packed) // 2])


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_a_source_that_breaks_off_is_never_taken_for_a_whole_one(tmp_path: Path, on_error: str, unit: str) -> None:
    write_broken_off(tmp_path / "b.txt.gz")
    reached = r"reading stopped after \d{1,2},\d{3} documents, the last from b\.txt\.gz:\d{4,5} \(Truncated"
    assert_refused(rf"b\.txt\.gz: {reached}", tmp_path, tmp_path / "b.txt.gz", on_error=on_error, text_unit=unit)
    assert not list((tmp_path / "tokens").glob("*/manifest.json"))


def test_a_file_that_is_one_document_is_skipped_whole_when_it_breaks_off(tmp_path: Path) -> None:
    root = write_files(tmp_path / "corpus", {"a.txt": "whole " * 20})
    write_broken_off(root / "b.txt.gz")
    folder, shards = prepare(tmp_path, root, on_error="skip", text_unit="file")
    assert "".join(all_documents(folder)) == "whole " * 20
    assert shards.skipped_examples == ("b.txt.gz: cannot be read (Truncated compressed stream)",)


def test_a_parquet_file_broken_in_the_middle_is_not_half_read(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    texts = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(5000)]
    pq.write_table(pa.table({"text": texts}), source, row_group_size=1000, use_dictionary=False)
    content = bytearray(source.read_bytes())
    start = pq.read_metadata(source).row_group(3).column(0).data_page_offset
    content[start : start + 4000] = b"\xff" * 4000
    source.write_bytes(content)
    assert_refused(
        r"a\.parquet: reading stopped after [123],000 documents, .* a\.parquet:row",
        tmp_path,
        source,
        on_error="skip",
        split="tail",
    )


def test_skipped_documents_are_counted_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.dumps({"text": f"text {i}"}).encode() for i in range(60)]
    lines[3], lines[7], lines[9] = b"{", b'{"text": 5}', b'{"text": "\xff"}'
    lines[30:] = [b"{"] * 30
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING):
        folder, shards = prepare(tmp_path, source, on_error="skip", processes=2, validation_fraction=0.3)
    assert shards.skipped == 33
    first = [4, 8, 10, *range(31, 38)]
    assert [example.split(": ")[0] for example in shards.skipped_examples] == [f"a.jsonl:{line}" for line in first]
    assert "skipped 33 documents" in caplog.text
    kept = sorted(f"text {i}" for i in range(30) if i not in (3, 7, 9))
    assert sorted(all_documents(folder)) == kept


def test_a_bad_line_spoils_its_file_or_paragraph_only(tmp_path: Path) -> None:
    root = write_files(tmp_path / "corpus", {"a.txt": "alpha", "b.txt": b"beta\n\nbad \xff\ngamma\n\ndelta"})
    for unit, expected in [("file", "alpha"), ("paragraph", "alphabetadelta"), ("line", "alphabetagammadelta")]:
        options: dict[str, Any] = {"text_unit": unit, "on_error": "skip", "split": "tail", "validation_fraction": 0.5}
        folder, shards = prepare(tmp_path, root, **options)
        assert "".join(all_documents(folder)) == expected
        assert shards.skipped_examples == (f"b.txt:3: invalid UTF-8 (byte 0xff); {Cure.OTHER_ENCODING}",)
