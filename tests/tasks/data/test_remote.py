"""Texts behind URLs: a real S3 server that also fails, and a web server."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.data.sources import check_paths
from tests.support.s3_server import BUCKET, SECRET, S3Server, s3_server, seen_anew
from tests.support.text_cases import json_lines, parquet_of
from tests.support.tiny_corpus import assert_refused, prepare, web_server, write_files
from training.config.data import DataConfig
from training.shards.format import SPLITS

TEXTS = [f"document {n}: " + "some words of no meaning " * (n % 40) for n in range(400)]
LINES = json_lines(TEXTS).encode()
FILES = {
    "a.jsonl": LINES,
    "deep/b.jsonl.gz": gzip.compress(LINES.replace(b"document", b"text"), mtime=0),
    "c.parquet": parquet_of(TEXTS),
    ".hidden.txt": b"hidden",
    "picture.png": b"\x89PNG",
}


@pytest.fixture(scope="module")
def served() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with s3_server() as server:
        for name, content in FILES.items():
            server.put(f"texts/{name}", content)
        yield server


@pytest.fixture
def s3(served: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    return seen_anew(served, monkeypatch)


def test_a_prefix_of_a_bucket_is_a_corpus_like_a_folder(s3: S3Server, tmp_path: Path) -> None:
    _, here = prepare(tmp_path, write_files(tmp_path / "texts", FILES))
    there_folder, there = prepare(tmp_path, f"s3://{BUCKET}/texts")
    assert [file.name for file in there.sources] == ["a.jsonl", "c.parquet", "deep/b.jsonl.gz"]
    assert [file.num_bytes for file in there.sources] == [file.num_bytes for file in here.sources]
    assert [shard.sha256 for shard in there.shards] == [shard.sha256 for shard in here.shards], "the same tokens"
    assert prepare(tmp_path, f"s3://{BUCKET}/texts/") == (there_folder, there)
    assert SECRET not in (there_folder / "manifest.json").read_text()


@pytest.mark.slow
def test_one_object_is_a_corpus_and_a_changed_one_another(s3: S3Server, tmp_path: Path) -> None:
    s3.put("one.txt", b"a line of text\n" * 200)
    first, shards = prepare(tmp_path, f"s3://{BUCKET}/one.txt")
    assert sum(map(shards.text_bytes, SPLITS)) == 200 * 15
    s3.put("one.txt", b"a line of next\n" * 200)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    assert prepare(tmp_path, f"s3://{BUCKET}/one.txt")[0] != first


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "cut", "away"])
def test_a_store_that_fails_once_or_twice_costs_nothing(s3: S3Server, tmp_path: Path, fault: Any) -> None:
    whole = prepare(tmp_path / "whole", f"s3://{BUCKET}/texts")[1]
    s3.faults.kind, s3.faults.count = fault, 1
    assert prepare(tmp_path / "again", f"s3://{BUCKET}/texts")[1] == whole


@pytest.mark.slow
def test_a_store_that_is_away_ends_with_a_clear_line_and_leaves_nothing_half(s3: S3Server, tmp_path: Path) -> None:
    s3.faults.kind, s3.faults.count = "away", -1
    with pytest.raises(ValueError, match=rf"data\.path=s3://{BUCKET}/texts cannot be read .*check the URL") as caught:
        prepare(tmp_path, f"s3://{BUCKET}/texts")
    assert SECRET not in str(caught.value)
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("s3://no-such-bucket/texts", r"no-such-bucket/texts"),
        (f"s3://{BUCKET}/nothing-here", r"there is no file at this URL or below it"),
    ],
)
def test_what_is_not_there_is_refused(s3: S3Server, tmp_path: Path, path: str, problem: str) -> None:
    assert_refused(problem, tmp_path, path)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="contains credentials") as caught:
        check_paths(DataConfig(path="https://me:hunter2@example.org/a.txt"))
    assert "hunter2" not in str(caught.value)


def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ValueError, match=r"gs:// needs a library.*pip install 'shardline\[gcs\]'"):
        check_paths(DataConfig(path="gs://bucket/texts"))


def test_a_server_that_gives_no_parts_of_files_is_named_with_the_cure(tmp_path: Path) -> None:
    with web_server(tmp_path / "web") as server:
        url = f"{server}/large.txt"
        (tmp_path / "web" / "large.txt").write_bytes(b"a line of text\n" * 2**21)
        assert_refused(rf"data\.path={url} cannot be read .*range requests.*download it", tmp_path, url)
