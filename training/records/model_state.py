"""A model's state: parameters and persistent buffers by Hugging Face name, as in `state_dict()`, tied ones once.

At each door what was saved is compared with the model by `check_state`: in a checkpoint, at a resume, in an export, in
the registry and in a server.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.facts.placed import safe_name
from training.records.record import DamagedRecord, check_regular, read_fields
from training.records.results import ExportedModel

Shapes = Mapping[str, Sequence[int]]  # of a state's tensors, by name
INTEGER = re.compile(r"[IU]\d")  # safetensors' names of data types
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COPY_AGAIN = "copy it again"
# The bits of floating-point formats that are all set only in NaN and infinite numbers.
EXPONENTS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
CHUNK_BYTES = 1 << 26
NOT_FINITE = (
    "{where} has NaN or infinite numbers in {name}: no run from it has a finite loss, whatever its learning rate: copy "
    "it again if the original is whole, else give a checkpoint from before it diverged"
)
SHOWN = 12  # names in a message; of more, those that differ only in their layer or expert are one pattern


def differences(
    missing: Iterable[str], unexpected: Iterable[str], reshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]]
) -> str:
    """Describe what a file lacks, has besides, and has in another shape (file's, model's), by name; "" if nothing."""
    lacks, besides = listed(missing), listed(unexpected)
    shapes = listed(f"{name} is {[*saved]} instead of {[*own]}" for name, (saved, own) in reshaped.items())
    found = [f"it lacks {lacks}" if lacks else "", f"it has {besides} besides" if besides else "", shapes]
    return "; ".join(filter(None, found))


def state_differences(saved: Shapes, model: Shapes) -> str:
    """Describe, with names, how saved tensors differ from the model's; "" if they do not."""
    both = {name: (saved[name], shape) for name, shape in model.items() if name in saved}
    reshaped = {name: shapes for name, shapes in both.items() if tuple(shapes[0]) != tuple(shapes[1])}
    return differences(model.keys() - saved.keys(), saved.keys() - model.keys(), reshaped)


def check_state(saved: Shapes, model: Shapes, *, where: str, cure: str) -> None:
    """Raise ValueError, with the names and the cure, unless `saved` has the model's tensors in the model's shapes."""
    if found := state_differences(saved, model):
        raise ValueError(f"{where} does not have the model's tensors: {found}: {cure}")


def check_export(folder: Path, exported: ExportedModel) -> None:
    """Raise ValueError unless the export has the tensors of the model that it was made of."""
    cure = "restore the folder, or delete it and export again with `shardline resume RUN`"
    check_state(saved_shapes(folder), exported.tensors, where=str(folder), cure=cure)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder's weights. Raises ValueError if there are none."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{folder} has neither {single.name} nor {index.name}: give the folder of a whole model")
    return [folder / name for name in sorted({*weight_map(index).values()})]


def weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file by an index of safetensors files. Raises ValueError for one that names files elsewhere."""
    try:
        found = read_fields(index)["weight_map"]
    except DamagedRecord as error:
        raise ValueError(f"{error.problem}: {COPY_AGAIN}") from None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index} is damaged (`weight_map` does not name a file for each tensor): {COPY_AGAIN}")
    for name in {*found.values()}:
        if "/" in safe_name(name, source=str(index)):
            raise ValueError(f"{index} names the file {name!r}, in a folder of its own: put it beside the index")
    return found


def open_tensors(path: Path, *, framework: str = "np") -> Any:
    """Open a safetensors file. Raises ValueError, with the reason, for any other; FileNotFoundError for none."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        return safe_open(path, framework)
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, DamagedRecord) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}): {COPY_AGAIN}") from None


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a Hugging Face folder, from the headers of its safetensors files.

    Raises ValueError if there are no such files, or one of them is none, or ends early, or has weights in integers, or
    lacks a tensor that the index names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in (files := weight_files(folder)):
        if not path.exists():
            raise ValueError(f"{path} is missing, which the index beside it names: {COPY_AGAIN}")
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118
                entry = file.get_slice(name)
                if name.endswith(".weight") and INTEGER.match(entry.get_dtype()):
                    raise ValueError(
                        f"{path} has integers in {name} ({entry.get_dtype()}): quantized weights, whose scales are "
                        "unknown here: give the model that they were made of"
                    )
                shapes[name] = tuple(entry.get_shape())
    index = folder / INDEX
    if files != [folder / SINGLE] and (missing := weight_map(index).keys() - shapes.keys()):
        raise ValueError(f"{index} names {listed(missing)}, which its files do not have: {COPY_AGAIN}")
    return shapes


def check_finite(folder: Path, pattern: str = "*") -> None:
    """Raise ValueError, with file and tensor, for a number that is NaN or infinite in a folder's safetensors files.

    Reads all bytes once, by the bits of each format, and keeps none.
    """
    for path in sorted(folder.glob(f"{pattern}.safetensors")):
        status = path.stat()
        if name := _first_not_finite(path, status.st_size, status.st_mtime_ns):
            raise ValueError(NOT_FINITE.format(where=path, name=name))


@functools.cache
def _first_not_finite(path: Path, size: int, changed_ns: int) -> str | None:
    """Return the name of the first tensor with such a number. Size and time make another file of a changed one."""
    open_tensors(path)  # its header is right
    content = np.memmap(path, np.uint8, "r")
    begin = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(content[8:begin].tobytes())
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in EXPONENTS:
            continue
        kind, exponent = EXPONENTS[entry["dtype"]]
        start, stop = (begin + place for place in entry["data_offsets"])
        for place in range(start, stop, CHUNK_BYTES):
            numbers = np.frombuffer(content[place : min(place + CHUNK_BYTES, stop)], kind)
            if (numbers & exponent == exponent).any():
                return str(name)
    return None


def listed(names: Iterable[str]) -> str:
    """Return names in one line; of many, those that differ only in their layer or expert as a pattern.

    >>> listed(["lm_head.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(32))])
    'lm_head.weight, model.layers.*.mlp.up_proj.weight (32)'
    """
    shown = sorted(names)
    if len(shown) > SHOWN:
        alike: dict[str, list[str]] = defaultdict(list)
        for name in shown:
            alike[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)].append(name)
        shown = [each[0] if len(each) == 1 else f"{pattern} ({len(each)})" for pattern, each in alike.items()]
    return ", ".join(shown)
