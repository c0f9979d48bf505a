"""Encodings belong to files and lines, and text that was read in a wrong one is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.data.encodings import GarbledText
from tasks.data.estimate import estimate_text
from tests.support.text_cases import STORIES, json_lines
from tests.support.tiny_corpus import all_documents, prepare
from training.config.data import DataConfig
from training.config.run import RunConfig

TEXT = "Ärger über größere Häfen. "
RUSSIAN = "Привет, мир. Как дела? "
JAPANESE = "山川の道を行く。\n"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(TEXT, "cp1252"), (RUSSIAN, "cp1251"), (JAPANESE, "shift_jis"), (JAPANESE, "iso2022_jp"), (JAPANESE, "utf-16")],
)
@pytest.mark.parametrize("name", ["old.txt", "old.jsonl", "old.csv"])
def test_another_encoding_is_of_the_files_that_are_not_utf8(
    tmp_path: Path, text: str, encoding: str, name: str
) -> None:
    texts = [f"{number} {text}".strip() for number in range(30)]
    content = {
        "txt": "\n".join(texts),
        "jsonl": "\n".join(json.dumps({"text": each}, ensure_ascii=False) for each in texts),
    }
    content["csv"] = "\n".join(["text", *(f'"{each}"' for each in texts)])
    new = [f"new {each}" for each in texts]
    root = write(
        tmp_path / "corpus",
        {"new.jsonl": json_lines(new).encode(), name: content[name.split(".")[1]].encode(encoding)},
    )
    (root / "more.jsonl").write_text(json.dumps({"text": f"more {text.strip()}"}, ensure_ascii=False) + "\n")
    folder, shards = prepare(tmp_path, root, encoding=encoding, text_unit="line")
    assert sorted(all_documents(folder)) == sorted([*texts, *new, f"more {text.strip()}"])
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
    with pytest.raises(ValueError, match=named):
        prepare(tmp_path, tmp_path / "a.txt", text_unit=unit)
    folder, shards = prepare(tmp_path, tmp_path / "a.txt", text_unit=unit, encoding=encoding, split="tail")
    joined = "".join(all_documents(folder))
    assert joined.replace("\n", "") == "".join(lines).replace("\n", "")
    (warning,) = shards.ledger_warnings()
    assert "a.txt is UTF-8 but for 10 of its 40 lines (1, 5, 9, …), which are read as" in warning
    if unit == "line":
        assert prepare(tmp_path, tmp_path / "a.txt", text_unit=unit, on_error="skip")[1].skipped == 10


def test_encodings_are_given_by_pattern_of_the_files_names(tmp_path: Path) -> None:
    root = write(
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
    with pytest.raises(ValueError, match=r"data\.encoding=martian is no encoding"):
        DataConfig.model_validate({"path": "a", "encoding": {"*": "martian"}})


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
    with pytest.raises(ValueError, match=rf"is {encoding}: set data\.encoding={encoding}"):
        prepare(tmp_path, tmp_path / name)
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
    assert "look as if they had been read in a wrong encoding, such as" in warning
    assert "in a.jsonl:41" in warning
    data = {"path": str(tmp_path / "a.jsonl"), "tokenizer": {"kind": "bytes"}}
    planned = estimate_text(RunConfig.model_validate({"data": data}))
    assert planned
    assert any("read in a wrong encoding" in line and "a.jsonl:41" in line for line in planned.lines())


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
    options: dict[str, Any] = {"split": "tail"}
    western, _ = prepare(tmp_path, tmp_path / "a.txt", encoding="cp1252", **options)
    eastern, _ = prepare(tmp_path, tmp_path / "a.txt", encoding="cp1251", **options)
    assert western != eastern
