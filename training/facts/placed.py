"""Names that come from elsewhere (a listing, a manifest, an index), which are placed below a folder, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator

MOST_BYTES = 200  # of a part of a name; file systems take 255, and a file is written under a longer name first
MOST_PATH_BYTES = 4000  # Linux takes 4,095
MOST_PARTS = 16
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
DRIVE = re.compile(r"[A-Za-z]:")


def place(folder: Path, names: Iterable[str], *, source: str) -> list[Path]:
    """Return where the files of these names, which `source` gave, belong below a folder.

    Raises ValueError, with the source and the name, for a name that leads elsewhere or cannot be written.
    """
    given = [safe_name(name, source=source) for name in names]
    inner = {parent.as_posix() for name in given for parent in Path(name).parents}
    placed = []
    for name in given:
        path = folder / name
        if name in inner:
            raise _refused(name, source, "is a file and a folder")
        if len(str(path).encode()) > MOST_PATH_BYTES:
            raise _refused(name, source, f"makes a path of more than {MOST_PATH_BYTES:,} bytes")
        if link := next((each for each in (path, *path.parents[: name.count("/")]) if each.is_symlink()), None):
            raise _refused(name, source, f"leads through the symbolic link {link}")
        placed.append(path)
    return placed


def safe_name(name: str, *, source: str = "a record") -> str:
    """Return a relative name that stays below any folder that it is joined to. Raises ValueError for any other."""
    if why := _problem(name):
        raise _refused(name, source, why)
    return name


FileName = Annotated[str, AfterValidator(safe_name)]


def _problem(name: str) -> str:
    decoded = name
    for _ in range(len(name) if len(name) <= MOST_PATH_BYTES else 0):
        decoded, before = unquote(decoded), decoded
        if decoded == before:
            break
    try:
        longest = max(len(part.encode()) for part in name.split("/"))
    except UnicodeEncodeError:
        return "is not Unicode"
    if longest > MOST_BYTES or len(name.encode()) > MOST_PATH_BYTES:
        return f"has {len(name.encode()):,} bytes: at most {MOST_BYTES} of each part can be written"
    for spelled in (name, decoded):
        parts = spelled.split("/")
        if CONTROL.search(spelled) or "\\" in spelled:
            return "has a control character or a backslash"
        if ".." in parts or spelled.startswith("/") or any(map(DRIVE.match, parts)):
            return "leads out of its folder"
        if {"", "."} & {*parts}:
            return "has an empty part"
        if len(parts) > MOST_PARTS:
            return f"lies more than {MOST_PARTS} folders deep"
    return ""


def _refused(name: str, source: str, why: str) -> ValueError:
    shown = name if len(name) <= MOST_BYTES else f"{name[:MOST_BYTES]}…"
    return ValueError(f"{source} names the file {shown!r}, which {why}: rename it there, or take another source")
