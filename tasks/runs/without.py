"""Leaves steps' batches out of a run: it then resumes from the checkpoint before the first of them."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from training.records.checkpoint import CHECKPOINT_MANIFEST, KEEP, CheckpointManifest, finished_checkpoints
from training.records.left_out import leave_out, read_left_out
from training.records.memory_checkpoint import MEMORY_RECORD, memory_record

logger = logging.getLogger(__name__)


def read_steps(text: str, *, of: int) -> set[int]:
    """Return the steps that `37,40-42` names. Raises ValueError for other texts, and for steps after the last, `of`."""
    steps: set[int] = set()
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)):
            raise ValueError(f"--without {text}: give steps, for example 37 or 37,40-42")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= of:
            raise ValueError(f"--without {text}: {part.strip()} names none of the run's steps, 1 to {of:,}")
        steps |= {*range(first, last + 1)}
    return steps


def resume_without(run_dir: Path, steps: set[int], *, force: bool) -> None:
    """Write the steps to left_out.json, and delete the checkpoints that were trained on them; nobody trains meanwhile.

    These are the ones on disk and in the memory of hosts; those on a store RunOnStore.leave_out deletes. A step cannot
    be put back. Raises ValueError if one on disk is kept, and, without `force`, if none from before is left.
    """
    whole = finished_checkpoints(run_dir)
    trained_on = [each for each in whole if CheckpointManifest.read(each / CHECKPOINT_MANIFEST).was_trained_on(steps)]
    if kept := [folder for folder in trained_on if (folder / KEEP).exists()]:
        raise ValueError(
            f"checkpoint {kept[0]} was trained on these batches and is kept ({(kept[0] / KEEP).read_text().strip()}): "
            f"delete {kept[0] / KEEP} to allow its deletion, or start a new run"
        )
    left, new = [folder for folder in whole if folder not in trained_on], steps - read_left_out(run_dir).steps.keys()
    memory = run_dir / MEMORY_RECORD
    copy = memory_record(run_dir)
    in_memory = bool(new) and copy is not None and copy.step >= min(new)
    if (trained_on or in_memory) and not left and not force:
        raise ValueError(
            f"no checkpoint from before step {min(steps)} is left, so the run would begin again at step 0: add --force "
            "for that; checkpoint.keep_every_steps keeps more of them"
        )
    leave_out(run_dir, dict.fromkeys(new, "asked for by resume --without"))
    if in_memory:
        memory.unlink()
        logger.warning("%s: the copy in the hosts' memory was trained on these batches: it is not used", run_dir.name)
    if not trained_on:
        return
    for folder in trained_on:
        hidden = folder.with_name(f".{folder.name}.deleted")
        folder.rename(hidden)
        shutil.rmtree(hidden)
    (run_dir / "result.json").unlink(missing_ok=True)
    logger.warning(
        "%s: deleted the checkpoints of steps %s, trained on batches that are now left out; the run goes on from %s",
        run_dir.name,
        ", ".join(str(int(folder.name)) for folder in trained_on),
        f"step {int(left[-1].name)}" if left else "step 0",
    )
