"""Token shards on the store: URL/tokens/FINGERPRINT has the files of a shard folder, its manifest last."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from tasks.store.transfer import download_all, read_bytes, sizes, upload, upload_all, write_bytes
from training.config.store import StoreConfig
from training.records.record import DamagedRecord
from training.records.token_shards import TokenShards
from training.shards.format import LIBRARY, MANIFEST
from training.shards.remote import REMOTE, RemoteShards, shard_folders
from training.store.blocks import HASHES, block_hashes

logger = logging.getLogger(__name__)

BLOCKS = ".blocks"  # folder in SHARDLINE_HOME/tokens for the blocks that ranks have read


def shards_url(store: StoreConfig, folder: Path) -> str:
    return f"{store.url.rstrip('/')}/tokens/{folder.name}"


def find_shards(store: StoreConfig, folder: Path) -> bool:
    """Return whether the store has the shards of this folder; if so, fetch all their files except the tokens.

    Ranks then read the tokens from the store. Raises OSError if the store does not answer.
    """
    url = shards_url(store, folder)
    there = sizes(url)
    if MANIFEST not in there:
        return False
    few = [name for name in there if name.startswith("tokenizer/") or name == LIBRARY]
    manifest = TokenShards.parse(read_bytes(f"{url}/{MANIFEST}"), where=f"{url}/{MANIFEST}")
    for number, shard in enumerate(manifest.shards):
        if shard.name.startswith("../../"):  # a store has the folders of a mixture's sources beside each other
            raise DamagedRecord(f"{url}/{MANIFEST}", f"is damaged (shards.{number}.name = {shard.name} lies elsewhere)")
    download_all(url, few, folder)
    download_all(url, [MANIFEST], folder)
    if not manifest.parts:
        cache = folder.parent / BLOCKS / folder.name
        RemoteShards(url=url, cache=str(cache), cache_gib=store.cache_gib).write(folder / REMOTE)
    for other in _parts(folder, manifest):
        beside = other.parent == folder.parent.resolve()
        if not (other / MANIFEST).exists() and not (beside and find_shards(store, other)):
            (folder / MANIFEST).unlink()
            return False
    logger.info("the token shards are on %s: the corpus is not tokenized again", url)
    return True


def upload_shards(store: StoreConfig, folder: Path) -> None:
    """Copy a finished shard folder, and those of a mixture's sources, unless the store has them completely."""
    manifest = TokenShards.read(folder / MANIFEST)
    for other in _parts(folder, manifest):
        upload_shards(store, other)
    if (folder / REMOTE).exists():  # the shards came from the store
        return
    url = shards_url(store, folder)
    there = sizes(url)
    if MANIFEST in there:
        return
    files = list(_files(folder, manifest))
    for path in files:
        if path.suffix in {".bin", ".npy"}:
            name = f"{path.relative_to(folder).as_posix()}{HASHES}"
            if name not in there:
                write_bytes(f"{url}/{name}", block_hashes(path))
    names = [(path, path.relative_to(folder).as_posix()) for path in files]
    missing = [(path, f"{url}/{name}") for path, name in names if there.get(name) != path.stat().st_size]
    upload_all(missing, title="copying the token shards to the store")
    upload(folder / MANIFEST, f"{url}/{MANIFEST}")
    logger.info("copied the token shards to %s", url)


def _parts(folder: Path, manifest: TokenShards) -> list[Path]:
    return shard_folders(folder, manifest) if manifest.parts else []


def _files(folder: Path, manifest: TokenShards) -> Iterator[Path]:
    yield from sorted(path for path in (folder / "tokenizer").iterdir() if path.is_file())
    if (folder / LIBRARY).exists():
        yield folder / LIBRARY
    if not manifest.parts:
        for shard in manifest.shards:
            yield folder / f"{shard.name}.bin"
            yield folder / f"{shard.name}.docs.npy"
