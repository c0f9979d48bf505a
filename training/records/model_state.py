"""A model's state: parameters and persistent buffers by Hugging Face name, as in `state_dict()`, tied ones once.

At each door what was saved is compared with the model by `check_state`: in a checkpoint, at a resume, in an export, in
the registry and in a server.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from training.records.results import ExportedModel

logger = logging.getLogger(__name__)

Shapes = Mapping[str, Sequence[int]]  # of a state's tensors, by name
INTEGER = re.compile(r"[IU]\d")  # safetensors' names of data types
SHOWN = 12  # names in a message; of more, those that differ only in their layer or expert are one pattern
WITHOUT_BUFFERS = ("llama", "gpt2", "bert")  # model types for which what older versions saved was the whole state


def differences(
    missing: Iterable[str], unexpected: Iterable[str], reshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]]
) -> str:
    """Describe what a file lacks, has besides, and has in another shape (file's, model's), by name; "" if nothing."""
    lacks, besides = listed(missing), listed(unexpected)
    shapes = listed(f"{name} is {[*saved]} instead of {[*own]}" for name, (saved, own) in reshaped.items())
    found = [f"it lacks {lacks}" if lacks else "", f"it has {besides} besides" if besides else "", shapes]
    return "; ".join(filter(None, found))


def state_differences(saved: Shapes, model: Shapes) -> str:
    """Describe, with names, how saved tensors differ from the model's; "" if they do not."""
    both = {name: (saved[name], shape) for name, shape in model.items() if name in saved}
    reshaped = {name: shapes for name, shapes in both.items() if tuple(shapes[0]) != tuple(shapes[1])}
    return differences(model.keys() - saved.keys(), saved.keys() - model.keys(), reshaped)


def check_state(saved: Shapes, model: Shapes, *, where: str, cure: str) -> None:
    """Raise ValueError, with the names and the cure, unless `saved` has the model's tensors in the model's shapes."""
    if found := state_differences(saved, model):
        raise ValueError(f"{where} does not have the model's tensors: {found}: {cure}")


def check_export(folder: Path, exported: ExportedModel) -> None:
    """Raise ValueError unless the export has the tensors of the model that it was made of.

    The record of an older version does not name them: this is said if the class may have buffers, which it left out.
    """
    if exported.tensors:
        cure = "restore the folder, or delete it and export again with `shardline resume RUN`"
        return check_state(saved_shapes(folder), exported.tensors, where=str(folder), cure=cure)
    kind = json.loads((folder / "config.json").read_bytes()).get("model_type", "unknown")
    if kind not in WITHOUT_BUFFERS:
        logger.warning(
            "%s was exported by an older version of Shardline, which left a model's persistent buffers out; if its "
            "class (%s) has any, it is another model than was trained: `shardline resume RUN train.steps=MORE` exports "
            "a whole one",
            folder,
            kind,
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder's weights. Raises ValueError if there are none."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{folder} has neither {single.name} nor {index.name}: give the folder of a whole model")
    return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a Hugging Face folder, from the headers of its safetensors files.

    Raises ValueError if there are no such files, or one of them is none, or ends early, or has weights in integers.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                length, most = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
                header = json.loads(file.read(min(length, most)))  # what is no such file may claim any length
            header.pop("__metadata__", None)
            whole = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if most < whole:
                raise ValueError(f"it ends after {most:,} of {whole:,} bytes")
            shapes |= {tensor: tuple(entry["shape"]) for tensor, entry in header.items()}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be read as safetensors ({type(error).__name__}: {error}): copy it again"
            ) from None
        rounded = (
            tensor for tensor, entry in header.items() if tensor.endswith(".weight") and INTEGER.match(entry["dtype"])
        )
        if tensor := next(rounded, None):
            raise ValueError(
                f"{path} has integers in {tensor} ({header[tensor]['dtype']}): quantized weights, whose "
                "scales are unknown here: give the model that they were made of"
            )
    return shapes


def listed(names: Iterable[str]) -> str:
    """Return names in one line; of many, those that differ only in their layer or expert as a pattern.

    >>> listed(["lm_head.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(32))])
    'lm_head.weight, model.layers.*.mlp.up_proj.weight (32)'
    """
    shown = sorted(names)
    if len(shown) > SHOWN:
        alike: dict[str, list[str]] = defaultdict(list)
        for name in shown:
            alike[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)].append(name)
        shown = [each[0] if len(each) == 1 else f"{pattern} ({len(each)})" for pattern, each in alike.items()]
    return ", ".join(shown)
