"""Safetensors files: written in one pass that hashes as it goes, read tensor by tensor.

The format (huggingface.co/docs/safetensors): header length as 8 little-endian bytes, header as JSON, then the
tensors' bytes. The library's `save_file` can neither be hashed on the way, which saves reading everything again
(600 MB here: 0.7 s with the hash, 2.3 s without), nor be stopped half-way.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from training.records.record import Record

CHUNK_BYTES = 2**24  # long enough that Python costs nothing, short enough to stop soon: 10-50 ms
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


class WrittenFile(Record):
    size_bytes: int
    sha256: str


class Abandoned(Exception):
    """A write was stopped half-way because its checkpoint was abandoned."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, abandoned: threading.Event) -> WrittenFile:
    """Contiguous CPU tensors of any shape -> one file, on disk when this returns.

    Both writing and hashing release the interpreter lock, so threads do them beside training, and beside each other.
    Raises OSError as the disk does, Abandoned soon after the event is set; half a file is left then.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        hashed: Future[None] | None = None
        for chunk in _chunks(tensors):
            if abandoned.is_set():
                raise Abandoned
            if hashed is not None:
                hashed.result()  # of the chunk before
            hashed = hasher.submit(digest.update, chunk)
            written = 0
            while written < len(chunk):  # a full disk accepts a part, then raises on the rest
                written += file.write(chunk[written:]) or 0
            size += len(chunk)
        os.fsync(file.fileno())
    return WrittenFile(size_bytes=size, sha256=digest.hexdigest())


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for tensor in tensors.values():
        assert tensor.is_contiguous()
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(header).to_bytes(8, "little") + header


def index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def file_name(kind: str, *, number: int, of: int) -> str:
    """Hugging Face's names: KIND.safetensors, or KIND-00001-of-00004.safetensors; `number` counts from 0."""
    return f"{kind}.safetensors" if of == 1 else f"{kind}-{number + 1:05d}-of-{of:05d}.safetensors"


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of KIND.safetensors, or of the files that its index names; each is read on access.

    Files are mapped into memory, so that a reader holds only the tensors it works on, on the CPU.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        index, single = folder / index_name(kind), file_name(kind, number=0, of=1)
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        else:
            self._file_of = dict.fromkeys(self._file(single).keys(), single)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file(self._file_of[name]).get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
