"""Checks a model's folder before any library opens a file of it: whoever made it may be a stranger.

A pipe would be waited for, a device or a file of gigabytes read to its end, and JSON that is nested deeply ends a
parser. Tensors are checked by their headers (model_state.py), tokenizer.json by its own library.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.facts.cures import Cure
from training.planner.model_shape import check_numbers
from training.records.record import MOST_FIELDS_BYTES, DamagedRecord, check_regular, read_fields

CURE = "copy the model again, or take another"
MIB = 2**20
POINTER, POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # its first bytes; it is no larger
LARGEST: dict[str, int | None] = {  # bytes of the files that transformers and tokenizers read; the first that fits
    "tokenizer.json": 256 * MIB,
    "*.json": MOST_FIELDS_BYTES,
    "*.jinja": MIB,
    "*.model": 64 * MIB,
    "*.txt": 64 * MIB,
    "*.py": MIB,
    "*.safetensors": None,
    "*.bin": None,
}
FIELDS = (  # files that have one JSON object
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "adapter_config.json",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "*.safetensors.index.json",
)


def check_model_folder(folder: Path) -> None:
    """Raise ValueError, with the file and the reason, for a folder with a file that no library should open.

    `folder` may be one file, as those of the hub are.
    """
    if folder.is_dir():
        _refuse_pointers(folder)
    for path in _files(folder):
        largest = next((size for kind, size in LARGEST.items() if path.match(kind)), 0)
        try:
            if largest != 0:
                check_regular(path, most_bytes=largest)
            fields = read_fields(path) if any(map(path.match, FIELDS)) else {}
            if path.name == "config.json":
                check_numbers(fields)
        except FileNotFoundError:
            raise ValueError(f"{path} is a link to nothing: {CURE}") from None
        except DamagedRecord as error:
            raise ValueError(f"{error.problem}: {CURE}") from None


def _refuse_pointers(folder: Path) -> None:
    """Raise ValueError for a folder that was cloned without the large files of git-lfs."""
    small = (file for file in sorted(folder.iterdir()) if file.is_file() and file.stat().st_size < POINTER_BYTES)
    if pointers := [file.name for file in small if file.read_bytes().startswith(POINTER)]:
        more = f" and {len(pointers) - 1} more are pointers" if len(pointers) > 1 else " is a pointer"
        raise ValueError(
            f"{folder}: {pointers[0]}{more} of git-lfs, not what they stand for: {Cure.GIT_LFS(folder=folder)}"
        )


def _files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        yield folder
        return
    yield from sorted(folder.iterdir())
    templates = folder / "additional_chat_templates"  # in which transformers looks
    if templates.is_dir():
        yield from sorted(templates.iterdir())
