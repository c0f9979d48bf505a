"""Copies models, tokenizers and checkpoints behind URLs to SHARDLINE_HOME/copies, once for each content."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from pathlib import Path

from tasks.store.model_folder import check_model_folder
from tasks.store.transfer import as_value_errors, download_all, hash_of, listing, size_of
from tasks.workspace.locks import exclusive
from tasks.workspace.paths import home
from training.config.run import RunConfig
from training.store.urls import check_url, is_url

logger = logging.getLogger(__name__)

TIMES = ("mtime", "Last-Modified")  # of a file that the store keeps no hash of


def local_copy(path: str, *, field: str) -> str:
    """Return `path`, or for a URL the folder that has its complete copy.

    The copy is named by the sizes and the store's own hashes of the files, so another content is another copy. Raises
    ValueError, with the cure, if there is no such folder, if the store refuses or does not answer, or if the folder has
    files that no library should open.
    """
    folder = _copied(path.rstrip("/"), field=field) if is_url(path) else Path(path).expanduser()
    if path and folder.is_dir():
        check_model_folder(folder)
    return str(folder) if is_url(path) else path


def local_copies(config: RunConfig) -> dict[str, str]:
    """Return URL -> local folder, for the files that ranks read: the model to start from, and its moments."""
    named = {"model.path": config.model.path, "train.optimizer_path": config.train.optimizer_path}
    return {path: local_copy(path, field=field) for field, path in named.items() if is_url(path)}


def _copied(url: str, *, field: str) -> Path:
    check_url(url, field=field)
    with as_value_errors(f"{field} = {url}"):
        return _copy(url, where=f"{field} = {url}")


def _copy(url: str, *, where: str) -> Path:
    found = listing(url)
    if not found:
        raise ValueError(f"{where}: there is no folder with files at this URL: correct it")
    sizes = {name: size_of(info, where) for name, info in found.items()}
    content = sorted(
        (name, sizes[name], hash_of(info) or str([info.get(key) for key in TIMES])) for name, info in found.items()
    )
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
    folder = home() / "copies" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', url.rpartition('/')[2])}-{digest}"
    with exclusive(
        folder.with_name(f".{folder.name}.lock"), on_wait=lambda: logger.info("waiting for a copy of %s", url)
    ):
        if not folder.exists():
            logger.info("copying %s to %s", url, folder)
            aside = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            download_all(url, found, aside, title=f"copying {url}", num_bytes=sum(sizes.values()))
            for name, expected in sizes.items():
                if (size := (aside / name).stat().st_size) != (expected or size):
                    raise OSError(f"{name} came with {size:,} bytes instead of {expected:,}")
            aside.rename(folder)
    return folder
