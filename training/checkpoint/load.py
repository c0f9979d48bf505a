"""Checkpoints: one folder per step, complete or absent, in one layout for all strategies.

    checkpoints/00000480/
        model.safetensors, config.json    `state_dict()`, weights and buffers: `from_pretrained` loads the folder
        optimizer.safetensors             moments by parameter name, and the step count
        rng-0.safetensors …               torch's generators, per rank
        own-0.safetensors …               what only one rank holds: compression's residuals, if there are any
        manifest.json                     step, tokens, config hash, size and sha256 of each file, its own
                                          sha256; written last

Several ranks write KIND-00001-of-00004.safetensors …, and KIND.safetensors.index.json says which file has which tensor.
saver.py writes them, retention.py deletes them; this file finds, checks and loads them. A checkpoint without a
manifest, with a wrong hash, or in the folder of another step is never loaded: the previous one is loaded instead, with
a message. No pickle is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from training.checkpoint.safetensors_files import TensorFiles
from training.models.language_model import LanguageModel
from training.records.checkpoint import CHECKPOINT_MANIFEST, CheckpointManifest, damage
from training.records.model_state import check_state, saved_shapes
from training.records.plan import RankPlan, describe_stages
from training.runtime.process import Rank
from training.strategies import Strategy

logger = logging.getLogger(__name__)


def weights_for(model: LanguageModel, folder: Path) -> Mapping[str, Tensor]:
    """Return a checkpoint's weights and buffers, which are read tensor by tensor.

    Raises ValueError, with the names, if the checkpoint does not have the model's tensors.
    """
    cure = "resume with the model section that it was trained with, or start a new run"
    check_state(saved_shapes(folder), model.state_shapes, where=f"checkpoint {folder}", cure=cure)
    return TensorFiles(folder, "model")


def load_state(folder: Path, *, strategy: Strategy, rank: Rank, plan: RankPlan) -> CheckpointManifest:
    """Restore a checkpoint's optimizer moments, and on the same mesh each rank's generators and own state.

    On another mesh generators start fresh, because tp peers must draw the same numbers (different ones under sequence
    parallelism).
    """
    manifest = CheckpointManifest.read(folder / CHECKPOINT_MANIFEST)
    if _has_moments_of(manifest, plan, folder):
        strategy.load_optimizer_state(TensorFiles(folder, "optimizer"))
    saved = (manifest.mesh, manifest.stages, manifest.sequence_parallel)
    if saved == (plan.mesh, plan.stages, plan.sequence_parallel):
        _set_rng_state(load_file(folder / rng_name(rank)), rank.device)
        _load_rank_state(folder, strategy, rank)
    else:
        logger.warning(
            "checkpoint of ranks %s%s loaded on %s%s: dropout continues with fresh generators%s; all else is restored",
            manifest.mesh,
            describe_stages(manifest.stages),
            plan.mesh,
            describe_stages(plan.stages),
            ", each rank's own state (compression, local-sgd) starts fresh"
            if (folder / rank_state_file(0)).exists()
            else "",
        )
    return manifest


def _has_moments_of(manifest: CheckpointManifest, plan: RankPlan, folder: Path) -> bool:
    """Return whether a checkpoint's moments are those of the plan's optimizer; if not, say what happens."""
    asked = plan.config.train.optimizer
    if manifest.optimizer != asked and dist.get_rank() == 0:
        logger.warning(
            "checkpoint %s has the moments of train.optimizer=%s, which %s does not take: training begins with "
            "moments of zero, and with the optimizer's first step (train.optimizer=%s keeps them)",
            folder,
            manifest.optimizer,
            asked,
            manifest.optimizer,
        )
    return manifest.optimizer == asked


def load_moments(folder: Path, strategy: Strategy, plan: RankPlan) -> None:
    """Begin with the moments and the step count of another run's checkpoint, on any ranks.

    Those of another optimizer are left, and it is said.

    Raises ValueError if the checkpoint is incomplete, or has no moments for a trained parameter.
    """
    if fault := damage(folder, hashes=False, only=("optimizer",)):
        raise ValueError(f"train.optimizer_path = {folder} is no whole checkpoint ({fault}): give another, or none")
    if not _has_moments_of(CheckpointManifest.read(folder / CHECKPOINT_MANIFEST), plan, folder):
        return
    try:
        strategy.load_optimizer_state(TensorFiles(folder, "optimizer"))
    except KeyError as error:
        raise ValueError(
            f"train.optimizer_path = {folder} has no {error}: it is of another model; leave it out to begin with "
            "moments of zero"
        ) from None


def _load_rank_state(folder: Path, strategy: Strategy, rank: Rank) -> None:
    path, expected = folder / rank_state_file(rank.rank), strategy.rank_state()
    saved = load_file(path) if path.exists() else {}
    if {name: tensor.shape for name, tensor in saved.items()} == {name: t.shape for name, t in expected.items()}:
        strategy.load_rank_state(saved)
    elif rank.rank == 0:
        logger.warning(
            "checkpoint %s holds %s of each rank's own state, this run needs %s: it starts fresh, the rest is "
            "restored; parallel.strategy, parallel.compression or their settings have changed",
            folder,
            _size_of(saved),
            _size_of(expected),
        )


def _size_of(tensors: Mapping[str, Tensor]) -> str:
    return f"{len(tensors)} tensors of {sum(tensor.nbytes for tensor in tensors.values()) / 2**20:.1f} MiB"


def rank_state_file(rank: int) -> str:
    return f"own-{rank}.safetensors"


def rng_name(rank: Rank) -> str:
    return f"rng-{rank.rank}.safetensors"


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of dropout's generators: the CPU's and this rank's GPU's."""
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
