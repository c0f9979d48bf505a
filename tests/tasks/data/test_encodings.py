"""Encodings belong to files and lines, and text that was read in a wrong one is said."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from tasks.data.encodings import GarbledText
from tests.support.text_cases import STORIES, json_lines
from tests.support.tiny_corpus import all_documents, assert_read, assert_refused, estimated, prepare, write_files

TEXT = "Ärger über größere Häfen. "
RUSSIAN = "Привет, мир. Как дела? "
JAPANESE = "山川の道を行く。\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (TEXT, "cp1252"),
        (RUSSIAN, "cp1251"),
        *((JAPANESE, each) for each in ("shift_jis", "iso2022_jp", "utf-16", "gb18030")),
    ],
)
@pytest.mark.parametrize("name", ["old.txt", "old.jsonl", "old.csv", "old.json", "old.jsonl.gz"])
def test_another_encoding_is_of_the_files_that_are_not_utf8(
    tmp_path: Path, text: str, encoding: str, name: str
) -> None:
    texts = [f"{number} {text}".strip() for number in range(30)]
    rows = [{"text": each} for each in texts]
    content = {
        "txt": "\n".join(texts),
        "jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "json": json.dumps(rows, ensure_ascii=False),
        "csv": "\n".join(["text", *(f'"{each}"' for each in texts)]),
    }[name.split(".")[1]].encode(encoding)
    new, more = [f"new {each}" for each in texts], f"more {text.strip()}"
    files = {
        name: gzip.compress(content) if name.endswith(".gz") else content,
        "new.jsonl": json_lines(new),
        "more.jsonl": json.dumps({"text": more}, ensure_ascii=False),
    }
    root = write_files(tmp_path / "corpus", files)
    shards = assert_read([*texts, *new, more], tmp_path, root, encoding=encoding, text_unit="line")
    assert not any("encoding" in line for line in shards.ledger_warnings())


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "cp1250"])
def test_lines_that_are_not_utf8_are_named_and_read_alone(tmp_path: Path, unit: str, encoding: str) -> None:
    lines = [f"Zeile {number}: größer und älter\n" for number in range(40)]
    raw = b"".join(line.encode(encoding if number % 4 == 0 else "utf-8") for number, line in enumerate(lines))
    (tmp_path / "a.txt").write_bytes(raw)
    named = (
        r"a\.txt:1: not UTF-8 in 10 of its 40 lines \(1, 5, 9, …\)" if unit == "file" else r"a\.txt:1: invalid UTF-8"
    )
    assert_refused(named, tmp_path, tmp_path / "a.txt", text_unit=unit)
    folder, shards = prepare(tmp_path, tmp_path / "a.txt", text_unit=unit, encoding=encoding, split="tail")
    joined = "".join(all_documents(folder))
    assert joined.replace("\n", "") == "".join(lines).replace("\n", "")
    (warning,) = shards.ledger_warnings()
    assert "a.txt is UTF-8 but for 10 of its 40 lines (1, 5, 9, …), which are read as" in warning
    if unit == "line":
        assert prepare(tmp_path, tmp_path / "a.txt", text_unit=unit, on_error="skip")[1].skipped == 10


def test_encodings_are_given_by_pattern_of_the_files_names(tmp_path: Path) -> None:
    root = write_files(
        tmp_path / "corpus",
        {
            "a.txt": (TEXT * 9).encode(),
            "b.txt": (TEXT * 8).encode("cp1252"),
            "c.sjis.txt": (JAPANESE * 9).encode("shift_jis"),
            "d.ru.txt": (RUSSIAN * 9).encode("koi8-r"),
        },
    )
    encodings = {"*.sjis.txt": "shift_jis", "*.ru.*": "koi8-r", "*": "cp1252"}
    folder, _ = prepare(tmp_path, root, encoding=encodings, split="tail", validation_fraction=0.01)
    joined = "".join(all_documents(folder))
    assert all(text in joined for text in (TEXT * 9, TEXT * 8, JAPANESE * 9, RUSSIAN * 9))
    for unknown in ("martian", {"*": "martian"}):
        refused = r"data\.encoding=martian is no encoding that Python knows: give utf-8"
        assert_refused(refused, tmp_path, root, encoding=unknown)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(JAPANESE, "iso2022_jp"), ("안녕하세요 세계\n", "iso2022_kr"), ("山中相送\n", "hz")],
)
@pytest.mark.parametrize(("start", "name"), [("", "a.txt"), ("A line of English.\n" * 400, "a.txt"), ("", "a.csv")])
def test_text_of_seven_bits_is_never_taken_for_ascii(
    tmp_path: Path, text: str, encoding: str, start: str, name: str
) -> None:
    content = ("text\n" if name == "a.csv" else "") + start + text * 40
    (tmp_path / name).write_bytes(content.encode(encoding))
    assert_refused(rf"is {encoding}: set data\.encoding={encoding}", tmp_path, tmp_path / name)
    folder, _ = prepare(tmp_path, tmp_path / name, encoding=encoding, text_unit="line")
    assert all_documents(folder).count(text.strip()) == 40


def test_lisp_and_terminals_are_no_text_of_seven_bits(tmp_path: Path) -> None:
    text = '(format t "~{abcd~}" list)\n\x1b[31mred\x1b(B\x1b[m ~{ab~} a_{n}~{b}\n' * 5
    (tmp_path / "a.txt").write_text(text)
    folder, _ = prepare(tmp_path, tmp_path / "a.txt", split="tail")
    assert "".join(all_documents(folder)) == text


# Garbled text


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        *(
            (text, encoding)
            for text in (TEXT, RUSSIAN, "“Quoted” — it’s here. ")
            for encoding in ("cp1252", "cp1251", "cp1250")
        ),
        (TEXT, "latin-1"),
        ("“Quoted” — it’s here. ", "gb18030"),
        ("こんにちは世界です", "shift_jis"),
        (TEXT, "mac_roman"),
    ],
)
def test_utf8_that_was_read_as_something_else_is_warned_of(tmp_path: Path, text: str, read_as: str) -> None:
    garbled = (text * 3).encode().decode(read_as, errors="ignore")
    texts = [*STORIES, *(f"{number} {garbled}" for number in range(5))]
    (tmp_path / "a.jsonl").write_text(json_lines(texts))
    (warning,) = prepare(tmp_path, tmp_path / "a.jsonl")[1].ledger_warnings()
    assert re.search(r"read in a wrong encoding, .*in a\.jsonl:41", warning)
    assert warning in [*estimated({"path": str(tmp_path / "a.jsonl")}).lines()]


@pytest.mark.parametrize(("written", "read_as"), [("cp1251", "cp1252"), ("cp1252", "latin-1"), ("utf-8", "ascii")])
def test_other_wrong_readings_are_found(written: str, read_as: str) -> None:
    text = {"cp1251": RUSSIAN, "cp1252": "“Quoted” — it’s here", "utf-8": "Zoë said hello"}[written]
    found = GarbledText()
    found.look_at("a", text.encode(written).decode(read_as, errors="replace"))
    assert found.count == 1


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        RUSSIAN,
        "Für „groß“ und „Spaß“ sagt man «Straße».",
        "NÃO, AMANHÃ… É “SÃO” À LA “PLAGE” À 5 €",
        "ТРЁХ РЁВ С «новым» годом… Їжак їсть РІК СІМ",
        "Žluťoučký kůň ÚPĚL ĎÁBELSKÉ ódy Zażółć gęślą jaźń ŁÓDŹ",
        "ΆΝΘΡΩΠΟΣ και «ένα» ΗΜΈΡΑ Ένας",
        "Şişli İstanbul ığdır ÇAĞLAR Tôi là người Việt Nam",
        JAPANESE,
        "안녕하세요 ½ × ÷ ° § € ™ … “”‘’ — √ ∑ ∏",
        "👩‍🚀 naïve\u00a0— Zoë",
    ],
)
def test_text_of_many_languages_is_not_taken_for_garbled(text: str) -> None:
    found = GarbledText()
    for times in (1, 3, 40):
        found.look_at("a", text * times)
    assert (found.count, found.example) == (0, None)


def test_the_shards_of_another_encoding_are_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((TEXT * 20).encode("cp1252"))
    western, eastern = (
        prepare(tmp_path, tmp_path / "a.txt", encoding=encoding, split="tail")[0] for encoding in ("cp1252", "cp1251")
    )
    assert western != eastern
