"""Safetensors files: written and hashed in one pass, read tensor by tensor.

The format (huggingface.co/docs/safetensors): header length as 8 little-endian bytes, header as JSON, then the
tensors' bytes. The library's `save_file` cannot hash while it writes, so that everything would be read again for the
hash (600 MB here: 2.3 s instead of 0.7 s), and it cannot be stopped before its end.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.records.checkpoint import WrittenFile
from training.records.model_state import open_tensors, weight_map

BLOCK_BYTES = 2**24  # large enough that Python's overhead is small, small enough to stop soon: 10-50 ms
ALIGNED_BYTES = 4096  # direct writes need whole pages, aligned to pages
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Abandoned(Exception):
    """A write was stopped because its checkpoint was abandoned."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, abandoned: threading.Event) -> WrittenFile:
    """Write contiguous CPU tensors of any shape to one file, which is on disk when this returns.

    The bytes bypass the page cache if the file system allows it (`O_DIRECT`): a checkpoint then takes no memory from
    the token shards' pages, and a sixth of the time on a machine whose free memory is not mapped yet (600 MB here: 0.4
    s, through the cache 2.5 s). Copying, hashing and writing release the interpreter lock, so threads do them beside
    training. Raises OSError for errors of the disk, Abandoned soon after the event is set; a part of the file remains
    then.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        _bypass_page_cache(file.fileno(), True)
        hashed: Future[None] | None = None
        for block, length in _blocks(tensors):
            if abandoned.is_set():
                raise Abandoned
            if hashed is not None:
                hashed.result()  # hash of the previous block, whose memory is filled again next
            hashed = hasher.submit(digest.update, block[:length])
            _write(file, block[: -(-length // ALIGNED_BYTES) * ALIGNED_BYTES])
            size += length
        file.truncate(size)  # the last block was padded to its end
        os.fsync(file.fileno())
    return WrittenFile(size_bytes=size, sha256=digest.hexdigest())


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[tuple[memoryview, int]]:
    """Yield the file's bytes in page-aligned blocks, with the number of valid bytes; two blocks are used in turns."""
    blocks = itertools.cycle([memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(2)])
    block, filled = next(blocks), 0
    contents = (tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values())
    for content in itertools.chain([np.frombuffer(_header(tensors), np.uint8)], contents):
        start = 0
        while start < len(content):
            part = content[start : start + BLOCK_BYTES - filled]
            np.copyto(np.frombuffer(block, np.uint8)[filled : filled + len(part)], part)
            start, filled = start + len(part), filled + len(part)
            if filled == BLOCK_BYTES:
                yield block, filled
                block, filled = next(blocks), 0
    if filled:
        yield block, filled


def _write(file: FileIO, content: memoryview) -> None:
    written = 0
    while written < len(content):  # a full disk accepts a part, then raises for the rest
        try:
            written += file.write(content[written:]) or 0
        except OSError as error:
            if error.errno != errno.EINVAL or not _bypass_page_cache(file.fileno(), False):
                raise


def _bypass_page_cache(descriptor: int, wanted: bool) -> bool:
    """Turn direct writes on or off; return False if nothing changed, for example without support in the file system."""
    direct = getattr(os, "O_DIRECT", 0)  # macOS has none
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & direct) == wanted:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ direct)
    except OSError:
        return False
    return True


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8 bytes
    return len(header).to_bytes(8, "little") + header


def index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def file_name(kind: str, *, number: int, of: int) -> str:
    """Return Hugging Face's names: KIND.safetensors, or KIND-00001-of-00004.safetensors; `number` counts from 0."""
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
            self._file_of = weight_map(index)
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
            self._open[name] = open_tensors(self.folder / name, framework="pt")
        return self._open[name]
