"""Each field of a record is explained under the field, for readers of the code; pydantic does not read these texts."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "training" / "records"
FEWEST_WORDS = 3


@functools.cache
def records() -> tuple[ast.ClassDef, ...]:
    """Return Record and all classes that inherit from it: from a record in the same file or in training/records."""
    known, found = {"Record"}, list[ast.ClassDef]()
    shared = [each for file in sorted(RECORDS.glob("*.py")) for each in classes(file)]
    found += inheriting(shared, known)
    known |= {each.name for each in found}
    for package in ("training", "tasks", "flows", "infra"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if file.parent != RECORDS and "Record" in file.read_text():
                found += inheriting(classes(file), known)
    return tuple(found)


def classes(file: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


def inheriting(classes: list[ast.ClassDef], known: set[str]) -> list[ast.ClassDef]:
    """Return the classes that inherit from a known one, or from one that does; and `Record` itself, if it is there."""
    names, found = set(known), list[ast.ClassDef]()
    while new := [each for each in classes if each not in found and (bases(each) & names or each.name == "Record")]:
        found += new
        names |= {each.name for each in new}
    return found


def bases(record: ast.ClassDef) -> set[str]:
    return {base.id for base in record.bases if isinstance(base, ast.Name)}


def fields(record: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the name of each annotated field, and the text that stands under it; empty if there is none."""
    explained_above = set() if record.name == "Record" else {"FORMAT"}  # a class variable, explained in Record
    for node, below in zip(record.body, [*record.body[1:], None], strict=True):
        name = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""
        if name and name not in explained_above:
            yield name, text_of(below)


def text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value.strip()
    return ""


def explains(text: str) -> bool:
    return text.endswith(".") and len(text.split()) >= FEWEST_WORDS and not text.lower().startswith("of ")


def test_each_field_of_a_record_is_explained_under_it() -> None:
    unexplained = [
        f"{record.name}.{name}: {text!r}" for record in records() for name, text in fields(record) if not explains(text)
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


def test_all_records_are_found() -> None:
    names = {record.name for record in records()}
    assert {"Record", "SealedRecord", "RunPlan", "BlamePlan", "LayersAlike", "SourceFigures", "TokenShards"} <= names
    assert {"StrategyRow", "TrackedRun", "RankOrder", "Sent", "LockTag"} <= names
