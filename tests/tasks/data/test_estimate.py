"""What a plan says of text before it is tokenized, against the tokens that it gives afterwards."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tasks.data.estimate import READ_BYTES, estimate_text
from tasks.display.numbers import format_count
from tests.support.tiny_corpus import prepare
from training.config.run import RunConfig
from training.shards.format import SPLITS

WORDS = [f"{stem}{ending}" for stem in ("wander", "house", "river", "count") for ending in ("", "s", "ing", "er")]


def texts(number: int) -> list[str]:
    rng = random.Random(5)
    return [" ".join(rng.choices(WORDS, k=rng.randint(10, 400))) for _ in range(number)]


def write(folder: Path, kind: str, documents: list[str]) -> Path:
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(documents)).encode()
    path = folder / f"a.{kind}"
    match kind:
        case "jsonl":
            path.write_bytes(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines, 1))
        case "parquet":
            table = pyarrow.table({"id": range(len(documents)), "text": documents})
            pyarrow.parquet.write_table(table, path, row_group_size=500)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_the_estimate_is_near_what_tokenization_gives(
    tmp_path: Path, kind: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.data.estimate.READ_BYTES", READ_BYTES // 10)  # 3 MiB of 5
    path = write(tmp_path, kind, texts(3500))
    options = {"kind": tokenizer, "sample_mib": 1} | ({"vocab_size": 400} if tokenizer == "bpe" else {})
    data: dict[str, Any] = {"path": str(path), "tokenizer": options, "shard_mib": 1}
    (found,) = estimate_text(RunConfig.model_validate({"data": data}))
    shards = prepare(tmp_path, path, kind=tokenizer, tokenizer=options, shard_mib=1, processes=1)[1]
    exact = {
        "documents": sum(map(shards.documents, SPLITS)),
        "text_bytes": sum(map(shards.text_bytes, SPLITS)),
        "tokens": sum(map(shards.tokens, SPLITS)),
        "train_tokens": shards.tokens("train"),
    }
    assert {name: getattr(found, name) for name in exact} == pytest.approx(exact, rel=0.15)
    assert not found.is_counted


def test_a_small_corpus_is_counted_and_the_plan_says_what_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder, "jsonl", texts(40))
    (folder / "notes.dat").write_text("no text")
    (found,) = estimate_text(RunConfig.model_validate({"data": {"path": str(folder), "tokenizer": {"kind": "bytes"}}}))
    assert found.is_counted
    first, second = found.lines(2.5)
    tokens = format_count(found.tokens)
    assert first.startswith(f"text: {folder}: 40 documents in 1 file, 0.1 MB, about {tokens} tokens (from a sample of ")
    assert first.endswith("to train on: about 2.5 epochs")
    assert second.startswith("text: left out 1 file (.dat, 0.0 MB, such as notes.dat)")


@pytest.mark.parametrize("is_counted", [True, False])
def test_documents_that_are_left_out_or_skipped_are_said_before_the_run(
    tmp_path: Path, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ledger of the tokenized corpus says them."""
    rows: list[dict[str, Any]] = [{"meta": {"body": f"verse {n} \0"}, "year": n} for n in range(40)]
    rows[5]["meta"] = {}
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not is_counted:
        monkeypatch.setattr("tasks.data.estimate.READ_BYTES", 150)
    where = {"on_error": "skip", "column": "meta.body", "where": "year > 2"}
    data = {"path": str(path), "tokenizer": {"kind": "bytes"}} | where
    (found,) = estimate_text(RunConfig.model_validate({"data": data}))
    assert found.is_counted == is_counted
    _, *said = found.lines(None)
    read = "" if is_counted else "in the part that was read, "
    assert said == [
        f"text: {read}left out 3 rows for which data.where is false",
        f"text: {read}skipped 1 document (data.on_error=skip), the first: {said[1].partition('first: ')[2]}",
        f"text: {read}the documents, and so the tokens, hold {found.ledger.nul_characters} NUL characters",
    ]
    assert "texts.jsonl:6: has no key 'meta.body'" in said[1]
    assert (found.ledger.nul_characters == 36) == is_counted


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_repeated_documents_are_counted_once_and_said(tmp_path: Path, kind: str) -> None:
    once, folder = texts(30), tmp_path / "corpus"
    folder.mkdir()
    write(folder, kind, once * 2)
    data = {"path": str(folder), "tokenizer": {"kind": "bytes"}, "deduplicate": "exact"}
    (found,) = estimate_text(RunConfig.model_validate({"data": data}))
    assert (found.documents, found.text_bytes) == (30, sum(len(text.encode()) for text in once))
    assert list(found.lines(None))[1:] == ["text: left out 30 documents whose text repeats an earlier one"]
    (both,) = estimate_text(RunConfig.model_validate({"data": data | {"deduplicate": "off"}}))
    assert both.documents == 60
    assert found.tokens == pytest.approx(both.tokens / 2, rel=0.05)


def test_what_would_stop_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text of its own\n" * 40)
    (tmp_path / "more.zip").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    config = RunConfig.model_validate({"data": {"path": str(tmp_path), "tokenizer": {"kind": "bytes"}}})
    with pytest.raises(ValueError, match=r"more\.zip: it is a zip archive"):
        estimate_text(config)
    (tmp_path / "more.zip").unlink()
    letters = prepare(tmp_path, write(tmp_path, "jsonl", ["only these letters"]), kind="characters", split="all")[0]
    pretrained = {"kind": "pretrained", "path": str(letters / "tokenizer")}
    data = {"path": str(tmp_path / "a.txt"), "tokenizer": pretrained}
    (tmp_path / "a.txt").write_text("OTHER LETTERS\n" * 40)
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode text of a\.txt .* take one that is byte-level"):
        estimate_text(RunConfig.model_validate({"data": data}))
