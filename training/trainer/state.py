"""What a training run starts from: model, strategy, data, and the checkpoint it resumes."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from training.checkpoint import load
from training.checkpoint.retention import remove_leftovers
from training.data.batch import MicroBatches
from training.data.loader import Loader
from training.models.freezing import trainable_parameters
from training.models.language_model import LanguageModel, unfilled_model
from training.records.checkpoint import CheckpointManifest, damage, finished_checkpoints, newest_intact, reading
from training.records.plan import RunPlan
from training.runtime.mesh import build_mesh
from training.runtime.process import Rank
from training.strategies import Strategy, parallelize
from training.trainer.rebalance import sizes_in_force

HASHING_TIMEOUT = datetime.timedelta(hours=6)  # while ranks hash a checkpoint: its one file of 100 GB takes minutes


@dataclass(frozen=True)
class TrainingState:
    """Everything that training works on."""

    plan: RunPlan
    rank: Rank
    run_dir: Path
    mesh: DeviceMesh
    model: LanguageModel
    trainable_parameters: int  # of the whole model, whatever part of it this rank holds
    strategy: Strategy
    loader: Loader
    micro_batches: MicroBatches  # shared with the loader, the metrics and the checkpoints
    resumed: CheckpointManifest | None

    @property
    def start(self) -> int:
        """The last step of the checkpoint that was resumed; training continues with the next one."""
        return self.resumed.step if self.resumed is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens trained by then."""
        return self.resumed.tokens if self.resumed is not None else 0

    @property
    def val_loss(self) -> float | None:
        """The newest validation's loss by then."""
        return self.resumed.val_loss if self.resumed is not None else None


def restore(plan: RunPlan, *, rank: Rank, run_dir: Path) -> TrainingState:
    """Model, strategy and data, at the newest whole checkpoint if there is one. Collective."""
    found = _agree_on_checkpoint(run_dir, rank)
    with reading(found):
        return build_state(plan, found, rank=rank, run_dir=run_dir)


def build_state(plan: RunPlan, found: Path | None, *, rank: Rank, run_dir: Path) -> TrainingState:
    """Model, strategy and data as the checkpoint `found` has them; None: at step 0. Collective."""
    model, weights = unfilled_model(plan)
    if found is not None:
        weights = load.weights_for(model, found)
    model.train()
    num_trained = trainable_parameters(model)
    mesh = build_mesh(plan)
    strategy = parallelize(plan, mesh, model, weights=weights, device=rank.device)
    # Ranks must not drop the same units, but for tp peers, which share each unit's neighbours.
    torch.manual_seed(plan.config.train.seed + rank.rank // plan.mesh["tp"])
    resumed = load.load_state(found, strategy=strategy, rank=rank, mesh=plan.mesh) if found is not None else None
    if found is None and plan.config.train.optimizer_path:
        load.load_moments(Path(plan.local(plan.config.train.optimizer_path)), strategy)
    micro_batches = MicroBatches(sizes_in_force(plan, resumed), plan.accumulation)
    loader = Loader(plan, dp_rank=mesh["dp"].get_local_rank(), device=rank.device, micro_batches=micro_batches)
    return TrainingState(plan, rank, run_dir, mesh, model, num_trained, strategy, loader, micro_batches, resumed)


def _agree_on_checkpoint(run_dir: Path, rank: Rank) -> Path | None:
    """The newest whole checkpoint: the first rank lists them, and each hashes a part of the files. Collective."""
    folders: list[list[Path]] = [[]]
    if rank.rank == 0:
        remove_leftovers(run_dir)
        folders = [finished_checkpoints(run_dir)]
    patient_group = dist.new_group(timeout=HASHING_TIMEOUT, backend="gloo")
    dist.broadcast_object_list(folders, src=0, group=patient_group)

    def damage_of(folder: Path) -> str | None:
        faults: list[str | None] = [None] * rank.world_size
        own = damage(folder, part=rank.rank, of_parts=rank.world_size)
        dist.all_gather_object(faults, own, group=patient_group)
        return next((fault for fault in faults if fault), None)

    found = newest_intact(folders[0], damage_of=damage_of, log=rank.rank == 0)
    dist.destroy_process_group(patient_group)
    return found
