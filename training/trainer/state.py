"""Prepares the start of training: model, strategy, data, and the checkpoint that it resumes."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint import load
from training.checkpoint.memory import HostMemory
from training.checkpoint.retention import remove_leftovers
from training.data.batch import MicroBatches
from training.data.loader import Loader
from training.models.freezing import trainable_parameters
from training.models.language_model import LanguageModel, unfilled_model
from training.records.checkpoint import (
    CHECKPOINT_MANIFEST,
    CheckpointManifest,
    damage,
    finished_checkpoints,
    newest_intact,
    reading,
)
from training.records.left_out import read_left_out
from training.records.memory_checkpoint import MEMORY_RECORD, MemoryRecord
from training.records.plan import RunPlan
from training.runtime.mesh import Mesh, build_mesh
from training.runtime.process import Rank
from training.strategies import Strategy, parallelize
from training.strategies.spikes import Spikes
from training.trainer.rebalance import sizes_in_force, with_stages_in_force

logger = logging.getLogger(__name__)

Unfilled = tuple[LanguageModel, Mapping[str, Tensor]]  # of unfilled_model

HASHING_TIMEOUT = datetime.timedelta(hours=6)  # timeout while ranks hash a checkpoint: one file of 100 GB takes minutes


@dataclass(frozen=True)
class TrainingState:
    """All objects that training works on."""

    plan: RunPlan  # with the current stages
    rank: Rank
    run_dir: Path
    mesh: Mesh
    model: LanguageModel
    trainable_parameters: int  # of the whole model, also if this rank holds a part
    strategy: Strategy
    loader: Loader
    micro_batches: MicroBatches  # shared with the loader, the metrics and the checkpoints
    spikes: Spikes  # shared with the metrics, the checkpoints and, with on_spike=skip, the strategy
    resumed: CheckpointManifest | None
    copy: MemoryRecord | None = None  # the checkpoint in the hosts' memory that `resumed` was loaded from

    @property
    def start(self) -> int:
        """The last step of the checkpoint that was resumed; training continues with the next one."""
        return self.resumed.step if self.resumed is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens trained up to that step."""
        return self.resumed.tokens if self.resumed is not None else 0

    @property
    def val_loss(self) -> float | None:
        """The loss of the newest validation up to that step."""
        return self.resumed.val_loss if self.resumed is not None else None


def restore(plan: RunPlan, *, rank: Rank, run_dir: Path, memory: HostMemory | None = None) -> TrainingState:
    """Return model, strategy and data, at the newest complete checkpoint if there is one. Collective.

    A copy in the hosts' memory is used if it is newer than the newest on disk; copies that are not used are removed.
    """
    patient_group = dist.new_group(timeout=HASHING_TIMEOUT, backend="gloo")
    on_disk = _list_checkpoints(run_dir, rank, group=patient_group)
    copy = _newest_in_memory(memory, on_disk) if memory is not None else None
    found: Path | None
    if memory is not None and copy is not None:
        unfilled, found = unfilled_model(plan), memory.whole_folder(copy)
    else:
        unfilled, found = _model_and_checkpoint(plan, on_disk, rank, group=patient_group)
    dist.destroy_process_group(patient_group)
    with reading(found):
        state = build_state(plan, unfilled, found, rank=rank, run_dir=run_dir)
    if memory is not None:
        memory.forget(copy)
    elif rank.rank == 0:
        (run_dir / MEMORY_RECORD).unlink(missing_ok=True)  # from before checkpoint.memory_every_steps became 0
    return replace(state, copy=copy)


def build_state(plan: RunPlan, unfilled: Unfilled, found: Path | None, *, rank: Rank, run_dir: Path) -> TrainingState:
    """Build model, strategy and data at the checkpoint `found`; None: at step 0. Collective."""
    model, weights = unfilled
    if found is not None:
        weights = load.weights_for(model, found)
        plan = with_stages_in_force(plan, CheckpointManifest.read(found / CHECKPOINT_MANIFEST))
    model.train()
    num_trained = trainable_parameters(model)
    mesh = build_mesh(plan)
    strategy = parallelize(plan, mesh, model, weights=weights, device=rank.device)
    # Ranks must not drop the same units, but for tp peers, which share each unit's neighbours, if not its sequence.
    alike = 1 if plan.sequence_parallel else plan.mesh["tp"]
    torch.manual_seed(plan.config.train.seed + rank.rank // alike)
    resumed = load.load_state(found, strategy=strategy, rank=rank, plan=plan) if found is not None else None
    if found is None and plan.config.train.optimizer_path:
        load.load_moments(Path(plan.local(plan.config.train.optimizer_path)), strategy, plan)
    left_out = [sorted(read_left_out(run_dir).steps) if rank.rank == 0 else []]
    dist.broadcast_object_list(left_out, src=0)
    spikes = Spikes(plan.config.train, resumed.spikes if resumed is not None else None, left_out=left_out[0])
    if spikes.on_spike == "skip":
        strategy.spikes = spikes
    micro_batches = MicroBatches(sizes_in_force(plan, resumed))
    loader = Loader(plan, dp_rank=plan.places[rank.rank].dp, device=rank.device, micro_batches=micro_batches)
    return TrainingState(
        plan, rank, run_dir, mesh, model, num_trained, strategy, loader, micro_batches, spikes, resumed
    )


def _list_checkpoints(run_dir: Path, rank: Rank, *, group: dist.ProcessGroup) -> list[Path]:
    """Return the published checkpoints, oldest first, as the first rank sees them. Collective."""
    folders: list[list[Path]] = [[]]
    if rank.rank == 0:
        remove_leftovers(run_dir)
        folders = [_without_left_out_batches(run_dir)]
    dist.broadcast_object_list(folders, src=0, group=group)
    return folders[0]


def _without_left_out_batches(run_dir: Path) -> list[Path]:
    """Return the checkpoints but those trained on a batch that is left out since, such as one from the store.

    Raises RuntimeError if there are only such ones.
    """
    left_out, found = read_left_out(run_dir).steps, finished_checkpoints(run_dir)
    if not left_out:
        return found
    kept = []
    for folder in found:
        try:
            manifest = CheckpointManifest.read(folder / CHECKPOINT_MANIFEST)
        except (OSError, ValueError):
            kept.append(folder)  # it is not whole, which is said where it is tried
            continue
        if manifest.was_trained_on(left_out):
            logger.warning("checkpoint %s was trained on a batch that is left out: it is not used", folder)
        else:
            kept.append(folder)
    if found and not kept:
        raise RuntimeError(
            f"each of the {len(found)} checkpoints in {found[0].parent} was trained on a batch that is left out: "
            "delete the folder to begin at step 0"
        )
    return kept


def _newest_in_memory(memory: HostMemory, on_disk: Sequence[Path]) -> MemoryRecord | None:
    """Return the copy in the hosts' memory, completed on each host, if it is newer than all on disk. Collective."""
    copy, step_on_disk = memory.newest(), max((int(folder.name) for folder in on_disk), default=0)
    if copy is None:
        return None
    fault = memory.make_whole(copy) if copy.step > step_on_disk else "the checkpoint on disk is as new"
    if memory.rank.rank == 0 and fault is None:
        logger.info(
            "continuing after step %d from the hosts' memory: the newest checkpoint on disk is of step %d",
            copy.step,
            step_on_disk,
        )
    elif memory.rank.rank == 0:
        logger.warning(
            "the copy of step %d in the hosts' memory is not used (%s): continuing after step %d",
            copy.step,
            fault,
            step_on_disk,
        )
    return copy if fault is None else None


def _model_and_checkpoint(
    plan: RunPlan, folders: Sequence[Path], rank: Rank, *, group: dist.ProcessGroup
) -> tuple[Unfilled, Path | None]:
    """Return the model, and the newest complete one of these checkpoints. Collective.

    Each rank hashes a part of the files. The newest checkpoint is hashed while the model's class is imported and built.
    """

    def own_damage(folder: Path) -> str | None:
        return damage(folder, part=rank.rank, of_parts=rank.world_size)

    with ThreadPoolExecutor(1) as hashing:
        begun = {folder: hashing.submit(own_damage, folder) for folder in folders[-1:]}
        unfilled = unfilled_model(plan)

    def damage_of(folder: Path) -> str | None:
        faults: list[str | None] = [None] * rank.world_size
        own = begun[folder].result() if folder in begun else own_damage(folder)
        dist.all_gather_object(faults, own, group=group)
        return next((fault for fault in faults if fault), None)

    return unfilled, newest_intact(folders, damage_of=damage_of, log=rank.rank == 0)
