"""One checkpoint on its way to the disk: a thread writes this rank's files, the first rank's makes them a checkpoint.

All ranks write at the same time into checkpoints/.STEP.part. When all have, the first one adds index files,
config.json and manifest, and gives the folder its name: a checkpoint is whole or not there.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from training.checkpoint.load import CHECKPOINT_MANIFEST, CheckpointManifest
from training.checkpoint.retention import prune
from training.checkpoint.safetensors_files import Abandoned, WrittenFile, index_name, write_tensors
from training.records.plan import RunPlan
from training.records.record import sha256_file, write_atomically
from training.runtime.process import Rank

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0  # doubled from try to try, up to a minute
JOIN_S = 60.0  # a thread that hangs on a dead disk must not keep the process


@dataclass(frozen=True)
class RankFile:
    """A file that one rank wrote, and the names of the tensors in it."""

    written: WrittenFile
    names: tuple[str, ...]
    tensor_bytes: int


@dataclass(frozen=True)
class Failure:
    rank: int
    path: str
    error: str
    attempt: int


class Writer:
    """The main thread looks at its events, between steps; there is no collective in here."""

    def __init__(
        self, plan: RunPlan, manifest: CheckpointManifest, *, folder: Path, rank: Rank, hf_config: Any
    ) -> None:
        self.plan, self.manifest, self.folder, self.rank, self.hf_config = plan, manifest, folder, rank, hf_config
        self.aside = folder.with_name(f".{folder.name}.part")
        self.files: dict[str, dict[str, Tensor]] = {}
        self.parts: dict[str, RankFile] = {}  # of this rank
        self.all_parts: list[dict[str, RankFile]] = []  # of all ranks; on the first one
        self.written, self.complete, self.published = threading.Event(), threading.Event(), threading.Event()
        self.news, self.abandoned = threading.Event(), threading.Event()
        self.failures: queue.SimpleQueue[Failure] = queue.SimpleQueue()
        self.at, self.renamed = self.aside, False
        self.thread = threading.Thread(target=self._run, name=f"checkpoint-{manifest.step}", daemon=True)

    def start(self, files: dict[str, dict[str, Tensor]]) -> None:
        """Begin to write these tensors, by file name; they must stay as they are until all is published."""
        self.files = files
        self.thread.start()

    def publish(self, all_parts: list[dict[str, RankFile]]) -> None:
        self.all_parts = all_parts
        self.complete.set()

    def abandon(self) -> None:
        """Stop, and leave nothing behind but what hangs on a dead disk."""
        self.abandoned.set()
        self.complete.set()
        self.thread.join(JOIN_S)
        for name in self.files:
            (self.aside / name).unlink(missing_ok=True)
        if self.rank.rank == 0:
            shutil.rmtree(self.aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # other ranks may not have gone yet; the last one takes the folder away
            self.aside.rmdir()

    def _run(self) -> None:
        if not self._until_done(self._write):
            return
        self.written.set()
        self.news.set()
        if self.rank.rank != 0:
            return
        self.complete.wait()
        if self._until_done(self._publish):
            self.published.set()
            self.news.set()
            try:
                prune(self.folder.parents[1], self.plan.config.checkpoint)
            except (OSError, ValueError) as error:
                logger.warning("old checkpoints could not be deleted: %s", error)

    def _until_done(self, action: Callable[[], None]) -> bool:
        """Try until it works; False if nobody waits for it any more, or after checkpoint.max_failures."""
        most = self.plan.config.checkpoint.max_failures
        for attempt in itertools.count(1):
            try:
                action()
            except Abandoned:
                return False
            except Exception as error:  # whatever it is must reach the loop: a thread that dies in silence hangs it
                if not isinstance(error, OSError):
                    logger.exception("checkpoint of step %d", self.manifest.step)
                text = f"{type(error).__name__}: {error}; {_room(self.folder)}"
                self.failures.put(Failure(self.rank.rank, str(self.at), text, attempt))
                self.news.set()
            else:
                return True
            if attempt == most or self.abandoned.wait(min(RETRY_AFTER_S * 2 ** (attempt - 1), 60.0)):
                return False
        raise AssertionError

    def _write(self) -> None:
        """This rank's files; those that an earlier try finished stay."""
        self.aside.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.files.items():
            if name in self.parts:
                continue
            self.at = self.aside / name
            try:
                written = write_tensors(self.at, tensors, abandoned=self.abandoned)
            except BaseException:
                self.at.unlink(missing_ok=True)  # half a file: on a full disk somebody needs the room
                raise
            self.parts[name] = RankFile(written, tuple(tensors), sum(tensor.nbytes for tensor in tensors.values()))

    def _publish(self) -> None:
        """Index files, config.json, manifest; then the folder's name. Each try may begin where the last one fell."""
        if self.abandoned.is_set():
            raise Abandoned
        self.at = self.aside
        if not self.renamed:
            self._complete()
            shutil.rmtree(self.folder, ignore_errors=True)  # of an attempt that got as far, and was found damaged
            self.aside.rename(self.folder)
            self.renamed = True
        _fsync(self.folder.parent)

    def _complete(self) -> None:
        """What makes a Hugging Face folder of the parts, and the manifest."""
        for kind in ("model", "optimizer"):
            _write_index(self.aside, kind, self.all_parts)
        self.hf_config.save_pretrained(self.aside)
        files = {name: part.written for parts in self.all_parts for name, part in parts.items()}
        for path in self.aside.glob("*.json"):
            if path.name != CHECKPOINT_MANIFEST:  # of an earlier try
                _fsync(path)
                files[path.name] = WrittenFile(size_bytes=path.stat().st_size, sha256=sha256_file(path))
        manifest = self.manifest.model_copy(update={"files": dict(sorted(files.items()))})
        manifest.write(self.aside / CHECKPOINT_MANIFEST)
        _fsync(self.aside)


def _write_index(folder: Path, kind: str, all_parts: list[dict[str, RankFile]]) -> None:
    """KIND.safetensors.index.json, where several ranks wrote tensors of this kind."""
    parts = {name: part for parts in all_parts for name, part in parts.items() if name.startswith(f"{kind}-")}
    file_of = {tensor: name for name, part in parts.items() for tensor in part.names}
    assert len(file_of) == sum(len(part.names) for part in parts.values()), "two ranks wrote the same tensor"
    if parts:
        total = sum(part.tensor_bytes for part in parts.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        write_atomically(folder / index_name(kind), json.dumps(index, indent=2) + "\n")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _room(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder.parents[1]).free / 2**30:.2f} GiB are free there"
    except OSError as error:
        return f"the free space is not known ({error})"
