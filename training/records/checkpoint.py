"""A checkpoint's folder: its manifest, its check for completeness, which ones are kept, and locks of readers.

training/checkpoint writes and loads checkpoints; this file needs no torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal, Self

from training.config.parallel import Stages
from training.config.run import RunConfig
from training.facts.formats import Kind
from training.facts.placed import FileName
from training.records.left_out import SpikeState
from training.records.record import DamagedRecord, OtherFormat, Record, SealedRecord, sha256_file

logger = logging.getLogger(__name__)

CHECKPOINT_MANIFEST = "manifest.json"
KEEP = "keep"
STEP = re.compile(r"\d{8,}")  # the name of a checkpoint's folder
FOLDER = re.compile(rf"\.?({STEP.pattern})(?:\.part|-[0-9a-f]{{8}}(?:\.whole)?)?")  # a part of one, or one in memory


class WrittenFile(Record):
    """A file of a checkpoint as it was written, by which damage to it is found."""

    size_bytes: int
    """Size of the file in bytes."""
    sha256: str
    """SHA-256 of the file's content."""


class RankFile(Record):
    """A file of a checkpoint that one rank wrote."""

    written: WrittenFile
    """Size and hash of the file."""
    names: tuple[str, ...]
    """Names of the tensors in the file."""
    tensor_bytes: int
    """Bytes of the file's tensors together, without the header."""


class CheckpointManifest(SealedRecord):
    """The record of a checkpoint: its step, its layout, and the hash of each file."""

    FORMAT: ClassVar[Kind] = "checkpoints"

    step: int
    """Number of optimizer steps that led to the checkpoint's weights."""
    tokens: int
    """Tokens that the run was trained on up to this step, over all ranks."""
    strategy: str
    """Strategy of the ranks that wrote the checkpoint, such as fsdp."""
    optimizer: Literal["adamw", "muon"]
    """Optimizer whose state the checkpoint holds."""
    mesh: dict[str, int]
    """Number of the ranks that wrote the checkpoint, along each axis (pp, dp, cp, tp), as in RankPlan."""
    stages: Stages = ()
    """Number of layers that each pipeline stage had, by replica, as in RankPlan; empty for equal stages."""
    sequence_parallel: bool = False
    """Whether tp ranks each had a piece of every sequence, as in RankPlan."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    config_sha256: str
    """SHA-256 of the config in the plan of the ranks that wrote the checkpoint."""
    val_loss: float | None
    """Loss of the newest validation at this step or before, in nats per token; None: there was none yet."""
    micro_batches: tuple[int, ...]
    """Sequences of one forward pass of each replica, as they were at this step."""
    spikes: SpikeState = SpikeState()
    """State of the search for spikes at this step."""
    files: dict[FileName, WrittenFile]
    """Size and hash of each file in the checkpoint's folder, by its name."""

    @classmethod
    def parse(cls, content: bytes, *, where: Path | str) -> Self:
        """Also raises DamagedRecord if the folder of the manifest has the name of another step."""
        manifest, name = super().parse(content, where=where), str(where).split("/")[-2:][0]
        named = FOLDER.fullmatch(name)
        if named and int(named[1]) != manifest.step:
            raise DamagedRecord(where, f"is of step {manifest.step}, and lies in the folder {name}: it was moved")
        return manifest

    def was_trained_on(self, steps: Iterable[int]) -> bool:
        """Return whether its weights have seen the batch of one of these steps."""
        return any(step <= self.step for step in {*steps}.difference(self.spikes.left_out))


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"{step:08d}"


def finished_checkpoints(run_dir: Path) -> list[Path]:
    """Return the published checkpoints, oldest first; their files are not verified yet."""
    return sorted(
        path for path in (run_dir / "checkpoints").glob("[0-9]*") if STEP.fullmatch(path.name) and path.is_dir()
    )


def averaged_steps(whole: Sequence[CheckpointManifest], config: RunConfig) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints that train.average takes, in order: the last of `whole`, and those
    before it at multiples of checkpoint.every_steps, which do not depend on where a run was stopped.
    """
    if not (config.train.num_averaged and whole):
        return ()
    every, left_out = config.checkpoint.every_steps, whole[-1].spikes.left_out
    regular = [each.step for each in whole[:-1] if each.step % every == 0 and not each.was_trained_on(left_out)]
    return (*regular[1 - config.train.num_averaged :], whole[-1].step)


def averaged_checkpoints(run_dir: Path, config: RunConfig, *, last_step: int) -> list[Path]:
    """Return the checkpoints whose average train.average asks for, oldest first; none if there is only the last."""
    whole = [
        CheckpointManifest.read(folder / CHECKPOINT_MANIFEST)
        for folder in finished_checkpoints(run_dir)
        if int(folder.name) <= last_step and not damage(folder, hashes=False)
    ]
    steps = averaged_steps(whole, config)
    if len(steps) < config.train.num_averaged:
        logger.warning(
            "train.average=%s of %d checkpoints: there are only those of the steps %s",
            *(config.train.average, config.train.num_averaged, steps),
        )
    return [checkpoint_folder(run_dir, step) for step in steps] if len(steps) > 1 else []


def kept_steps(whole: Sequence[CheckpointManifest], config: RunConfig) -> set[int]:
    """Return the steps of the complete checkpoints that the config keeps, in order.

    The best is the one of the lowest validation loss; of several after the same validation, the nearest to it.
    """
    saving = config.checkpoint
    kept = {manifest.step for manifest in whole[-saving.keep_last :]} | {*averaged_steps(whole, config)}
    measured = [(manifest.val_loss, manifest.step) for manifest in whole if manifest.val_loss is not None]
    if saving.keep_best and measured:
        kept.add(min(measured)[1])
    if saving.keep_every_steps:
        kept |= {manifest.step for manifest in whole if manifest.step % saving.keep_every_steps == 0}
    return kept


def check_model(folder: Path) -> None:
    """Raise ValueError if the files of a checkpoint's model differ from its manifest."""
    if fault := damage(folder, only=("model", "config.json")):
        raise ValueError(f"checkpoint {folder} is not whole ({fault}): restore it, or delete it and resume the run")


def damage(
    folder: Path, *, hashes: bool = True, only: tuple[str, ...] = ("",), part: int = 0, of_parts: int = 1
) -> str | None:
    """Describe the damage of a checkpoint; None if it is complete. Without `hashes` only sizes are compared.
    Raises OtherFormat.

    `only`: files whose names begin with this. part, of_parts: hash a part of them, so that several processes share the
    work.
    """
    try:
        named = CheckpointManifest.read(folder / CHECKPOINT_MANIFEST).files
    except FileNotFoundError:
        return "manifest.json is missing"
    except OtherFormat:
        raise
    except DamagedRecord as error:
        return error.problem.removeprefix(f"{folder}/")
    files = {name: expected for name, expected in named.items() if name.startswith(only)}
    for name, expected in files.items():
        if not (folder / name).exists():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != expected.size_bytes:
            return f"{name} has {size} bytes, its manifest says {expected.size_bytes}"
    if not hashes:
        return None
    hashed = sorted(files, key=lambda name: files[name].size_bytes)[part::of_parts]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing releases the interpreter lock
        for name, found in zip(hashed, pool.map(sha256_file, [folder / name for name in hashed]), strict=True):
            if found != files[name].sha256:
                return f"{name} has another sha256 than its manifest says"
    return None


def newest_intact(
    folders: Sequence[Path], *, damage_of: Callable[[Path], str | None] = damage, log: bool = True
) -> Path | None:
    """Return the newest complete one of these checkpoints (oldest first); log the skipped ones with the reason.

    None if there is no checkpoint. Raises RuntimeError if there are checkpoints and none is complete: a start at step 0
    would silently discard the run.
    """
    for folder in reversed(folders):
        fault = damage_of(folder)
        if fault is None:
            return folder
        if log:
            logger.warning("checkpoint %s is not whole (%s): trying the one before it", folder, fault)
    if folders:
        raise RuntimeError(
            f"none of the {len(folders)} checkpoints in {folders[0].parent} is whole: "
            "restore one, or delete the folder to begin at step 0"
        )
    return None


@contextmanager
def reading(folder: Path | None) -> Iterator[None]:
    """Prevent training programs from deleting this checkpoint inside the block; None: do nothing.

    Raises FileNotFoundError if it has no manifest, or was deleted before it could be held.
    """
    if folder is None:
        yield
        return
    path = folder / CHECKPOINT_MANIFEST
    with path.open("rb") as manifest:
        fcntl.flock(manifest, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(manifest.fileno()), path.stat()):
            raise FileNotFoundError(f"checkpoint {folder} was replaced while it was about to be read: start again")
        yield
