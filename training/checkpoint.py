"""Checkpoints: one folder per step, whole or not there, in one layout for all strategies.

    checkpoints/00000480/
        model.safetensors, config.json    weights by Hugging Face name: `from_pretrained` loads the folder
        optimizer.safetensors             AdamW moments by parameter name, and the step count
        rng-0.safetensors …               torch's generators, per rank
        manifest.json                     step, tokens, config hash and a sha256 per file; written last

A checkpoint is written aside, fsynced and renamed. One whose manifest is missing or whose hashes are off is
never loaded: the previous one is, with a message. No pickle anywhere.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import LanguageModel
from training.rank import Rank
from training.records import Record, RunPlan, sha256_config, sha256_file
from training.strategies import Strategy

logger = logging.getLogger(__name__)


class Manifest(Record):
    step: int
    tokens: int
    strategy: str
    world_size: int
    config_sha256: str
    files: dict[str, str]


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"{step:08d}"


def save(run_dir: Path, *, step: int, plan: RunPlan, strategy: Strategy, model: LanguageModel, rank: Rank) -> Path:
    """Write the checkpoint of `step`, then delete what exceeds keep_last; called on all ranks. Returns its folder."""
    folder = checkpoint_folder(run_dir, step)
    aside = folder.with_name(f".{folder.name}.part")
    if rank.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    _write_tensors(aside / "model.safetensors", strategy.weights(), keep=rank.rank == 0)
    _write_tensors(aside / "optimizer.safetensors", strategy.optimizer_state(), keep=rank.rank == 0)
    _write_tensors(aside / f"rng-{rank.rank}.safetensors", _rng_state(rank.device), keep=True)
    dist.barrier()
    if rank.rank == 0:
        model.hf.config.save_pretrained(aside)  # type: ignore[union-attr,operator]
        manifest = Manifest(
            step=step,
            tokens=step * plan.batch_tokens,
            strategy=plan.config.parallel.strategy,
            world_size=rank.world_size,
            config_sha256=sha256_config(plan.config),
            files={path.name: sha256_file(path) for path in sorted(aside.iterdir())},
        )
        manifest.write(aside / "manifest.json")
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that got as far, and was found damaged
        aside.rename(folder)
        _fsync(folder.parent)
        _prune(run_dir, keep_last=plan.config.checkpoint.keep_last)
    dist.barrier()
    return folder


def _write_tensors(path: Path, tensors: Iterator[tuple[str, Tensor]], *, keep: bool) -> None:
    """Every rank walks through the tensors, since gathering them takes all; only `keep` writes them."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if keep:
            kept[name] = tensor.to("cpu", copy=tensor.device.type != "cpu").contiguous()
    if keep:
        save_file(kept, path, metadata={"format": "pt"})
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(run_dir: Path, *, keep_last: int) -> None:
    for folder in _folders(run_dir)[:-keep_last]:
        shutil.rmtree(folder)


def _folders(run_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(path for path in (run_dir / "checkpoints").glob("[0-9]*") if path.is_dir())


def newest_whole(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files have the hashes of its manifest; says which ones it passed over, and why.

    None if there is no checkpoint. Raises RuntimeError if there are some, and none is whole: to begin anew then
    would throw the run away without a word.
    """
    folders = _folders(run_dir)
    for folder in reversed(folders):
        fault = damage(folder)
        if fault is None:
            return folder
        logger.warning("checkpoint %s is not whole (%s): looking at the one before it", folder, fault)
    if folders:
        raise RuntimeError(
            f"none of the {len(folders)} checkpoints in {folders[0].parent} is whole: "
            "restore one, or delete the folder to begin at step 0"
        )
    return None


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is whole."""
    if not (folder / "manifest.json").exists():
        return "manifest.json is missing"
    try:
        manifest = Manifest.read(folder / "manifest.json")
    except ValueError:
        return "manifest.json is not a manifest"
    for name, expected in manifest.files.items():
        if not (folder / name).exists():
            return f"{name} is missing"
        if sha256_file(folder / name) != expected:
            return f"{name} has another sha256 than its manifest says"
    return None


def load_weights(folder: Path, model: LanguageModel) -> None:
    """Put a checkpoint's weights into the model, before a strategy takes it over."""
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            parameter.copy_(weights[name])


def load_state(folder: Path, *, strategy: Strategy, rank: Rank) -> int:
    """Put a checkpoint's optimizer moments and generators back; returns its step."""
    strategy.load_optimizer_state(load_file(folder / "optimizer.safetensors"))
    manifest = Manifest.read(folder / "manifest.json")
    if manifest.world_size == rank.world_size:
        _set_rng_state(load_file(folder / f"rng-{rank.rank}.safetensors"), rank.device)
    else:
        logger.warning(
            "checkpoint of %d ranks loaded on %d: dropout goes on with fresh generators, all else is as it was",
            manifest.world_size,
            rank.world_size,
        )
    return manifest.step


def _rng_state(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield "cpu", torch.get_rng_state()
    if device.type == "cuda":
        yield "cuda", torch.cuda.get_rng_state(device)


def _set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
