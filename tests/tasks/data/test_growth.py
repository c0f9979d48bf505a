"""Listing, learning, reading and encoding take time in proportion to the text: twice as much of it is tried, twice."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tasks.data.encoder import LIBRARIES, encode
from tasks.data.readers import Span, read_spans
from tasks.data.sources import SkippedDocuments, find_sources
from tasks.data.split import Passage
from tasks.data.tokenizer import LONGEST_WORD, Specials, save_tokenizer
from training.config.data import DataConfig, TokenizerConfig
from training.records.text_encoding import NOTHING_SPECIAL

pytestmark = pytest.mark.slow  # two minutes, and a busy machine makes them longer

MOST = 8  # times the time for four times the text: in proportion it is 4, with the square of it 16
LEAST_S = 0.01  # shorter times are not told apart
TRIES = 3  # on a busy machine


def assert_in_proportion(seconds: Callable[[int], float], size: int) -> None:
    measured = []
    for _ in range(TRIES):
        small, _, large = (seconds(times * size) for times in (1, 2, 4))
        measured.append(large / max(LEAST_S, small))
        if measured[-1] < MOST:
            return
    raise AssertionError(f"four times as much took {measured} times as long")


def cpu_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


@pytest.mark.parametrize("how", ["pattern", "names", "names without suffix", "exclude"])
def test_listing_of_files(tmp_path: Path, how: str) -> None:
    def seconds(number: int) -> float:
        suffix = ".raw" if how == "names without suffix" else ".txt"
        names = [f"{n:06d}{suffix if n % 2 else '.txt'}" for n in range(number)]
        folder = tmp_path / f"{number}"
        if not folder.exists():
            folder.mkdir()
            for name in names:
                (folder / name).write_bytes(name.encode())
        odd = tuple(names[1::2])
        chosen = {"pattern": {"include": ("*1.txt", "*2.txt")}, "exclude": {"exclude": odd}}.get(how, {"include": odd})
        data = DataConfig.model_validate({"path": str(folder)} | chosen)
        return cpu_s(lambda: find_sources(data, SkippedDocuments("stop"), hashed=False))

    assert_in_proportion(seconds, 1000)


def test_listing_of_links_to_folders(tmp_path: Path) -> None:
    def seconds(number: int) -> float:
        corpus, apart = tmp_path / f"{number}", tmp_path / f"apart{number}"
        if not corpus.exists():
            corpus.mkdir()
            for n in range(number):
                (apart / f"{n}").mkdir(parents=True)
                (corpus / f"{n:05d}").symlink_to(apart / f"{n}")
            (apart / "0" / "a.txt").write_text("text")
        skipped = SkippedDocuments("stop")
        return cpu_s(lambda: find_sources(DataConfig(path=str(corpus)), skipped, hashed=False))

    assert_in_proportion(seconds, 300)


def endless(kind: str, size: int) -> str:
    letters = {
        "DNA": "acgt",
        "base64": "ABCDEFGHabcdefgh0123456789+/",
        "digits": "0123456789",
        "one": "a",
        "han": "山水人家",
    }
    return "".join(random.Random(0).choices(letters.get(kind, " "), k=size))


WORDS = ["DNA", "base64", "digits", "one", "han", "blanks"]


@pytest.mark.parametrize("kind", WORDS)
def test_learning_from_an_endless_word(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    made = 0

    def seconds(size: int) -> float:
        nonlocal made
        made += 1
        text = endless(kind, size)
        return cpu_s(lambda: learn(tmp_path / f"{made}", text, vocab_size=1000))

    caplog.set_level("INFO")
    assert_in_proportion(seconds, 25_000)
    said = f"learns from pieces of {LONGEST_WORD} bytes of longer words, such as the one in"
    assert (said in caplog.text) == (kind != "base64")


def learn(folder: Path, text: str, *, vocab_size: int = 300) -> object:
    return save_tokenizer(
        folder,
        TokenizerConfig(vocab_size=vocab_size),
        pretrained=None,
        specials=Specials("<|endoftext|>", None),
        encoding=NOTHING_SPECIAL,
        train_texts=[[text]],
        all_texts=[],
    )


def test_words_are_cut_for_learning_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    short, long = "wander" * (LONGEST_WORD // 6), "wander" * LONGEST_WORD
    learn(tmp_path / "short", f"{short} rivers " * 20)
    assert "of longer words" not in caplog.text
    learn(tmp_path / "long", f"{long} rivers")
    saved = json.loads((tmp_path / "long" / "tokenizer" / "tokenizer.json").read_text())
    assert saved["pre_tokenizer"]["type"] == "ByteLevel"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", WORDS)
def test_encoding_of_an_endless_word(tmp_path: Path, kind: str, library: str) -> None:
    from dataclasses import replace

    saved = replace(learn(tmp_path, endless(kind, 20_000)), library=library)

    def seconds(size: int) -> float:
        passage = Passage("train", endless(kind, size), ends=True, whole=True)
        return cpu_s(lambda: encode(saved, [passage]))

    assert_in_proportion(seconds, 60_000)


MIB = 2**20
NO_BORDER = "acgt"


def json_of(rows: list[str]) -> str:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


def parquet_of(path: Path, rows: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path)


def quoted(size: int) -> str:
    return 'text,id\n"' + 'a ""line"" here\n' * (size // 16) + '",1\n'


READ: dict[str, tuple[Callable[[int], str | bytes], str, dict[str, str]]] = {
    "a JSON line": (lambda size: json_of([NO_BORDER * (size // 4)]), ".jsonl", {}),
    "a packed JSON line": (lambda size: gzip.compress(json_of([NO_BORDER * (size // 4)]).encode(), 1), ".jsonl.gz", {}),
    "a JSON line of escapes": (lambda size: json_of(["山" * (size // 6)]), ".jsonl", {}),
    "a broken JSON line": (
        lambda size: '{"text": "' + "a" * size + '\n{"text": "b"}\n',
        ".jsonl",
        {"on_error": "skip"},
    ),
    "a JSON text in an array": (lambda size: json.dumps([NO_BORDER * (size // 4)]), ".json", {}),
    "many JSON texts in an array": (lambda size: json.dumps(["tiny"] * (size // 64)), ".json", {}),
    "an object of lines": (lambda size: json.dumps({"text": "a b\n" * (size // 5)}, indent=1), ".json", {}),
    "many JSON lines": (lambda size: json_of(["tiny"] * (size // 64)), ".jsonl", {}),
    "a field of CSV": (lambda size: "text\n" + NO_BORDER * (size // 4) + "\n", ".csv", {}),
    "a field of CSV of many lines": (quoted, ".csv", {}),
    "an open quote in CSV": (lambda size: quoted(size)[:-4], ".csv", {"on_error": "skip"}),
    "many rows of CSV": (lambda size: "text\n" + "tiny\n" * (size // 32), ".csv", {}),
    "many rows of TSV": (lambda size: "id\ttext\n" + "1\ttiny\n" * (size // 32), ".tsv", {}),
    "a text": (lambda size: NO_BORDER * (size // 4), ".txt", {}),
    "a text of lines": (lambda size: "some words\n" * (size // 11), ".txt", {}),
    "many lines": (lambda size: "tiny\n" * (size // 32), ".txt", {"text_unit": "line"}),
    "a long line": (lambda size: NO_BORDER * (size // 4), ".txt", {"text_unit": "line"}),
    "a long paragraph": (lambda size: "tiny\n" * (size // 32), ".txt", {"text_unit": "paragraph"}),
    "many paragraphs": (lambda size: "tiny\n\n" * (size // 32), ".txt", {"text_unit": "paragraph"}),
}


@pytest.mark.parametrize("case", [*READ, "a cell of parquet", "many rows of parquet"])
def test_reading(tmp_path: Path, case: str) -> None:
    def written(size: int) -> tuple[Path, dict[str, str]]:
        if case not in READ:
            path = tmp_path / f"{size}.parquet"
            parquet_of(path, [NO_BORDER * (size // 4)] if case.startswith("a ") else ["tiny"] * (size // 64))
            return path, {}
        make, suffix, fields = READ[case]
        path, content = tmp_path / f"{size}{suffix}", make(size)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path, fields

    def seconds(size: int) -> float:
        path, fields = written(size)
        data = DataConfig.model_validate({"path": str(path)} | fields)
        skipped = SkippedDocuments(data.on_error)
        (source,) = find_sources(data, skipped, hashed=False)
        return cpu_s(lambda: sum(len(piece.text) for piece in read_spans([Span(0, source)], data, skipped)))

    assert_in_proportion(seconds, MIB)
