"""What a stranger's model folder may hold: each function spoils one file, which no door may wait for or choke on."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = b'{"a":' * 100_000
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("nothing")


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**33)  # without blocks on the disk


NOT_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, "is a pipe, a socket or a device"),
    "device": (device, "is a pipe, a socket or a device"),
    "loop": (loop, "cannot be read"),
    "dangling": (dangling, "is a link to nothing"),
    "folder": (folder, "cannot be read"),
}
NOT_OBJECTS: dict[str, tuple[bytes, str]] = {
    "deep": (DEEP, "nested too deeply"),
    "deep list": (b"[" * 100_000, "nested too deeply"),
    "list": (b"[]", "has no fields"),
    "empty": (b"", "is empty"),
    "binary": (b"\xff\xfe\x00", "is damaged"),
    "huge integer": (b'{"a": ' + b"9" * 5000 + b"}", "is damaged"),
    "twice": (b'{"a": 1, "b": {"vocab_size": 1, "vocab_size": 2}}', "`vocab_size` twice"),
}


def tensors(path: Path, header: Any, body: bytes = b"", *, length: int | None = None) -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + body)


# Headers of safetensors files: what json makes of them was taken for what it should be.
HEADERS: dict[str, tuple[Any, ...]] = {
    "a list": ([],),
    "nothing": (b"null",),
    "a number": ({"a": 1},),
    "an entry that is a list": ({"a": [1, 2]},),
    "offsets that are an object": ({"a": TENSOR | {"data_offsets": {}}}, b"0" * 8),
    "nested deeply": (DEEP,),
    "a negative shape": ({"a": TENSOR | {"shape": [-2]}}, b"0" * 8),
    "a shape of words": ({"a": TENSOR | {"shape": ["x"]}}, b"0" * 8),
    "a shape beyond its bytes": ({"a": TENSOR | {"shape": [2**40, 2**40]}}, b"0" * 8),
    "an unknown type": ({"a": TENSOR | {"dtype": "Q9"}}, b"0" * 8),
    "no type": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"0" * 8),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": TENSOR}, b"0" * 8),
    "a huge integer": (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', b"0" * 8),
    "overlapping tensors": ({"a": TENSOR, "b": TENSOR}, b"0" * 8),
    "a hole": ({"a": TENSOR | {"data_offsets": [8, 16]}}, b"0" * 16),
    "bytes of no tensor": ({"a": TENSOR}, b"0" * 80),
    "fewer bytes than its tensor": ({"a": TENSOR}, b"0" * 4),
    "no bytes": (b"",),
}
