"""Writes one checkpoint: a thread writes this rank's files, and the first rank's thread publishes them.

All ranks write at the same time into checkpoints/.STEP.part. When all have, the first one adds index files,
config.json and manifest, and renames the folder, so that a checkpoint is complete or absent.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from training.checkpoint.retention import prune
from training.checkpoint.safetensors_files import Abandoned, index_name, write_tensors
from training.records.checkpoint import CHECKPOINT_MANIFEST, CheckpointManifest, RankFile, WrittenFile
from training.records.plan import RunPlan
from training.records.record import sha256_file, write_atomically
from training.runtime.process import Rank

logger = logging.getLogger(__name__)

NUM_TRIES = 3  # a run that trains on without checkpoints would lose all
RETRY_AFTER_S = 1.0  # doubled after each try
JOIN_S = 60.0  # a thread that hangs on a dead disk must not keep the process alive


@dataclass(frozen=True)
class WriteFailure:
    rank: int
    path: str
    error: str
    attempt: int


class Writer:
    """A thread that writes; the main thread checks its events between steps. It makes no collective."""

    def __init__(
        self, plan: RunPlan, manifest: CheckpointManifest, *, folder: Path, rank: Rank, hf_config: Any
    ) -> None:
        self.plan, self.manifest, self.folder, self.rank, self.hf_config = plan, manifest, folder, rank, hf_config
        self.partial_folder = folder.with_name(f".{folder.name}.part")
        self.files: dict[str, dict[str, Tensor]] = {}
        self.rank_files: dict[str, RankFile] = {}  # of this rank
        self.all_rank_files: list[dict[str, RankFile]] = []  # of all ranks; on the first one
        self.written, self.complete, self.published = threading.Event(), threading.Event(), threading.Event()
        self.changed, self.abandoned = threading.Event(), threading.Event()
        self.failures: queue.SimpleQueue[WriteFailure] = queue.SimpleQueue()
        self.path, self.renamed = self.partial_folder, False
        self.thread = threading.Thread(target=self._run, name=f"checkpoint-{manifest.step}", daemon=True)

    def start(self, files: dict[str, dict[str, Tensor]]) -> None:
        """Begin to write these tensors, by file name; they must not change until the checkpoint is published."""
        self.files = files
        self.thread.start()

    def publish(self, all_rank_files: list[dict[str, RankFile]]) -> None:
        self.all_rank_files = all_rank_files
        self.complete.set()

    def abandon(self) -> None:
        """Stop and remove the written files; only a thread that hangs on a dead disk remains."""
        self.abandoned.set()
        self.complete.set()
        self.thread.join(JOIN_S)
        for name in self.files:
            (self.partial_folder / name).unlink(missing_ok=True)
        if self.rank.rank == 0:
            shutil.rmtree(self.partial_folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other ranks may not have ended yet; the last one removes the folder
            self.partial_folder.rmdir()

    def _run(self) -> None:
        if not self._retry(self._write):
            return
        self.written.set()
        self.changed.set()
        if self.rank.rank != 0:
            return
        if self.rank.world_size == 1:  # there is no other rank to ask
            self.publish([self.rank_files])
        self.complete.wait()
        if self._retry(self._publish):
            self.published.set()
            self.changed.set()
            try:
                prune(self.folder.parents[1], self.plan.config)
            except (OSError, ValueError) as error:
                logger.warning("old checkpoints could not be deleted: %s", error)

    def _retry(self, action: Callable[[], None]) -> bool:
        """Try until `action` succeeds.

        Returns False if the checkpoint was abandoned, or after NUM_TRIES.
        """
        for attempt in itertools.count(1):
            try:
                action()
            except Abandoned:
                return False
            except Exception as error:  # any error must reach the loop, otherwise it would wait forever
                if not isinstance(error, OSError):
                    logger.exception("checkpoint of step %d", self.manifest.step)
                text = f"{type(error).__name__}: {error}; {free_space(self.folder.parents[1])}"
                self.failures.put(WriteFailure(self.rank.rank, str(self.path), text, attempt))
                self.changed.set()
            else:
                return True
            if attempt == NUM_TRIES or self.abandoned.wait(RETRY_AFTER_S * 2 ** (attempt - 1)):
                return False
        raise AssertionError

    def _write(self) -> None:
        """Write this rank's files; files that an earlier try finished stay."""
        self.partial_folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.files.items():
            if name in self.rank_files:
                continue
            self.path = self.partial_folder / name
            self.rank_files[name] = write_rank_file(self.path, tensors, abandoned=self.abandoned)

    def _publish(self) -> None:
        """Add index files, config.json and manifest, then rename the folder.

        A retry continues where the last one failed.
        """
        if self.abandoned.is_set():
            raise Abandoned
        self.path = self.partial_folder
        if not self.renamed:
            self._complete()
            shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier attempt, and found damaged
            self.partial_folder.rename(self.folder)
            self.renamed = True
        _fsync(self.folder.parent)

    def _complete(self) -> None:
        """Write the index files and config.json, which make it a Hugging Face folder, and the manifest."""
        for kind in ("model", "optimizer"):
            write_index(self.partial_folder, kind, self.all_rank_files)
        self.hf_config.save_pretrained(self.partial_folder)
        files = {name: file.written for rank_files in self.all_rank_files for name, file in rank_files.items()}
        for path in self.partial_folder.glob("*.json"):
            if path.name != CHECKPOINT_MANIFEST:  # from an earlier try
                _fsync(path)
                files[path.name] = WrittenFile(size_bytes=path.stat().st_size, sha256=sha256_file(path))
        manifest = self.manifest.model_copy(update={"files": dict(sorted(files.items()))})
        manifest.write(self.partial_folder / CHECKPOINT_MANIFEST)
        _fsync(self.partial_folder)


def write_rank_file(path: Path, tensors: Mapping[str, Tensor], *, abandoned: threading.Event) -> RankFile:
    """Write a file of a checkpoint. Raises as `write_tensors` does, and then removes the file."""
    try:
        written = write_tensors(path, tensors, abandoned=abandoned)
    except BaseException:
        path.unlink(missing_ok=True)  # a partial file takes space on a full disk
        raise
    size = sum(tensor.nbytes for tensor in tensors.values())
    return RankFile(written=written, names=tuple(tensors), tensor_bytes=size)


def write_index(folder: Path, kind: str, all_rank_files: Iterable[Mapping[str, RankFile]]) -> None:
    """Write KIND.safetensors.index.json, if several ranks wrote tensors of this kind."""
    named = {name: file for files in all_rank_files for name, file in files.items() if name.startswith(f"{kind}-")}
    file_of = {tensor: name for name, file in named.items() for tensor in file.names}
    assert len(file_of) == sum(len(file.names) for file in named.values()), "two ranks wrote the same tensor"
    if named:
        total = sum(file.tensor_bytes for file in named.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        write_atomically(folder / index_name(kind), json.dumps(index, indent=2) + "\n")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space(folder: Path) -> str:
    """Return the free space of the folder's file system in words."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB are free in {folder}"
    except OSError as error:
        return f"the free space is unknown ({error})"
