"""Each cure that is printed for text, tokenizers and models: an input brings it, it is followed, and it helps."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.data.tokenizer import load_pretrained, special_tokens
from tests.support.text_cases import HELLOS, STORIES, byte_fallback, json_lines, words_without_unknown, write_zip
from tests.support.tiny_corpus import all_documents, prepare, write_files
from training.config.data import TokenizerConfig
from training.facts.cures import Cure

Fields = dict[str, Any]
GARBLED = [text + "Ã¤rgerlich grÃ¶ÃŸer" for text in STORIES]


def said(home: Path, path: Path, **fields: Any) -> str:
    """Return what is said of a corpus: the error, or the lines of its ledger."""
    try:
        return "\n".join(prepare(home, path, **fields)[1].ledger_lines())
    except ValueError as error:
        return str(error)


def named_override(message: str, cure: Cure) -> Fields:
    """Return the config's field that a message names after the words of a cure."""
    rest = message[message.index(str(cure).partition("{")[0].partition("data.")[0]) :] if "data." in cure else message
    found = re.search(r"'?data\.([a-z_.]+)=('[^']*'|\[[^]]*\]|\{[^}]*\}|[^\s;,)']+)", rest)
    assert found, message
    value = yaml.safe_load(found[2])
    section, _, name = found[1].partition(".")
    return {section: {name: value}} if name else {section: value}


def named_text(message: str, cure: Cure) -> Fields:
    """Return the first of the names that a cure lists for its field."""
    name = re.search(r"set data\.([a-z_]+) to one of [^,]*, '([^']+)'", message)
    assert name, message
    return {name[1]: name[2]}


def shell(path: Path, message: str, cure: Cure) -> Fields:
    """Run the command that a message names, with FILE and COPY filled in."""
    copy = path.with_name(f"copy{path.suffix}")
    command = re.search(r"(?:tail|tr) [^;]*?FILE > COPY", message)
    assert command, message
    subprocess.run(command[0].replace("FILE", str(path)).replace("COPY", str(copy)), shell=True, check=True)
    return {"path": copy}


def instead(write: Callable[[Path], Any]) -> Callable[[Path, str, Cure], Fields]:
    """What a person does by hand: the text is given in another form."""

    def follow(path: Path, message: str, cure: Cure) -> Fields:
        other = path.with_name("by hand.txt")
        write(other)
        return {"path": other}

    return follow


@dataclass(frozen=True)
class Case:
    """`make` writes the input; `follow` returns the fields that the cure asks for, `path` among them, too."""

    make: Callable[[Path], Path]
    follow: Callable[[Path, str, Cure], Fields] = lambda path, message, cure: named_override(message, cure)
    fields: Fields = field(default_factory=dict)


def file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    return lambda folder: write_files(folder, {name: content}) / name


def folder(files: dict[str, str | bytes]) -> Callable[[Path], Path]:
    return lambda home: write_files(home / "corpus", files)


def by_hand(path: Path) -> None:
    path.write_text("".join(STORIES))


def docx(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "novel.docx", "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", "<w:document/>")
    return folder / "novel.docx"


def unpacked(path: Path, message: str, cure: Cure) -> Fields:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(path.with_suffix(""))
    return {"path": path.with_suffix("")}


def table(rows: list[str], header: str = "id,text", delimiter: str = ",") -> str:
    return header + "\n" + "".join(f"{number}{delimiter}{row}\n" for number, row in enumerate(rows))


WORDS = [f"row {number}" for number in range(40)]
LINES = json_lines(STORIES)
BODIES = LINES.replace('"text"', '"body"')
BOOK = " ".join(STORIES) * 60
NOTES = {f"note-{number:02}.txt": text for number, text in enumerate(STORIES[:25])}
CP1252 = "größer und älter\n".encode("cp1252") * 30
QUOTED = [f'"he said ""no"" {number}"' for number in range(30)]
BY_HAND = instead(by_hand)

CASES: dict[Cure, list[Case]] = {
    Cure.UNPACK: [Case(lambda home: write_zip(home / "stories.zip"), unpacked)],
    Cure.SAVE_AS_TEXT: [Case(docx, BY_HAND), Case(file("a.txt", b"{\\rtf1\\ansi hello}"), BY_HAND)],
    Cure.PDF: [Case(file("a.pdf", b"%PDF-1.4\n"), BY_HAND)],
    Cure.DECOMPRESS: [
        Case(file("a.gz", gzip.compress(gzip.compress(LINES.encode()))), instead(lambda path: path.write_text(LINES)))
    ],
    Cure.TOKENIZED: [Case(file("a.bin", b"\x93NUMPY\1\0"), BY_HAND)],
    Cure.EXCLUDE: [
        Case(folder({"a.txt": "".join(STORIES), "more.zip": b"PK\x03\x04" + b"\0" * 99})),
        Case(folder({"a.txt": "".join(STORIES), "package.json": json.dumps({"name": "a" * 9999})})),
        Case(folder({"a.jsonl": LINES, "deep/dataset_infos.json": json.dumps({"default": {"n": ["x" * 9999]}})})),
        Case(folder({"a.jsonl": LINES, "labels.csv": "name,label\nx,1\n"})),
        Case(folder({"a.jsonl": LINES, "other.jsonl": '{"id": 1}\n'})),
    ],
    Cure.INCLUDE: [
        Case(folder({"a.dat": "".join(STORIES), "b.dat": "more"})),
        Case(folder({"AA/wiki_00": "".join(STORIES), "AB/wiki_01": "more text"})),
        Case(folder({"a.jsonl": LINES, "LICENSE": "MIT " * 99})),
        Case(folder({"part-0000.gz": gzip.compress("".join(STORIES).encode())})),
    ],
    Cure.SKIP: [Case(file("a.jsonl", LINES + "no object\n"))],
    Cure.VALIDATION_PATH: [
        Case(folder({"train/a.jsonl": LINES, "valid/a.jsonl": LINES.replace("fox", "cat")})),
    ],
    Cure.DEDUPLICATE: [Case(folder({"a/1.txt": STORIES[0], "b/1.txt": STORIES[0], "c.txt": "".join(STORIES)}))],
    Cure.ENCODING: [
        *(Case(file("a.txt", "".join(STORIES).encode(name))) for name in ("utf-16-le", "utf-16-be", "utf-16")),
        *(Case(file("a.txt", "".join(STORIES).encode(name))) for name in ("utf-32-le", "utf-32-be", "utf-32")),
        Case(file("a.txt", ("山川の道を行く\n" * 40).encode("iso2022_jp"))),
        Case(file("a.jsonl", '{"text": "안녕하세요"}\n'.encode("iso2022_kr") * 40)),
        Case(folder({"a.txt": "Zoë\n" * 40, "b.txt": ("山中相送\n" * 40).encode("hz")}), fields={"text_unit": "line"}),
    ],
    Cure.ENCODING_OF_FILES: [
        Case(
            folder({"a.txt": CP1252, "b.txt": "".join(STORIES).encode("utf-16"), "c.txt": "Zoë"}),
            fields={"encoding": "cp1252"},
        )
    ],
    Cure.OTHER_ENCODING: [
        Case(file("a.txt", CP1252)),
        Case(folder({"a.txt": "Ärger über Häfen\n" * 40, "old.txt": CP1252})),
        Case(file("a.jsonl", '{"text": "Zoë, naïve café"}\n'.encode("latin-1") * 30)),
    ],
    Cure.COLUMN: [
        Case(file("a.jsonl", BODIES), lambda path, message, cure: named_text(message, cure)),
        Case(file("a.csv", table(WORDS, "id,body")), lambda path, message, cure: {"column": "body"}),
        Case(file("a.csv", table(WORDS, "id, body")), lambda path, message, cure: {"column": "body"}),
    ],
    Cure.JSON_FIELD: [
        Case(file("a.json", json.dumps({"version": 1, "data": [{"text": text} for text in STORIES]}, indent=indent)))
        for indent in (None, 2)
    ],
    Cure.JSON_FIELDS: [
        Case(
            file("a.json", json.dumps({"data": [{"text": text} for text in STORIES]})),
            lambda path, message, cure: named_text(message, cure),
            {"json_field": "rows"},
        )
    ],
    Cure.DELIMITER: [
        Case(file("a.csv", table(WORDS, "id;text", ";"))),
        Case(file("a.csv", table(WORDS, "id|text", "|"))),
        Case(file("a.csv", table(WORDS, "id\ttext", "\t"))),
        Case(file("a.tsv", table(WORDS))),
        Case(file("a.csv", table([f'"a; {number}"' for number in range(30)], '"id";"text"', ";"))),
    ],
    Cure.QUOTED: [
        Case(file("a.tsv", table(QUOTED, "id\ttext", "\t"))),
        Case(file("a.tsv", table(QUOTED, '"id"\t"text"', "\t"))),
    ],
    Cure.NOT_QUOTED: [Case(file("a.csv", table(['"I opened.', "It rained.", 'Nobody came."x', *WORDS])))],
    Cure.ABOVE_HEADER: [
        Case(file("a.csv", "# exported in 2024\n" + table(WORDS)), shell),
        Case(file("a.csv", "A title\n\n" + table(WORDS, "id, text")), shell),
        Case(file("a.csv", "sep=,\n" + table(WORDS)), shell),
    ],
    Cure.LINE_ENDS: [Case(file("a.jsonl", LINES.replace("\n", "\r")), shell)],
    Cure.PANDAS: [
        Case(file("a.json", json.dumps({"text": {"0": "a", "1": "b"}})), instead(lambda path: path.write_text(LINES)))
    ],
    Cure.TAIL: [
        Case(folder(NOTES | dict.fromkeys(("book.txt", "book-2.txt"), BOOK)), fields={"validation_fraction": 0.02}),
        Case(folder(NOTES | {"book.txt": BOOK})),
    ],
    Cure.MEND: [
        Case(
            file("a.jsonl", json_lines(GARBLED)),
            instead(lambda path: path.write_text(json_lines([text.encode("cp1252").decode() for text in GARBLED]))),
        )
    ],
}
OF_TOKENIZERS = {Cure.TRAIN_TOKENIZER, Cure.END_TOKEN, Cure.NO_BOS, Cure.VOCAB_SIZE}
ELSEWHERE = {
    *(Cure.ITS_TOKENIZER, Cure.ROWS),  # tests/training/models/test_pretrained.py
    *(
        Cure.GIT_LFS,
        Cure.SAFETENSORS,
        Cure.UNQUANTIZED,
        Cure.DEQUANTIZE,
        Cure.MERGE,
    ),  # tests/tasks/planning/test_pretrained.py
    Cure.DOWNLOAD,  # tests/tasks/store/test_local_copy.py and test_remote.py
}


def test_every_cure_has_a_case() -> None:
    assert {*Cure} == {*CASES} | OF_TOKENIZERS | ELSEWHERE


@pytest.mark.parametrize(
    ("cure", "case"),
    [
        pytest.param(cure, case, id=f"{cure.name.lower()}-{number}")
        for cure, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_cure_that_is_printed_helps(tmp_path: Path, cure: Cure, case: Case) -> None:
    path = case.make(tmp_path)
    message = said(tmp_path, path, **case.fields)
    start = str(cure).partition("{")[0]
    assert start in message
    followed = case.fields | case.follow(path, message, cure)
    path = followed.pop("path", path)
    if "validation_path" in followed:
        followed["validation_path"] = str(path / followed["validation_path"])
    folder, shards = prepare(tmp_path, path, **followed)
    assert all_documents(folder)
    assert not any(start in line for line in shards.ledger_warnings()), "it is not said again"


def pretrained(make: Callable[[Path], Path], home: Path, **config: Any) -> str:
    try:
        tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", path=str(make(home / "tokenizer")), **config))
        special_tokens(tokenizer, masked=False)
    except ValueError as error:
        return str(error)
    return ""


def without_end(folder: Path) -> Path:
    byte_fallback(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(
        json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key != "eos_token"})
    )
    return folder


def test_cures_of_tokenizers_help(tmp_path: Path) -> None:
    message = pretrained(byte_fallback, tmp_path / "few", vocab_size=7)
    size = re.search(r"data\.tokenizer\.vocab_size to (\d+), or to 0", message)
    assert size
    assert not pretrained(byte_fallback, tmp_path / "a", vocab_size=int(size[1]))
    assert Cure.END_TOKEN in pretrained(without_end, tmp_path / "b")
    source = tmp_path / "a.jsonl"
    source.write_text(json_lines([*HELLOS, "unheard-of words"]))
    lacking = {"kind": "pretrained", "path": str(words_without_unknown(tmp_path / "words"))}
    assert Cure.TRAIN_TOKENIZER in said(tmp_path, source, kind="pretrained", tokenizer=lacking)
    assert all_documents(prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 300})[0])
    no_bos = partial(said, tmp_path, source, kind="pretrained")
    own = {"path": str(byte_fallback(tmp_path / "d"))}
    assert Cure.NO_BOS in no_bos(tokenizer=own | {"bos": "yes"})
    assert Cure.NO_BOS not in no_bos(tokenizer=own | {"bos": "no"})
