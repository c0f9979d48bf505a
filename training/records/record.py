"""Records: the results of stages, for later stages.

Each is a small JSON file that is written completely or not at all. It begins with the number of its format
(training/facts/formats.py), and one of another number is not read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import stat
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from training.facts.formats import FORMATS, Kind, problem_of

logger = logging.getLogger(__name__)

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
        """Describe what does not fit first."""
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        return cls(path, f"is damaged ({f'{field}: ' if field else ''}{first['msg']})")


class OtherFormat(DamagedRecord):
    """A record of another format, which another version of Shardline wrote."""


class Record(BaseModel):
    """A stage's result. `write` renames a finished file, so that a reader never sees a part of a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    FORMAT: ClassVar[Kind] = "records"
    """The kind of format whose number the record's file begins with; a record within another has no number."""

    def write(self, path: Path) -> None:
        write_atomically(path, self.content())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record. Raises OtherFormat, DamagedRecord or FileNotFoundError."""
        return cls.parse(_content(path), where=path)

    @classmethod
    def read_or_none(cls, path: Path, *, otherwise: str) -> Self | None:
        """Return the record; None if there is none or, with a warning that tells what is done `otherwise`, if it
        cannot be read. For what can be made anew.
        """
        try:
            return cls.read(path)
        except FileNotFoundError:
            return None
        except (DamagedRecord, OSError) as error:
            problem = error.problem if isinstance(error, DamagedRecord) else error
            logger.warning("%s: %s", otherwise, problem)
            return None

    @classmethod
    def fields(cls, path: Path) -> Fields:
        """Read the record without the types of its fields. Raises as `read` does."""
        content = _content(path, most_bytes=MOST_FIELDS_BYTES)
        cls._body(content, where=path)
        return _fields(content, where=path)

    def content(self) -> bytes:
        """Return the bytes of the record's file."""
        head = f'{{\n  "format": {FORMATS[self.FORMAT].number},'
        return f"{head}{self.model_dump_json(indent=2).removeprefix('{')}\n".encode()

    @classmethod
    def parse(cls, content: bytes, *, where: Path | str) -> Self:
        """Return the record in the content of a file. Raises DamagedRecord, which names the file or URL `where`."""
        try:
            return cls.model_validate_json(cls._body(content, where=where))
        except ValidationError as error:
            raise DamagedRecord.of(where, error) from None

    @classmethod
    def check_format(cls, number: int, *, where: Path | str) -> None:
        """Raise OtherFormat unless it is the format of this kind of record; 0: there was no number."""
        if problem := problem_of(cls.FORMAT, number):
            raise OtherFormat(where, problem, cure=FORMATS[cls.FORMAT].cure)

    @classmethod
    def _body(cls, content: bytes, *, where: Path | str) -> bytes:
        """Return the JSON of the fields. Raises OtherFormat; DamagedRecord for what is no record at all."""
        found = HEAD.match(content)
        if found is None:
            _fields(content, where=where)
        cls.check_format(int(found[1]) if found else 0, where=where)
        return HEAD.sub(b"{", content, count=1)


HEAD = re.compile(rb'\s*\{\s*"format":\s*(\d+)\s*,')


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

    def __init__(self, path: Path | str, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.path = path

    def __missing__(self, field: str) -> Any:
        raise DamagedRecord(self.path, f"is damaged (it has no `{field}`)")


def read_fields(path: Path) -> Fields:
    """Read the object in a JSON file that is not a record.

    Raises DamagedRecord, also for a file that is too large or nested too deeply, or names a field twice; or
    FileNotFoundError.
    """
    return _fields(_content(path, most_bytes=MOST_FIELDS_BYTES), where=path)


def _fields(content: bytes, *, where: Path | str) -> Fields:
    try:
        found = json.loads(content, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise DamagedRecord(where, "is damaged (it is nested too deeply)") from None
    except ValueError as error:
        raise DamagedRecord(where, f"is damaged ({error})") from None
    if not isinstance(found, dict):
        raise DamagedRecord(where, "is damaged (it has no fields)")
    return Fields(where, found)


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
