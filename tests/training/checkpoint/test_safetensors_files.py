"""Tensors to a file and back: exact at every border of a block, past the page cache, on any file system."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.checkpoint import safetensors_files
from training.checkpoint.safetensors_files import write_tensors
from training.records.checkpoint import WrittenFile

PAGE = 4096


def write(path: Path, tensors: dict[str, torch.Tensor]) -> WrittenFile:
    return write_tensors(path, tensors, abandoned=threading.Event())


def random(length: int) -> torch.Tensor:
    return torch.randint(0, 255, (length,), dtype=torch.uint8)


def assert_same(path: Path, tensors: dict[str, torch.Tensor], written: WrittenFile) -> None:
    content = path.read_bytes()
    assert written == WrittenFile(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    read = load_file(path)
    assert list(read) == sorted(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, 2 * PAGE, 5 * PAGE + 3])
def test_files_are_exact_wherever_a_tensor_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(safetensors_files, "BLOCK_BYTES", 2 * PAGE)
    tensors = {"a": random(length), "b": random(3), "c": random(2 * PAGE - length % PAGE)}
    assert_same(tmp_path / "file", tensors, write(tmp_path / "file", tensors))


def test_a_file_that_fills_its_last_block_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "BLOCK_BYTES", 2 * PAGE)
    header = write(tmp_path / "probe", {"a": random(8000)}).size_bytes - 8000
    tensors = {"a": random(4 * PAGE - header)}
    written = write(tmp_path / "file", tensors)
    assert written.size_bytes == 4 * PAGE
    assert_same(tmp_path / "file", tensors, written)


def test_where_direct_writes_are_refused_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "ALIGNED_BYTES", 1)  # the system refuses a direct write of odd length
    tensors = {"a": random(PAGE + 1), "b": random(77)}
    assert_same(tmp_path / "file", tensors, write(tmp_path / "file", tensors))


def test_a_checkpoint_takes_no_room_in_the_page_cache(tmp_path: Path) -> None:
    if sys.platform != "linux" or kind_of_file_system(tmp_path) not in {"ext2/ext3", "xfs", "btrfs"}:
        pytest.skip("no file system that is known to take direct writes")
    path = tmp_path / "file"
    written = write(path, {"a": random(20 * 2**20)})
    assert cached_pages(path) <= 1  # the last page, if it is not whole
    path.write_bytes(path.read_bytes())
    assert cached_pages(path) >= written.size_bytes // PAGE


def kind_of_file_system(path: Path) -> str:
    done = subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def cached_pages(path: Path) -> int:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // PAGE))()
        start = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), pages) == 0
        del start
    return sum(page & 1 for page in pages)
