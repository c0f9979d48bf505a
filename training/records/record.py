"""Records: the results of stages, for later stages.

Each is a small JSON file that is written completely or not at all.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from training.config.credentials import RECORD


class Record(BaseModel):
    """A stage's result. `write` renames a finished file, so that a reader never sees a part of a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> None:
        write_atomically(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes(), context=RECORD)


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_config(config: BaseModel) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()
