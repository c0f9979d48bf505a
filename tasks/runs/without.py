"""Leaves steps' batches out of a run: it then resumes from the checkpoint before the first of them."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from training.records.checkpoint import CHECKPOINT_MANIFEST, KEEP, CheckpointManifest, finished_checkpoints
from training.records.left_out import leave_out, read_left_out
from training.records.memory_checkpoint import MEMORY_RECORD

logger = logging.getLogger(__name__)


def read_steps(text: str) -> set[int]:
    """Return the steps that `37,40-42` names. Raises ValueError for other texts."""
    steps: set[int] = set()
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)):
            raise ValueError(f"--without {text}: give steps, for example 37 or 37,40-42")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise ValueError(f"--without {text}: steps count from 1, and {part.strip()} names none")
        steps |= {*range(first, last + 1)}
    return steps


def resume_without(run_dir: Path, steps: set[int], *, force: bool) -> None:
    """Write the steps to left_out.json, and delete the checkpoints that were trained on them; nobody trains meanwhile.

    Raises ValueError if one of these is kept, and, without `force`, if none from before is left.
    """
    trained_on = []
    for folder in finished_checkpoints(run_dir):
        known = set(CheckpointManifest.read(folder / CHECKPOINT_MANIFEST).spikes.left_out)
        if min(steps - known, default=int(folder.name) + 1) <= int(folder.name):
            trained_on.append(folder)
    if kept := [folder for folder in trained_on if (folder / KEEP).exists()]:
        raise ValueError(
            f"checkpoint {kept[0]} was trained on these batches and is kept ({(kept[0] / KEEP).read_text().strip()}): "
            "delete its file `keep` to let it be replaced, or start a new run"
        )
    left = [folder for folder in finished_checkpoints(run_dir) if folder not in trained_on]
    if trained_on and not left and not force:
        raise ValueError(
            f"no checkpoint from before step {min(steps)} is left (the oldest is {trained_on[0].name}), so the run "
            "would begin again at step 0: add --force for that; checkpoint.keep_every_steps keeps more of them"
        )
    new = steps - read_left_out(run_dir).steps.keys()
    leave_out(run_dir, dict.fromkeys(new, "asked for by resume --without"))
    if not trained_on:
        return
    for folder in trained_on:
        hidden = folder.with_name(f".{folder.name}.deleted")
        folder.rename(hidden)
        shutil.rmtree(hidden)
    for name in (MEMORY_RECORD, "result.json"):
        (run_dir / name).unlink(missing_ok=True)
    logger.warning(
        "%s: deleted the checkpoints of steps %s, trained on batches that are now left out; the run goes on from %s",
        run_dir.name,
        ", ".join(str(int(folder.name)) for folder in trained_on),
        f"step {int(left[-1].name)}" if left else "step 0",
    )
