"""Files whose first bytes say what they are, links, names, compression: all is read, or refused as what it is."""

import codecs
import gzip
import json
import lzma
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from tasks.data.contents import FORMATS
from tasks.data.decompression import COMPRESSIONS
from tests.support.repository import REPO
from tests.support.text_cases import (
    STORIES,
    json_lines,
    write_odd_name,
    write_tar,
    write_texts,
    write_zip,
)
from tests.support.tiny_corpus import all_documents, assert_read, assert_refused, decoded, prepare, write_files
from training.records.token_shards import TokenShards

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def numbers(kind: str, highest: int) -> bytes:
    return np.random.default_rng(0).integers(0, highest, 5000).astype(kind).tobytes()


# Archives


@pytest.mark.parametrize(
    ("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tar.xz", "w:xz"), ("a.txt.gz", "w:gz")]
)
@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_archive_is_refused_whatever_its_name(tmp_path: Path, name: str, mode: str, layout: int) -> None:
    archive = write_tar(tmp_path / name, mode, format=layout)
    assert_refused(rf"^{name} is a tar archive: unpack it into a folder", tmp_path, archive)


def test_an_archive_that_is_named_is_refused_without_a_cure_that_cannot_help(tmp_path: Path) -> None:
    unpack = "archive: unpack it into a folder, and give that$"
    assert_refused(f"is a zip {unpack}", tmp_path, write_zip(tmp_path / "stories.zip"))
    (tmp_path / "alone").mkdir()
    write_tar(tmp_path / "alone" / "a.tar", "w")
    found = r"holds no text.*only \.tar \(1\); a\.tar: it is a tar archive: unpack it into a folder"
    assert_refused(found, tmp_path, tmp_path / "alone")


# What is not text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", LFS.encode(), "is a git-lfs pointer.*git lfs pull"),
        ("a.parquet", LFS.encode(), "is a git-lfs pointer.*git lfs pull"),
        ("a.jsonl", LFS.encode(), "is a git-lfs pointer.*git lfs pull"),
        ("a.txt", b"/annex/objects/MD5E-s5--d41d8", "is a git-annex pointer.*git annex get"),
        ("a.txt.gz", gzip.compress(gzip.compress(b"text", mtime=0), mtime=0), "is compressed twice: decompress it"),
        (
            "a.parquet.gz",
            gzip.compress(b"PAR1" + b"\0" * 20, mtime=0),
            "is parquet inside another compression: decompress it",
        ),
        ("a.txt", b"%PDF-1.4\n%\xe2\xe3", "is a PDF: save its text with `pdftotext FILE`"),
        ("a.txt", b"%!PS-Adobe-3.0\n", "is PostScript: save its text with `ps2ascii"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0", "is an old Office file .*: save it as text with"),
        ("a.warc", b"WARC/1.0\r\n", "is a web archive"),
        ("a.txt", b"{\\rtf1\\ansi hello}", "is RTF: save it as text with"),
        ("a.txt", b"\x04\x22M\x18abc", "is lz4, or .Z of compress: decompress it"),
        ("a.avro", b"Obj\1abc", "is HDF5, Avro or a pickle: export its text"),
        ("train.bin", numbers("<u2", 300), "is an array of integers: it is tokenized already"),
        ("train.bin", numbers("<u2", 50_000), "is an array of integers: it is tokenized already"),
        ("train.bin", numbers("<u4", 50_000), "is an array of integers: it is tokenized already"),
        ("train.txt", numbers("<i8", 128_000), "is an array of integers: it is tokenized already"),
        ("a.txt", b"\x93NUMPY\1\0", "is a numpy array: it is tokenized already"),
        ("a.txt", b"MMIDIDX\0\0\1\0\0", "is an index of Megatron's tokens: it is tokenized already"),
        ("a.txt", b"\0" * 5000, "holds NUL bytes, so it is not text"),
        ("a.txt", b"the quick \0rown fox jumps\n" * 40, "holds NUL bytes, so it is not text"),
        ("a.txt", b"the quick b\0own fox jumps\n" * 40, "holds NUL bytes, so it is not text"),
        ("a.txt", "".join(STORIES).encode("utf-16-le"), "is utf-16-le: set data.encoding=utf-16-le"),
        ("a.txt", ("山中相送罷，日暮掩柴扉。\n" * 40).encode("utf-16-be"), "is utf-16-be: set data.encoding=utf-16-be"),
        ("a.txt", ("Привет, мир.\n" * 40).encode("utf-16-le"), "is utf-16-le: set data.encoding=utf-16-le"),
        ("a.txt", "".join(STORIES).encode("utf-32-le"), "is utf-32-le: set data.encoding=utf-32-le"),
        ("a.txt", ("山中相送罷，日暮掩柴扉。\n" * 40).encode("utf-32-be"), "is utf-32-be: set data.encoding=utf-32-be"),
        ("a.txt", codecs.BOM_UTF32_BE + "".join(STORIES).encode("utf-32-be"), "is utf-32: set data.encoding=utf-32"),
        ("a.csv", "id,text\n1,Zoë\n".encode("utf-16"), "is utf-16: set data.encoding=utf-16"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-32"), "is utf-32: set data.encoding=utf-32"),
    ],
)
def test_what_is_not_text_is_refused_as_what_it_is(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(rf"^{name} {message}", tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("pointer.txt", LFS, r"^pointer\.txt is a git-lfs pointer.*; or set data\.on_error=skip"),
        (
            "more.zip",
            b"PK\x03\x04" + b"\0" * 99,
            r"^more\.zip: it is a zip archive: .* or leave out with 'data\.exclude",
        ),
    ],
)
def test_what_is_not_text_is_left_out_and_said_if_asked(tmp_path: Path, name: str, content: Any, why: str) -> None:
    root = write_files(write_texts(tmp_path / "corpus"), {name: content})
    assert_refused(why, tmp_path, root)
    shards = assert_read(STORIES, tmp_path, root, on_error="skip")
    assert any(name in line for line in shards.ledger_warnings())


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_nul_bytes_are_never_taken_in_silence(tmp_path: Path, unit: str) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"line\n\n" * 2000 + b"a\0b\n")
    assert_refused(r"a\.txt:4001: holds NUL bytes, so it is not text", tmp_path, source, text_unit=unit)
    table = tmp_path / "a.csv"
    table.write_bytes(b"text\n" + b"row\n" * 3000 + b"a\0b\n")
    assert_refused(r"a\.csv:3002: holds NUL bytes", tmp_path, table)


def test_nul_characters_that_json_writes_are_kept_and_said(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json_lines([*STORIES, "a\0b"]))
    folder, shards = prepare(tmp_path, source)
    assert "a\0b" in all_documents(folder)
    assert shards.nul_characters == 1
    assert any("1 NUL character" in line for line in shards.ledger_warnings())


def test_text_that_only_looks_odd_is_read(tmp_path: Path) -> None:
    texts = {
        "a.txt": "BZh is how a bzip2 file begins",
        "b.txt": "PK is no archive by itself",
        "c.txt": "version https://example.org/spec",
        "d.txt": "%",
        "e.txt": "ustar" * 60,
        "f.md": "\x1b[31mred\x1b[0m\x7f",
    }
    root = write_files(tmp_path / "corpus", texts | {"~$a.txt": b"\5Zoe\0\0"})  # an office's lock file is hidden
    assert_read(texts.values(), tmp_path, root, split="documents", validation_fraction=0.5)


@pytest.mark.parametrize(("name", "options"), [("a.txt", {"text_unit": "line"}), ("a.csv", {}), ("a.jsonl", {})])
def test_lines_that_end_with_cr_alone_are_not_taken_for_one(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    (tmp_path / name).write_bytes(b'{"text": "one"}\r' * 3)
    assert_refused(rf"^{name}: .*its first 48 bytes have 3 CR and no LF", tmp_path, tmp_path / name, **options)


def test_the_page_lists_what_is_read_as_rows() -> None:
    table = (REPO / "docs" / "data.md").read_text().partition("\n\nRows need")[0]
    rows = {suffix for suffix, kind in FORMATS.items() if kind != "text"}
    assert {*re.findall(r"`(\.\w+)`", table)} == rows | COMPRESSIONS.keys()


# Compression


def long_window(content: bytes) -> bytes:
    """As `zstd --long=30` compresses what it reads from a pipe."""
    compressor = zstd.ZstdCompressor(options={int(zstd.CompressionParameter.window_log): 30})
    return compressor.compress(content) + compressor.flush()


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("a.jsonl.gz", lambda raw: gzip.compress(raw) + b"\0" * 512),
        ("a.jsonl.gz", lambda raw: gzip.compress(raw[:99]) + gzip.compress(raw[99:])),
        ("a.jsonl.zst", long_window),
        ("a.jsonl.zst", lambda raw: zstd.compress(raw[:99]) + zstd.compress(raw[99:])),
        ("a.jsonl.xz", lzma.compress),
        ("a.jsonl.xz", lambda raw: lzma.compress(raw[:99]) + lzma.compress(raw[99:])),
    ],
    ids=["padded gzip", "two gzip members", "long zstd window", "two zstd frames", "xz", "two xz streams"],
)
def test_compressed_text_is_read_to_its_end(tmp_path: Path, name: str, packed: Any) -> None:
    (tmp_path / name).write_bytes(packed(json_lines(STORIES).encode()))
    assert_read(STORIES, tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("a.txt.xz", lzma.compress),
        ("a.txt.zst", long_window),
        ("a.txt.gz", lambda raw: gzip.compress(raw)[:-12] + b"\0" * 32),
    ],
)
def test_a_broken_compressed_file_is_named(tmp_path: Path, name: str, packed: Any) -> None:
    content = packed("".join(STORIES).encode())
    (tmp_path / name).write_bytes(content if name.endswith("gz") else content[: len(content) // 2])
    assert_refused(rf"{name}: cannot be read \(", tmp_path, tmp_path / name)


# Folders


def test_links_to_folders_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    elsewhere = write_texts(tmp_path / "elsewhere" / "books", start=100)
    for path in elsewhere.iterdir():
        path.write_text(path.read_text().replace("fox", "cat"))
    root = write_texts(tmp_path / "linked")
    (root / "books").symlink_to(elsewhere)
    (elsewhere / "again").symlink_to(elsewhere)
    (root / "up").symlink_to(root)
    (root / "further up").symlink_to(tmp_path)
    (root / "twice").symlink_to(elsewhere)
    _, shards = prepare(tmp_path, root)
    names = [source.name for source in shards.sources]
    assert len(names) == len(set(names)) == 80
    assert "books/100.txt" in names
    (root / "books").unlink()
    assert len(prepare(tmp_path, root)[1].sources) == 80  # by way of the other link


def test_a_link_to_a_folder_inside_the_corpus_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    write_texts(root / "real")
    before = prepare(tmp_path, root)
    (root / "alias").symlink_to(root / "real")
    assert prepare(tmp_path, root) == before


def test_a_name_that_is_not_utf8_is_read_and_recorded(tmp_path: Path) -> None:
    root = write_odd_name(tmp_path / "latin")
    with open(os.fsencode(root) + b"/\xff.jsonl", "wb") as file:
        file.write(b'{"text": "ok"}\nbroken\n')
    assert_refused(r"\\xff\.jsonl:2: not valid JSON", tmp_path, root)
    folder, _ = prepare(tmp_path, root, on_error="skip", processes=2)
    shards = TokenShards.read(folder / "manifest.json")
    assert "caf\\xe9.txt" in [source.name for source in shards.sources]
    assert "A name from an old archive.\n" in all_documents(folder)
    assert shards.skipped_examples[0].startswith("\\xff.jsonl:2: not valid JSON")


def test_what_is_left_out_is_said_with_the_cure(tmp_path: Path) -> None:
    root = write_texts(tmp_path / "corpus")
    (root / "more.dat").write_text("more text " * 50)
    (root / "part-0000").write_text("text without a suffix")
    (root / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    _, shards = prepare(tmp_path, root)
    assert {(each.kind, each.files, each.example) for each in shards.left_out} == {
        (".dat", 1, "more.dat"),
        ("no suffix", 1, "part-0000"),
        (".png", 1, "photo.png"),
    }
    lines = "\n".join(shards.ledger_lines())
    assert """'data.include=["*","*.dat"]' reads it as text""" in lines
    assert "photo.png): it is a picture" in lines
    folder, shards = prepare(tmp_path, root, include=["*", "*.dat", "part-0000"])  # the cures
    assert {"more text " * 50, "text without a suffix"} <= set(all_documents(folder))
    assert [each.kind for each in shards.left_out] == [".png"]


def test_files_are_chosen_by_their_names(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    write_texts(root / "en")
    write_texts(root / "de", start=100)
    (root / "list.jsonl").write_text(json_lines(["a list"]))
    names = [source.name for source in prepare(tmp_path, root, include=["en/*"], exclude=["*/1*.txt"])[1].sources]
    assert len(names) == 29
    assert all(name.startswith("en/") for name in names)
    assert_refused(
        r"data\.include=fr/\* and data\.exclude=\(none\) leave none of the 81 files", tmp_path, root, include=["fr/*"]
    )


def test_the_address_depends_on_the_files_not_on_how_they_were_chosen(tmp_path: Path) -> None:
    root = write_texts(tmp_path / "corpus")
    first, _ = prepare(tmp_path, root)
    (root / "photo.png").write_bytes(b"\x89PNG\r\n")
    second, shards = prepare(tmp_path, root)
    third, _ = prepare(tmp_path, root, exclude=["*.png"])
    assert first == second == third
    assert [each.kind for each in shards.left_out] == [".png"]  # also where the tokens are there already


# Ready-made splits


def write_split(root: Path, *names: str) -> Path:
    """Files of 40 stories each, in which the folder or name of its part stands for the fox."""
    return write_files(root, {name: json_lines([text.replace("fox", name) for text in STORIES]) for name in names})


def cure_of(tmp_path: Path, root: Path) -> dict[str, Any]:
    """The fields by which the warning of a ready-made split holds it out, or leaves it out."""
    (hint,) = (line for line in prepare(tmp_path, root)[1].ledger_warnings() if "split already" in line)
    return {
        "validation_path": hint.partition("data.validation_path=")[2].partition(" ")[0],
        "exclude": json.loads(hint.partition("data.exclude=")[2].partition("'")[0]),
    }


def test_a_part_elsewhere_is_held_out_of_what_remains(tmp_path: Path) -> None:
    root = write_split(tmp_path / "corpus", "train.jsonl", "validation.jsonl")
    elsewhere = (root / "validation.jsonl").rename(tmp_path / "held_out.jsonl")
    _, shards = prepare(tmp_path, root, validation_path=str(elsewhere), deduplicate="exact")
    assert shards.split_rule.startswith("given: 1 files of data.validation_path")
    assert (shards.documents("train"), shards.documents("validation")) == (40, 40)
    assert [source.name for source in shards.sources] == ["train.jsonl", "held_out.jsonl"]


def test_folders_of_save_to_disk_are_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict, disable_progress_bars, load_from_disk

    disable_progress_bars()
    parts = {"train": Dataset.from_dict({"text": STORIES}), "test": Dataset.from_dict({"text": STORIES[:5]})}
    DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    load_from_disk(str(tmp_path / "saved" / "train")).map(lambda row: {"text": row["text"].upper()})
    assert list((tmp_path / "saved" / "train").glob("cache-*.arrow")), "what datasets caches there is not read"
    assert_read(STORIES, tmp_path, tmp_path / "saved" / "train")
    _, shards = prepare(tmp_path, tmp_path / "saved", validation_path=str(tmp_path / "saved" / "test"))
    assert (shards.documents("train"), shards.documents("validation")) == (40, 5)
    table = pa.table({"meta": [{"text": text} for text in STORIES]})
    pyarrow.feather.write_feather(table, str(tmp_path / "a.arrow"))
    assert_read(STORIES, tmp_path, tmp_path / "a.arrow", column="meta.text")


def test_the_records_of_datasets_are_left_out_only_beside_its_files(tmp_path: Path) -> None:
    root = write_texts(tmp_path / "corpus")
    (root / "state.json").write_text(json.dumps({"text": "a state of the union"}))
    folder, _ = prepare(tmp_path, root)
    assert "a state of the union" in all_documents(folder)


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "validation.jsonl"],
        ["en/train.jsonl", "en/valid.jsonl"],
        ["data/train/a.jsonl", "data/valid/a.jsonl"],
        ["train/a.jsonl", "more/b.jsonl", "held/valid/a.jsonl", "held/c.jsonl"],
    ],
)
def test_the_cure_for_a_ready_made_split_loses_no_training_text(tmp_path: Path, names: list[str]) -> None:
    root = write_split(tmp_path / "corpus", *names)
    cure = cure_of(tmp_path, root)
    folder, shards = prepare(tmp_path, root, validation_path=cure["validation_path"])
    others = [name for name in names if "valid" not in name]
    assert (shards.documents("train"), shards.documents("validation")) == (40 * len(others), 40)
    assert all("valid" in text for text in decoded(folder)["validation"])
    assert not shards.ledger_warnings()
    left = prepare(tmp_path, root, exclude=cure["exclude"])[1]
    assert sorted(source.name for source in left.sources) == sorted(others)


def test_several_parts_beside_the_training_text_are_each_named(tmp_path: Path) -> None:
    root = write_split(tmp_path / "corpus", "train/a.jsonl", "valid/a.jsonl", "test/a.jsonl")
    shards = prepare(tmp_path, root, **cure_of(tmp_path, root))[1]
    assert (shards.documents("train"), shards.documents("validation")) == (40, 40)


def test_the_same_text_elsewhere_has_the_same_manifest(tmp_path: Path) -> None:
    manifests = []
    for machine in ("one", "two"):
        home = tmp_path / machine
        root = write_split(home / "corpus", "train.jsonl", "valid.jsonl")
        (root / "notes.dat").write_text("no text")
        manifests.append((prepare(home, root)[0] / "manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


def test_patterns_mean_paths_below_the_validation_part_and_nothing_counts_twice(tmp_path: Path) -> None:
    root = write_split(tmp_path / "corpus", "train/a.jsonl", "valid/a.jsonl", "valid/old.jsonl")
    (root / "valid" / "notes.dat").write_text("no text")
    folder, shards = prepare(tmp_path, root, validation_path="valid", exclude=["old.jsonl"])
    assert [source.name for source in shards.sources] == ["train/a.jsonl", "valid/a.jsonl"]
    assert not any("old" in text for text in decoded(folder)["train"]), "what is left out of it is not trained on"
    assert {each.kind: each.files for each in shards.left_out} == {"data.include, data.exclude": 1, ".dat": 1}


def test_a_relative_validation_part_that_is_in_two_places_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_split(tmp_path / "corpus", "train/a.jsonl", "valid/a.jsonl")
    (tmp_path / "valid").mkdir()
    monkeypatch.chdir(tmp_path)
    assert_refused(
        r"data\.validation_path=valid is here .* and below data\.path", tmp_path, root, validation_path="valid"
    )


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("empty.jsonl", r"data\.validation_path=.*empty\.jsonl holds no text"),
        ("nothing", r"data\.validation_path=.*nothing does not exist"),
        ("corpus", r"data\.validation_path=.*corpus has all files of data\.path"),
    ],
)
def test_a_validation_part_that_cannot_serve_is_named_before_anything_is_tokenized(
    tmp_path: Path, part: str, problem: str
) -> None:
    root = write_split(tmp_path / "corpus", "a.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert_refused(problem, tmp_path, root, validation_path=str(tmp_path / part))
    assert not list(tmp_path.rglob("*.done.json"))
