"""Copies a checkpoint's weights into Hugging Face files, tensor by tensor, for models that fit no host's memory."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from training.checkpoint.averaged_weights import AveragedWeights
from training.checkpoint.safetensors_files import TensorFiles, file_name
from training.checkpoint.writer import write_index, write_rank_file
from training.records.checkpoint import RankFile, WrittenFile

FILE_BYTES = 5 * 10**9  # of tensors in a file, as on the Hugging Face hub
AVERAGED_BYTES = 10**9
CHECKED_NUMBERS = 2**22  # at once


def copy_weights(
    checkpoint: Path,
    folder: Path,
    *,
    file_bytes: int = FILE_BYTES,
    buffers: Collection[str] = (),
    average: AveragedWeights | None = None,
) -> dict[str, WrittenFile]:
    """Write model-00001-of-0000N.safetensors … and their index to `folder`, or model.safetensors if one is enough.

    The checkpoint's files are mapped, and for each new file mapped anew: of its tensors there are never more in memory
    than those of one new file, in pages that the kernel can drop, and two blocks that are being hashed and written.
    An `average` is written in the weights' place, in files of AVERAGED_BYTES, which are held in memory one by one.
    Raises ValueError if a weight is not finite; `buffers` may be (bounds of activations that there are none of).
    """
    files = list(
        _dealt_out(TensorFiles(checkpoint, "model"), min(file_bytes, AVERAGED_BYTES) if average else file_bytes)
    )
    written: dict[str, RankFile] = {}
    for number, names in enumerate(files):
        source = average or TensorFiles(checkpoint, "model")
        file = file_name("model", number=number, of=len(files))
        tensors = {name: source[name] for name in names}
        for name, tensor in tensors.items():
            parts = () if name in buffers else tensor.flatten().split(CHECKED_NUMBERS)
            if not all(torch.isfinite(part).all() for part in parts):
                raise ValueError(f"{name} in checkpoint {checkpoint} is not finite: export an earlier checkpoint")
        written[file] = write_rank_file(folder / file, tensors, abandoned=threading.Event())
    if len(files) > 1:
        write_index(folder, "model", [written])
    return {file: each.written for file, each in written.items()}


def _dealt_out(source: TensorFiles, file_bytes: int) -> Iterator[list[str]]:
    """Names of the tensors of each file, in their order; of more bytes than that only where one tensor has more."""
    names: list[str] = []
    size = 0
    for name, tensor in source.items():
        if names and size + tensor.nbytes > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names
