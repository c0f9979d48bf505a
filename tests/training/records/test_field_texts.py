"""Each field of a record is explained under the field, for readers of the code; pydantic does not read these texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import training.records

FILES = sorted(Path(training.records.__path__[0]).glob("*.py"))
FEWEST_WORDS = 3


def records() -> Iterator[ast.ClassDef]:
    """Yield Record and all classes that inherit from it, in any file of the package."""
    classes = [node for file in FILES for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    known, found = {"Record"}, list[ast.ClassDef]()
    while new := [each for each in classes if each not in found and {each.name, *bases(each)} & known]:
        found += new
        known |= {each.name for each in new}
    yield from found


def bases(record: ast.ClassDef) -> set[str]:
    return {base.id for base in record.bases if isinstance(base, ast.Name)}


def fields(record: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the name of each annotated field, and the text that stands under it; empty if there is none."""
    for node, below in zip(record.body, [*record.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, text_of(below)


def text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value.strip()
    return ""


def is_class_variable(record: ast.ClassDef, name: str) -> bool:
    return name == "FORMAT" and record.name != "Record"  # explained in Record


def test_each_field_of_a_record_is_explained_under_it() -> None:
    unexplained = [
        f"{record.name}.{name}: {text!r}"
        for record in records()
        for name, text in fields(record)
        if not is_class_variable(record, name)
        and not (text.endswith(".") and len(text.split()) >= FEWEST_WORDS and not text.lower().startswith("of "))
    ]
    assert not unexplained, "write a sentence under each of these fields: what is it, in which unit?"


def test_no_docstring_of_a_record_explains_a_field() -> None:
    explaining = [
        f"{record.name}: {name}"
        for record in records()
        for name, _ in fields(record)
        if re.search(rf"`{name}`[^.]*?:", ast.get_docstring(record) or "")
    ]
    assert not explaining, "move what the docstring says of these fields to the text under the field"


def test_all_records_of_the_package_are_found() -> None:
    names = {record.name for record in records()}
    assert {"Record", "SealedRecord", "RunPlan", "BlamePlan", "LayersAlike", "SourceFigures", "TokenShards"} <= names
