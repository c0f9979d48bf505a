import json
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from tokenizers import Tokenizer

from tasks.data.corpus import prepare_corpus
from tasks.data.readers import LONGEST_PIECE
from tests.support.tiny_corpus import (
    DOCUMENTS,
    all_documents,
    assert_refused,
    contents,
    decoded,
    prepare,
    write_json_lines,
)
from training.config.run import DataConfig
from training.shards.format import SPLITS, verify_hashes
from training.shards.stream import TokenStream
from training.tracking import progress

# Text to shards and back


@pytest.mark.parametrize("kind", ["bpe", "characters", "bytes"])
def test_documents_come_back_as_they_went_in(tmp_path: Path, kind: str) -> None:
    source = write_json_lines(tmp_path / "corpus.jsonl", DOCUMENTS)
    folder, shards = prepare(tmp_path, source, kind=kind, tokenizer={"vocab_size": 300})
    documents = decoded(folder)
    assert sorted(documents["train"] + documents["validation"]) == sorted(DOCUMENTS)
    assert len(documents["validation"]) == shards.documents("validation") > 0
    assert shards.text_bytes("train") == sum(len(text.encode()) for text in documents["train"])
    tokens = TokenStream(folder, "train").read(0, shards.tokens("train"))
    assert (tokens == shards.end_id).sum() == shards.documents("train")
    assert tokens[-1] == shards.end_id
    assert tokens.max() < shards.vocab_size
    verify_hashes(folder)


def test_without_a_terminal_the_log_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY_S", 0.001)
    caplog.set_level(logging.INFO)
    data = DataConfig(path=str(write_json_lines(tmp_path / "c.jsonl", DOCUMENTS)), tokenizer={"kind": "bytes"})
    prepare_corpus(data, tokens_home=tmp_path / "tokens")
    assert re.search(r"reading the corpus: (under )?[\d.]+ s so far", caplog.text)


def test_an_end_token_written_in_a_text_is_text(tmp_path: Path) -> None:
    texts = [f"{i} before <|endoftext|> after" for i in range(30)]
    folder, shards = prepare(tmp_path, write_json_lines(tmp_path / "c.jsonl", texts))
    tokens = TokenStream(folder, "train").read(0, shards.tokens("train"))
    assert (tokens == shards.end_id).sum() == shards.documents("train")
    assert sorted(all_documents(folder)) == sorted(texts)


@pytest.mark.parametrize("border", ["\n", " ", ""])
def test_a_long_document_stays_one_document(tmp_path: Path, border: str) -> None:
    text = border.join(f"word{number}é" for number in range(2 * LONGEST_PIECE // 8))
    assert len(text) > LONGEST_PIECE
    source = tmp_path / "long.txt"
    source.write_text(text)
    folder, shards = prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 400})
    documents = decoded(folder)
    assert documents["train"] + documents["validation"] == [text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]]
    assert [shards.documents(split) for split in SPLITS] == [1, 1]


def test_cutting_a_long_document_changes_no_token(tmp_path: Path) -> None:
    text = "".join(f"    line {number} of 'code'  # {number * 7}\n" for number in range(LONGEST_PIECE // 20))
    source = tmp_path / "long.py"
    source.write_text(text)
    folder, shards = prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 400}, split="tail")
    train = text[: int(len(text) * 0.9)]
    whole = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")).encode(train).ids
    assert TokenStream(folder, "train").read(0, shards.tokens("train")).tolist() == whole


# The split


def test_the_tail_is_cut_at_the_exact_character(tmp_path: Path) -> None:
    text = "甲乙丙丁\n" * 300 + "x"
    source = tmp_path / "a.txt"
    source.write_text(text)
    folder, shards = prepare(tmp_path, source, kind="characters", validation_fraction=0.1)
    border = int(len(text) * 0.9)
    assert decoded(folder) == {"train": [text[:border]], "validation": [text[border:]]}
    train, validation = (TokenStream(folder, split) for split in SPLITS)
    assert (len(train), len(validation)) == (border, len(text) - border + 1)
    assert train.read(0, len(train)).max() < shards.end_id  # cut in the middle: no end token
    assert validation.read(len(validation) - 1, len(validation)).tolist() == [shards.end_id]
    assert (
        shards.split_rule == f"tail: the first {border} of {len(text)} characters are train (auto: 1 of 20 documents)"
    )


def test_the_tail_cuts_the_document_on_the_border(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", ["aaaa", "bbbb", "cccc"])
    folder, shards = prepare(tmp_path, source, split="tail", validation_fraction=0.5)
    assert decoded(folder) == {"train": ["aaaa", "bb"], "validation": ["bb", "cccc"]}
    tokens = TokenStream(folder, "train").read(0, shards.tokens("train"))
    assert np.flatnonzero(tokens == shards.end_id).tolist() == [4]


def test_twenty_documents_are_split_by_document(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(200)]
    source = write_json_lines(tmp_path / "a.jsonl", texts)
    folder, shards = prepare(tmp_path, source)
    assert re.match(r"documents: .*auto: at least 20", shards.split_rule)
    documents = decoded(folder)
    assert sorted(documents["train"] + documents["validation"]) == sorted(texts)
    assert 5 < len(documents["validation"]) < 40
    write_json_lines(tmp_path / "a.jsonl", [*texts, "one more"])
    grown, _ = prepare(tmp_path, source)
    assert set(documents["validation"]) <= set(decoded(grown)["validation"])  # documents stay on their side


def test_a_split_that_would_be_empty_is_refused(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", ["one", "two"])
    assert_refused(
        r"of 2 documents all fall into train.*set data.split=tail",
        tmp_path,
        source,
        split="documents",
        validation_fraction=0.001,
    )
    assert_refused("1 characters leave nothing to split", tmp_path, write_json_lines(source, ["a"]))


# Once and for all


def test_the_second_call_tokenizes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folder, shards = prepare(tmp_path, source)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    elsewhere = tmp_path / "moved" / "a.jsonl"
    elsewhere.parent.mkdir()
    source.rename(elsewhere)
    with caplog.at_level(logging.INFO):
        again = prepare(tmp_path, elsewhere, processes=3)  # neither place nor processes matter
    assert again == (folder, shards)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    assert re.search(
        r"the corpus is not tokenized again: its [\d,]+ tokens are in .*hashes were verified in .* s", caplog.text
    )


def test_what_matters_makes_another_folder(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folders = {
        prepare(tmp_path, source)[0],
        prepare(tmp_path, source, validation_fraction=0.2)[0],
        prepare(tmp_path, source, kind="characters")[0],
        prepare(tmp_path, source, objective="masked")[0],
        prepare(tmp_path, write_json_lines(source, [*DOCUMENTS, "more"]))[0],
    }
    assert len(folders) == 5


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        (
            lambda folder: (folder / "train" / "00000.bin").write_bytes(b"cut"),
            r"train/00000.* is not the file that was written",
        ),
        (
            lambda folder: flip_last_bit(folder / "train" / "00000.bin"),
            r"train/00000.* is not the file that was written",
        ),
        (lambda folder: (folder / "validation" / "00000.docs.npy").unlink(), r"validation/00000\.docs\.npy is missing"),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), r"tokenizer\.json is missing"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text("{}"), r"is not the tokenizer that made"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json is damaged"),
    ],
    ids=["cut shard", "flipped bit", "missing ends", "no tokenizer", "other tokenizer", "broken manifest"],
)
def test_a_damaged_folder_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], warning: str
) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folder, shards = prepare(tmp_path, source)
    whole = contents(folder)
    damage(folder)
    assert prepare(tmp_path, source) == (folder, shards)
    assert contents(folder) == whole
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(rf"{warning}[^£]*: deleting the file and making it again", message)


def test_only_the_damaged_stretch_is_made_again(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", [f"{i} " + "some text, not short. " * 400 for i in range(400)])
    folder, shards = prepare(tmp_path, source, shard_mib=1, processes=1)
    whole = contents(folder)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}
    flip_last_bit(folder / "train" / "00001.bin")
    shutil.rmtree(folder / "tokenizer")
    assert prepare(tmp_path, source, shard_mib=1, processes=1) == (folder, shards)
    made_again = {path.stem for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert contents(folder) == whole
    assert made_again == {"00001"}
    assert len(times) >= 6


def test_tokens_of_a_tokenizer_that_cannot_be_made_again_are_made_again(tmp_path: Path) -> None:
    """As after an update of `tokenizers` that trains another vocabulary: old tokens never meet the new one."""
    source = write_json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folder, shards = prepare(tmp_path, source, kind="characters")
    whole = contents(folder)
    shards.model_copy(update={"tokenizer_sha256": "0" * 64}).write(folder / "manifest.json")
    ended_before = (folder / "00000.done.json").stat().st_mtime_ns
    assert prepare(tmp_path, source, kind="characters") == (folder, shards)
    assert (folder / "00000.done.json").stat().st_mtime_ns != ended_before
    assert contents(folder) == whole


def test_an_unfinished_folder_without_its_tokenizer_begins_anew(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folder, shards = prepare(tmp_path, source)
    (folder / "manifest.json").unlink()
    (folder / "tokenizer" / "tokenizer.json").unlink()
    ended_before = (folder / "00000.done.json").stat().st_mtime_ns
    assert prepare(tmp_path, source) == (folder, shards)
    assert (folder / "00000.done.json").stat().st_mtime_ns != ended_before


BLOCKED = """
import sys
from pathlib import Path
from tasks.data.corpus import prepare_corpus
from training.config.run import DataConfig

def block(phase, done_bytes, total_bytes):
    if phase == "tokens":
        print("a shard is done", flush=True)
        sys.stdin.read()

if __name__ == "__main__":
    data = DataConfig.model_validate_json(sys.argv[1])
    prepare_corpus(data, tokens_home=Path(sys.argv[2]), progress=block)
"""


def test_a_killed_run_is_taken_up_and_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", [f"{i} " + "some text, not short. " * 400 for i in range(350)])
    program = tmp_path / "blocked.py"
    program.write_text(textwrap.dedent(BLOCKED))
    config = {"path": str(source), "shard_mib": 1, "processes": 2, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(program), json.dumps(config), str(tmp_path / "tokens")]
    with subprocess.Popen(command, text=True, env=environment, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a shard is done\n"
        process.kill()
        process.stdout.read()  # ends only when the orphaned workers, which share this pipe, have ended too
    (killed,) = (tmp_path / "tokens").iterdir()
    assert 1 <= len(list(killed.glob("*.done.json"))) < 6
    assert not (killed / "manifest.json").exists()
    finished_before = {path: path.stat().st_mtime_ns for path in killed.glob("*.done.json")}
    (killed / "train" / ".00007.bin.123.part").write_bytes(b"half a shard")

    resumed, shards = prepare_corpus(DataConfig.model_validate(config), tokens_home=tmp_path / "tokens")
    config["processes"] = 1
    undisturbed, expected = prepare_corpus(DataConfig.model_validate(config), tokens_home=tmp_path / "again")
    assert resumed == killed
    assert shards == expected
    assert contents(resumed) == contents(undisturbed)
    assert {path: path.stat().st_mtime_ns for path in finished_before} == finished_before
    assert len(shards.shards) >= 6
