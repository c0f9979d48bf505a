"""What a plan says of text before it is tokenized, against the tokens that it gives afterwards."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tasks.data.corpus import prepare_corpus
from tasks.data.estimate import READ_BYTES, estimate_text
from tasks.planning.plan import plan_run
from tests.support.tiny_corpus import estimated, prepare
from tests.support.tokenizer_cases import chatml
from training.config.run import RunConfig
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.records.plan import RunPlan
from training.shards.format import SPLITS
from training.shards.packing import one_epoch

WORDS = [f"{stem}{ending}" for stem in ("wander", "house", "river", "count") for ending in ("", "s", "ing", "er")]
HOSTS = "1x1xH100-80GB-SXM"


def texts(number: int, *, seed: int = 5, words: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(10, words))) for _ in range(number)]


def write(folder: Path, kind: str, documents: list[str], **columns: Any) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [{"id": number, "text": text} for number, text in enumerate(documents)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"a.{kind}"
    match kind:
        case "jsonl":
            path.write_bytes(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines, 1))
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=500)
        case "txt":
            for number, text in enumerate(documents):
                (folder / f"{number}.txt").write_text(text)
            return folder
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_the_estimate_is_near_what_tokenization_gives(
    tmp_path: Path, kind: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.data.estimate.READ_BYTES", READ_BYTES // 8)  # 1 MiB of 2
    path = write(tmp_path, kind, texts(1500))
    options = {"kind": tokenizer, "sample_mib": 1} | ({"vocab_size": 400} if tokenizer == "bpe" else {})
    found = estimated({"path": str(path), "tokenizer": options, "shard_mib": 1})
    shards = prepare(tmp_path, path, kind=tokenizer, tokenizer=options, shard_mib=1, processes=1)[1]
    for count in ("documents", "text_bytes", "tokens"):
        whole, estimate = (sum(map(getattr(each, count), SPLITS)) for each in (shards, found.shards))
        assert estimate == pytest.approx(whole, rel=0.15)
    assert found.shards.tokens("train") == pytest.approx(shards.tokens("train"), rel=0.15)
    assert not found.is_counted


def chats(folder: Path) -> dict[str, Any]:
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>" for text in texts(60, words=20)]
    return {
        "path": str(write(folder, "jsonl", turns)),
        "tokenizer": {"kind": "pretrained", "path": str(chatml(folder / "chatml"))},
    }


def one(folder: Path, kind: str = "jsonl", documents: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    path = write(folder, kind, documents or texts(60))
    return {"path": str(path), "tokenizer": {"kind": "bytes"}} | fields


def mixture(folder: Path, **fields: Any) -> dict[str, Any]:
    both = texts(25, seed=1)
    first, second = write(folder / "a", "jsonl", texts(40) + both), write(folder / "b", "txt", both + texts(30, seed=2))
    sources = [{"name": "a", "path": str(first), "weight": 3.0}, {"name": "b", "path": str(second), "weight": 1.0}]
    return {"sources": sources, "tokenizer": {"kind": "bytes"}} | fields


def with_validation(folder: Path) -> dict[str, Any]:
    write(folder / "valid", "jsonl", texts(9, seed=3))
    return one(folder, validation_path="valid") | {"path": str(folder)}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "chats": chats,
    "chats whose markers are text": lambda folder: (
        (data := chats(folder)) | {"tokenizer": data["tokenizer"] | {"special_tokens_in_text": "none"}}
    ),
    "a BPE": lambda folder: one(folder, tokenizer={"kind": "bpe", "vocab_size": 300}),
    "characters": lambda folder: one(folder, "parquet", tokenizer={"kind": "characters"}),
    "repeats": lambda folder: one(folder, documents=texts(30) * 2, deduplicate="exact"),
    "repeats in many files": lambda folder: one(folder, "txt", texts(30) * 2, deduplicate="exact"),
    "rows that are left out": lambda folder: one(folder, where="id % 3 == 0"),
    "one long document": lambda folder: one(folder, documents=[" ".join(texts(900))]),
    "lines": lambda folder: one(folder, "txt", ["\n".join(texts(90, words=20))], text_unit="line"),
    "a part that is held out": with_validation,
    "a mixture": mixture,
    "repeats across sources": lambda folder: mixture(folder, deduplicate="exact"),
}


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_of_a_corpus_that_it_reads_whole_has_the_numbers_of_the_run(
    tmp_path: Path, case: str, packing: str
) -> None:
    data, train = CASES[case](tmp_path), {"packing": packing, "context": 64}
    found = estimated(data, train=train)
    config = RunConfig.model_validate({"data": data, "train": train})
    folder, shards = prepare_corpus(config.data, tokens_home=tmp_path / "tokens")
    assert found.is_counted
    for count in ("tokens", "documents", "text_bytes"):
        assert [*map(getattr(found.shards, count), SPLITS)] == [*map(getattr(shards, count), SPLITS)], count
    assert found.epochs == one_epoch(folder, packing=config.train.packing, context=64)
    assert [*found.lines()][len(found.epochs) :] == shards.ledger_lines()
    assert found.shards.vocab_size == shards.vocab_size


def test_files_that_are_left_out_and_the_size_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write(folder, "jsonl", texts(40))
    (folder / "notes.dat").write_text("no text")
    found = estimated({"path": str(folder)})
    first, second = found.lines()
    assert first.startswith(f"text: {folder}: 1 file, 0.1 MB; ")
    assert "tokens of 39 documents to train on, " in first
    assert first.endswith(" held out (all of it was read; it is not tokenized yet)")
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
    found = estimated({"path": str(path)} | where)
    assert found.is_counted == is_counted
    read = "" if is_counted else "in the part that was read, "
    filtered, skipped, nuls = [line for line in found.lines() if line.startswith(f"text: {read}")][-3:]
    assert filtered == f"text: {read}left out 3 rows for which data.where is false"
    assert skipped.startswith(f"text: {read}skipped 1 document in 1 file, 0.0 MB, ")
    assert "texts.jsonl:6: has no key 'meta.body'" in skipped
    assert nuls == f"text: {read}the documents, and so the tokens, hold {found.sample.nul_characters} NUL characters"
    assert (found.sample.nul_characters == 36) == is_counted


def planned(tmp_path: Path, data: dict[str, Any], *, as_run: bool, **train: Any) -> RunPlan:
    config = RunConfig.model_validate({"data": data, "train": {"context": 64, "steps": 50} | train})
    inventory = hypothetical_inventory(HOSTS)
    if not as_run:
        return plan_run(config, inventory=inventory, text=estimate_text(config))
    folder, shards = prepare_corpus(config.data, tokens_home=tmp_path / "tokens")
    return plan_run(config, inventory=inventory, shards=shards, shards_dir=folder)


@pytest.mark.parametrize("case", ["a BPE", "a mixture", "repeats across sources", "characters"])
def test_a_plan_before_tokenization_is_that_of_the_run(tmp_path: Path, case: str) -> None:
    before, after = (
        planned(tmp_path, CASES[case](tmp_path), as_run=as_run, max_epochs=0.5, packing="best-fit")
        for as_run in (False, True)
    )
    assert (before.steps, before.sequences, before.sources) == (after.steps, after.sequences, after.sources)
    assert (before.mixture, before.vocab_size, before.predicted) == (after.mixture, after.vocab_size, after.predicted)
    text = [reason for reason in after.reasons if "epochs" in reason or "cuts" in reason]
    assert text
    assert {*text} <= {*before.reasons}


def tiny_source(folder: Path) -> dict[str, Any]:
    """Most of the text is held out."""
    sources = [
        {"name": "large", "path": str(write(folder / "a", "jsonl", texts(60)))},
        {"name": "tiny", "path": str(write(folder / "b", "jsonl", ["just a few words"]))},
    ]
    return {"sources": sources, "tokenizer": {"kind": "bytes"}}


REFUSED: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "a source of few tokens": (tiny_source, "tiny fills no sequence of train.context tokens"),
    "few tokens": (lambda folder: one(folder, documents=["just a few words"]), "one sequence needs train.context"),
    "a part of few tokens": (
        lambda folder: one(folder, documents=["word " * 60, "one", "two"], validation_fraction=0.01),
        "the validation split has",
    ),
    "no text": (lambda folder: one(folder, where="id > 99"), r"holds no text: .* or data\.where=id > 99 is false"),
    "one split": (
        lambda folder: one(folder, documents=texts(2), split="documents", validation_fraction=0.01),
        "of 2 documents all fall into train",
    ),
    "all is held out": (
        lambda folder: one(folder, documents=texts(30)) | {"validation_path": str(folder / "a.jsonl")},
        "has all files of data.path",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_plan_refuses_what_the_run_refuses(tmp_path: Path, case: str) -> None:
    make, why = REFUSED[case]
    data, said = make(tmp_path), []
    for as_run in (False, True):
        with pytest.raises(ValueError, match=why) as refusal:
            planned(tmp_path, data, as_run=as_run)
        said.append(str(refusal.value))
    assert said[0] == said[1]


def test_a_large_corpus_is_not_refused_for_what_its_sample_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample ends before its documents do, and before the file that is held out."""
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(" ".join(texts(20, seed=number)))
    (tmp_path / "99.txt").write_text(" ".join(texts(20, seed=99)))
    monkeypatch.setattr("tasks.data.estimate.READ_BYTES", 2**14)
    data = {"path": str(tmp_path), "tokenizer": {"kind": "bytes"}}
    for fields in ({"split": "documents"}, {"validation_path": "99.txt"}):
        before = estimated(data | fields)
        shards = prepare_corpus(
            RunConfig.model_validate({"data": data | fields}).data, tokens_home=tmp_path / ".tokens"
        )[1]
        assert not before.is_counted
        whole, estimate = (sum(map(each.tokens, SPLITS)) for each in (shards, before.shards))
        assert estimate == pytest.approx(whole, rel=0.15)
    assert before.shards.tokens("validation") == pytest.approx(shards.tokens("validation"), rel=0.15)


def test_what_would_stop_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text of its own\n" * 40)
    (tmp_path / "more.zip").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ValueError, match=r"more\.zip: it is a zip archive"):
        estimated({"path": str(tmp_path)})
    (tmp_path / "more.zip").unlink()
    letters = prepare(tmp_path, write(tmp_path, "jsonl", ["only these letters"]), kind="characters", split="all")[0]
    pretrained = {"kind": "pretrained", "path": str(letters / "tokenizer")}
    data = {"path": str(tmp_path / "a.txt"), "tokenizer": pretrained}
    (tmp_path / "a.txt").write_text("OTHER LETTERS\n" * 40)
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode text of a\.txt .* take one that is byte-level"):
        estimated(data)
