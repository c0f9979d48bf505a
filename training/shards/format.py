"""The token shard format, written and read in this one file.

    FOLDER/manifest.json          TokenShards: what is here; written last, so its presence means the folder is whole
    FOLDER/train/00007.bin        flat little-endian uint16 or uint32 tokens that numpy maps
    FOLDER/train/00007.docs.npy   uint64: where each document ends, in tokens from the start of this shard
    FOLDER/train/00007-0001.bin   more of chunk 7, one file of which is much larger than a shard and could not be cut
    FOLDER/validation/00007.bin   the held-out part of the same chunk of text
    FOLDER/00007.done.json        FinishedChunk: chunk 7 is done, an interrupted run does not repeat it
    FOLDER/library.txt            the library that encodes: gigatoken, or tokenizers and, if gigatoken failed, why
    FOLDER/tokenizer/             tokenizer.json + tokenizer_config.json
    FOLDER/remote.json            RemoteShards, where the token files are on an object store and not here

A whole document is followed by one end token, which counts as part of it. A document cut by the border between
train and validation has none in train. A document may span shards: only the shard in which it ends lists its end.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from training.records.record import DamagedRecord, sha256_file, write_atomically
from training.records.token_shards import FinishedChunk, Shard, TokenShards
from training.shards.remote import remote_folder

Split = Literal["train", "validation"]
Dtype = Literal["uint16", "uint32"]

SPLITS: tuple[Split, ...] = ("train", "validation")
MANIFEST = "manifest.json"
LIBRARY = "library.txt"


def token_dtype(vocab_size: int) -> Dtype:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_shard(
    folder: Path,
    *,
    split: Split,
    index: int,
    tokens: np.ndarray,
    ends: Iterable[int],
    text_bytes: int,
    part: int = 0,
) -> Shard:
    """Write `tokens` (1-d, uint16 or uint32) and the document `ends` (in tokens, rising), each file atomically.

    `index`: number of the chunk; `part`: number of the shard, if the chunk has several of a split. The record's sha256
    is over both files: `cat 00007.bin 00007.docs.npy | sha256sum`.
    """
    name = f"{split}/{index:05d}" + (f"-{part:04d}" if part else "")
    offsets = np.fromiter(ends, dtype="<u8")
    listed = io.BytesIO()
    np.save(listed, offsets)
    content = tokens.astype(_on_disk(str(tokens.dtype)), copy=False).tobytes()
    digest = hashlib.sha256(content)
    digest.update(listed.getvalue())
    write_atomically(folder / f"{name}.docs.npy", listed.getvalue())
    write_atomically(folder / f"{name}.bin", content)
    return Shard(
        name=name,
        split=split,
        tokens=len(tokens),
        documents=len(offsets),
        text_bytes=text_bytes,
        sha256=digest.hexdigest(),
    )


def write_marker(folder: Path, index: int, finished: FinishedChunk) -> None:
    """Record that chunk `index` is finished; call this after all of its shards are written."""
    finished.write(_marker(folder, index))


def finished_chunk(folder: Path, index: int) -> FinishedChunk | None:
    """Return an earlier call's result for chunk `index`, if it is finished and its shards are unchanged, or None."""
    marker = _marker(folder, index)
    if not marker.exists():
        return None
    try:
        finished = FinishedChunk.read(marker)
    except DamagedRecord:
        return None
    return None if any(_damage(folder, shard) for shard in finished.shards) else finished


def read_manifest(folder: Path) -> TokenShards:
    """Return the manifest of a shard folder whose files exist and have the right sizes.

    Raises ValueError, with the cure, if the folder was never finished, or a file is missing or has another size.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(
            f"{folder} has no {MANIFEST}: its corpus has not been tokenized completely; "
            "run `shardline pretrain` with this corpus first, which continues where it stopped"
        )
    try:
        manifest = TokenShards.read(path)
    except DamagedRecord as error:
        raise ValueError(f"{error.problem}: delete {folder} to tokenize again") from None
    for shard in manifest.shards:
        _check_size(folder, shard, manifest.dtype)
    return manifest


def verify_hashes(folder: Path) -> TokenShards:
    """Read every shard and the tokenizer, and compare their sha256 with the manifest's.

    Raises ValueError naming the first that differs.
    """
    manifest = read_manifest(folder)
    damages = (_damage(folder, shard) for shard in manifest.shards)
    if found := next(filter(None, damages), "") or _tokenizer_damage(folder, manifest):
        raise ValueError(f"{found}; delete {folder} to tokenize again")
    return manifest


def discard_damaged(folder: Path) -> list[str]:
    """Delete files that differ from the manifest, so that the next writer makes them again; return the problems.

    A shard is deleted with its chunk's marker. All markers are deleted if there is neither a manifest nor a tokenizer,
    because it is unknown how the tokens were made.
    """
    path = folder / MANIFEST
    try:
        manifest = TokenShards.read(path) if path.exists() else None
    except DamagedRecord as error:
        path.unlink()
        return [error.problem, *discard_damaged(folder)]
    if manifest is None:
        if not (folder / "tokenizer" / "tokenizer.json").exists():
            forget_chunks(folder)
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        return []
    found = []
    for shard in manifest.shards:
        if damage := _damage(folder, shard):
            found.append(damage)
            for file in (_marker(folder, shard.chunk), *_files(folder, shard)):
                file.unlink(missing_ok=True)
    if damage := _tokenizer_damage(folder, manifest):
        found.append(damage)
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    return found


def discard_other_tokens(folder: Path, *, tokenizer_sha256: str) -> None:
    """Delete the markers of chunks that were tokenized by another tokenizer than this one."""
    path = folder / MANIFEST
    if path.exists() and TokenShards.read(path).tokenizer_sha256 != tokenizer_sha256:
        forget_chunks(folder)
        path.unlink()  # last, so that after an interruption the next call does this again


def _on_disk(dtype: str) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")


def _marker(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.done.json"


def _check_size(folder: Path, shard: Shard, dtype: Dtype) -> None:
    """Check only sizes, so that opening a terabyte takes two `stat` per shard; `verify_hashes` checks the rest."""
    if remote_folder(folder, shard.name):  # on a store; its blocks are checked when they are read
        return
    tokens, ends = _files(folder, shard)
    expected = shard.tokens * _on_disk(dtype).itemsize
    size = tokens.stat().st_size if tokens.exists() else 0
    if size != expected:
        raise ValueError(
            f"{tokens} has {size} bytes, its manifest says {expected} ({shard.tokens} tokens of {dtype}): "
            f"it was truncated or replaced; delete {folder} to tokenize again"
        )
    if not ends.exists():
        raise ValueError(f"{ends} is missing; delete {folder} to tokenize again")


def _damage(folder: Path, shard: Shard) -> str:
    """Describe the damage of the shard's files; empty if there is none."""
    if remote_folder(folder, shard.name):
        return ""
    digest = hashlib.sha256()
    for path in _files(folder, shard):
        if not path.exists():
            return f"{path} is missing"
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    if digest.hexdigest() == shard.sha256:
        return ""
    return (
        f"{folder}/{shard.name}.bin or .docs.npy is not the file that was written: sha256 {digest.hexdigest()[:12]}…, "
        f"the record says {shard.sha256[:12]}…"
    )


def _tokenizer_damage(folder: Path, manifest: TokenShards) -> str:
    """Describe the damage of the tokenizer; empty if there is none."""
    path = folder / "tokenizer" / "tokenizer.json"
    if not path.exists():
        return f"{path} is missing"
    sha256 = sha256_file(path)
    if sha256 == manifest.tokenizer_sha256:
        return ""
    return (
        f"{path} is not the tokenizer that made these tokens: sha256 {sha256[:12]}…, "
        f"the manifest says {manifest.tokenizer_sha256[:12]}…"
    )


def forget_chunks(folder: Path) -> None:
    """Delete the markers of all chunks, so that the next writer makes them again."""
    for marker in folder.glob("*.done.json"):
        marker.unlink()


def _files(folder: Path, shard: Shard) -> tuple[Path, Path]:
    return folder / f"{shard.name}.bin", folder / f"{shard.name}.docs.npy"
