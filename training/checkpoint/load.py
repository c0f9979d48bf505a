"""Checkpoints: one folder per step, whole or not there, in one layout for all strategies.

    checkpoints/00000480/
        model.safetensors, config.json    weights by Hugging Face name: `from_pretrained` loads the folder
        optimizer.safetensors             AdamW moments by parameter name, and the step count
        rng-0.safetensors …               torch's generators, per rank
        own-0.safetensors …               what only one rank holds: compression's residuals, if there are any
        manifest.json                     step, tokens, config hash, size and sha256 of each file; written last

Several ranks write KIND-00001-of-00004.safetensors …, and KIND.safetensors.index.json says which tensor is where.
saver.py writes them, retention.py deletes them; here they are found, checked and loaded. One whose
manifest is missing or whose hashes are off is never loaded: the previous one is, with a message. No pickle anywhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.checkpoint.safetensors_files import TensorFiles, WrittenFile
from training.models.language_model import LanguageModel
from training.records.record import Record, sha256_file
from training.runtime.process import Rank
from training.strategies import Strategy

logger = logging.getLogger(__name__)

CHECKPOINT_MANIFEST = "manifest.json"


class CheckpointManifest(Record):
    """The record of a checkpoint: its step, its layout, and the hash of each file.

    `val_loss`: of the newest validation at this step or before, nats per token; None: there was none yet.
    `micro_batches`: by replica, as they were at this step.
    """

    step: int
    tokens: int
    strategy: str
    mesh: dict[str, int]
    world_size: int
    config_sha256: str
    val_loss: float | None
    micro_batches: tuple[int, ...] = ()
    files: dict[str, WrittenFile]


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"{step:08d}"


def finished_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first; their files are not verified yet."""
    return sorted(path for path in (run_dir / "checkpoints").glob("[0-9]*") if path.is_dir())


def check_model(folder: Path) -> None:
    """Raises ValueError if what a checkpoint's model is read from is not what its manifest says."""
    if fault := damage(folder, only=("model", "config.json")):
        raise ValueError(f"checkpoint {folder} is not whole ({fault}): restore it, or delete it and resume the run")


def damage(
    folder: Path, *, hashes: bool = True, only: tuple[str, ...] = ("",), part: int = 0, of_parts: int = 1
) -> str | None:
    """Describe the damage of a checkpoint, None if it is whole; without `hashes` only sizes are compared.

    `only`: files whose names begin so. part, of_parts: hash a part of them, so that several processes share the work.
    """
    if not (folder / CHECKPOINT_MANIFEST).exists():
        return "manifest.json is missing"
    try:
        named = CheckpointManifest.read(folder / CHECKPOINT_MANIFEST).files
    except ValueError:
        return "manifest.json is not a manifest"
    files = {name: expected for name, expected in named.items() if name.startswith(only)}
    for name, expected in files.items():
        if not (folder / name).exists():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != expected.size_bytes:
            return f"{name} has {size} bytes, its manifest says {expected.size_bytes}"
    if not hashes:
        return None
    hashed = sorted(files, key=lambda name: files[name].size_bytes)[part::of_parts]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing leaves the interpreter lock alone
        for name, found in zip(hashed, pool.map(sha256_file, [folder / name for name in hashed]), strict=True):
            if found != files[name].sha256:
                return f"{name} has another sha256 than its manifest says"
    return None


def newest_intact(
    folders: Sequence[Path], *, damage_of: Callable[[Path], str | None] = damage, log: bool = True
) -> Path | None:
    """The newest of these checkpoints, oldest first, that is whole; logs which ones it passed over, and why.

    None if there is no checkpoint. Raises RuntimeError if there are some, and none is whole: to begin at step 0 then
    would discard the run silently.
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


def weights_for(model: LanguageModel, folder: Path) -> TensorFiles:
    """A checkpoint's weights, to be read tensor by tensor.

    Raises ValueError if the model has a weight that the checkpoint lacks, or has in another shape.
    """
    weights = TensorFiles(folder, "model")
    for name, parameter in model.hf.named_parameters():
        saved = weights.get(name)
        if saved is None or saved.shape != parameter.shape:
            found = "is not there" if saved is None else f"is {list(saved.shape)}"
            raise ValueError(
                f"the model's {name} is {list(parameter.shape)}, in checkpoint {folder} it {found}: "
                "resume with the model section that it was trained with, or start a new run"
            )
    return weights


def load_state(folder: Path, *, strategy: Strategy, rank: Rank, mesh: dict[str, int]) -> CheckpointManifest:
    """Restore a checkpoint's optimizer moments, and on the same mesh each rank's generators and own state.

    On another mesh generators start fresh, because tp peers must draw the same numbers.
    """
    strategy.load_optimizer_state(TensorFiles(folder, "optimizer"))
    manifest = CheckpointManifest.read(folder / CHECKPOINT_MANIFEST)
    if manifest.mesh == mesh:
        _set_rng_state(load_file(folder / rng_name(rank)), rank.device)
        _load_rank_state(folder, strategy, rank)
    else:
        logger.warning(
            "checkpoint of ranks %s loaded on %s: dropout continues with fresh generators%s; all else is restored",
            manifest.mesh,
            mesh,
            ", each rank's own state (compression, local-sgd) starts fresh"
            if (folder / rank_state_file(0)).exists()
            else "",
        )
    return manifest


def load_moments(folder: Path, strategy: Strategy) -> None:
    """Begin with the AdamW moments and the step count of another run's checkpoint, on whatever ranks.

    Raises ValueError if the checkpoint is not whole, or has none for a parameter that is trained.
    """
    if fault := damage(folder, hashes=False, only=("optimizer",)):
        raise ValueError(f"train.optimizer_path = {folder} is no whole checkpoint ({fault}): give another, or none")
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
    """The generators that dropout draws from; the CPU's and this rank's GPU's."""
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
