"""Records: the results of stages, for later stages.

Each is a small JSON file that is written completely or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from training.config.credentials import RECORD

MOST_FIELDS_BYTES = 64 * 2**20  # of JSON that may be a stranger's: Python's objects take up to 20 times as much


class DamagedRecord(ValueError):
    """A record that cannot be read; the message names the file and says what to do. `why` follows the file's name.

    `problem`: the message without the cure, for callers who have another.
    """

    def __init__(self, path: Path | str, why: str, *, cure: str = "restore it from a copy, or move it away") -> None:
        self.problem = f"{path} {why}"
        super().__init__(f"{self.problem}: {cure}")

    @classmethod
    def of(cls, path: Path | str, error: ValidationError) -> Self:
        """Describe what does not fit first. A field that is not known here is of a later version."""
        problems = error.errors(include_input=False, include_url=False)
        unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        first = [*unknown, *problems][0]
        field = ".".join(map(str, first["loc"]))
        if unknown:
            return cls(path, f"was written by a newer Shardline (it has `{field}`)", cure="update Shardline here")
        return cls(path, f"is damaged ({f'{field}: ' if field else ''}{first['msg']})")


class Record(BaseModel):
    """A stage's result. `write` renames a finished file, so that a reader never sees a part of a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> None:
        write_atomically(path, self.content())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record. Raises DamagedRecord, or FileNotFoundError."""
        return cls.parse(_content(path), where=path)

    def content(self) -> bytes:
        """Return the bytes of the record's file."""
        return f"{self.model_dump_json(indent=2)}\n".encode()

    @classmethod
    def parse(cls, content: bytes, *, where: Path | str) -> Self:
        """Return the record in the content of a file. Raises DamagedRecord, which names the file or URL `where`."""
        try:
            return cls.model_validate_json(content, context=RECORD)
        except ValidationError as error:
            raise DamagedRecord.of(where, error) from None


class SealedRecord(Record):
    """A record whose file ends in the sha256 of all bytes before it, so that no change of a byte goes unseen."""

    def content(self) -> bytes:
        body = super().content().removesuffix(b"\n}\n")
        return body + _seal(body)

    @classmethod
    def parse(cls, content: bytes, *, where: Path | str) -> Self:
        body, separator, rest = content.rpartition(SEAL)
        if separator + rest != _seal(body):
            raise DamagedRecord(where, "was changed after it was written: its content has another sha256 than it says")
        return super().parse(body + b"\n}\n", where=where)


SEAL = b',\n  "sha256": "'


def _seal(body: bytes) -> bytes:
    return SEAL + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


class Fields(dict[str, Any]):
    """The fields of a JSON file. Raises DamagedRecord for a field that it lacks."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.path = path

    def __missing__(self, field: str) -> Any:
        raise DamagedRecord(self.path, f"is damaged (it has no `{field}`)")


def read_fields(path: Path) -> Fields:
    """Read the object in a JSON file without its types, so that it may be of any version, or not a record.

    Raises DamagedRecord, also for a file that is too large or nested too deeply, or names a field twice; or
    FileNotFoundError.
    """
    content = _content(path, most_bytes=MOST_FIELDS_BYTES)
    try:
        found = json.loads(content, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise DamagedRecord(path, "is damaged (it is nested too deeply)") from None
    except ValueError as error:
        raise DamagedRecord(path, f"is damaged ({error})") from None
    if not isinstance(found, dict):
        raise DamagedRecord(path, "is damaged (it has no fields)")
    return Fields(path, found)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has `{max(names, key=names.count)[:100]}` twice, of which readers take one or the other")
    return found


def check_regular(path: Path, *, most_bytes: int | None = None) -> None:
    """Raise DamagedRecord for what is no file: a pipe would be waited for; and for a file that is too large.

    Raises FileNotFoundError if there is none.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedRecord(path, f"cannot be read ({error.strerror})") from None
    if stat.S_ISDIR(status.st_mode):
        raise DamagedRecord(path, "cannot be read (Is a directory)")
    if not stat.S_ISREG(status.st_mode):
        raise DamagedRecord(path, "is a pipe, a socket or a device, not a file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise DamagedRecord(path, f"has {status.st_size:,} bytes, more than {most_bytes:,}")


def _content(path: Path, *, most_bytes: int | None = None) -> bytes:
    check_regular(path, most_bytes=most_bytes)
    try:
        content = path.read_bytes()
    except PermissionError as error:
        raise DamagedRecord(path, f"cannot be read ({error.strerror})") from None
    if not content.strip(b"\0 \n"):  # zeros: what some file systems leave of a file after a power cut
        raise DamagedRecord(path, "is empty")
    return content


def with_matmul_share(fields: Any) -> Any:
    """Return the fields of a record. Earlier versions called the share of the measured matmul rate `mfu`."""
    if not isinstance(fields, dict) or "mfu" not in fields or "matmul_share" in fields:
        return fields
    return {name: value for name, value in fields.items() if name != "mfu"} | {"matmul_share": fields["mfu"]}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write another file, fsync, rename: after a crash at any point the path has the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.part")  # hosts may share the folder
    with aside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sha256_file(path: Path) -> str:
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_config(config: BaseModel) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()
