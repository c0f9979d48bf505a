"""Records that cannot be read are named, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from training.facts.formats import FORMATS
from training.records.record import DamagedRecord, Record, read_fields


class Measured(Record):
    name: str
    seconds: float


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "measured.json"
    Measured(name="disk", seconds=1.5).write(path)
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def write(path: Path, fields: str) -> None:
    path.write_text(f'{{"format": {FORMATS["records"].number}, {fields}}}')


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(bytes(512)), "is empty"),
        (cut, "is damaged (Invalid JSON: EOF"),
        (replace_by_folder, "cannot be read (Is a directory)"),
        (lambda path: write(path, '"name": "disk"'), "is damaged (seconds: Field required)"),
        (lambda path: write(path, '"name": "disk", "seconds": "long"'), "is damaged (seconds: Input should be"),
        (lambda path: write(path, '"name": "disk", "seconds": 1, "watts": 3'), "is damaged (watts: Extra inputs are"),
        (lambda path: path.write_text("[]"), "is damaged ("),
    ],
)
def test_a_damaged_record_is_named_with_the_cure(damage: Callable[[Path], None], why: str, path: Path) -> None:
    damage(path)
    with pytest.raises(DamagedRecord) as caught:
        Measured.read(path)
    assert str(caught.value).startswith(f"{path} {why}")
    assert str(caught.value).endswith(": restore it from a copy, or move it away")
    assert "pydantic" not in str(caught.value)


def test_fields_of_an_empty_file_are_said_once(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(DamagedRecord) as caught:
        read_fields(path)
    assert str(caught.value) == f"{path} is empty: restore it from a copy, or move it away"


def test_a_record_that_is_not_there_is_no_damage(path: Path) -> None:
    path.unlink()
    for read in (Measured.read, read_fields):
        with pytest.raises(FileNotFoundError):
            read(path)


def test_fields_are_read_without_their_types_and_a_missing_one_is_named(path: Path) -> None:
    path.write_text('{"name": "disk", "watts": 3.0}')
    fields = read_fields(path)
    assert fields["watts"] == 3.0
    with pytest.raises(DamagedRecord, match="has no `seconds`"):
        fields["seconds"]
