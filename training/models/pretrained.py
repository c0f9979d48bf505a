"""Loads the tensors of a Hugging Face folder into its class; what does not fit is an error, never made up or dropped.

    python -m training.models.pretrained FOLDER OBJECTIVE

compares a folder with its class by names and shapes alone, from the files' headers, which takes no memory. It prints
what one should know, and exits with 2 and one line if the folder does not fit.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from training.facts.model_config import WRONG_VALUES, first_line, read_settings
from training.models import hugging_face
from training.records.model_state import NOT_FINITE, differences, open_tensors, saved_shapes, weight_files

logger = logging.getLogger(__name__)


# What torch.compile, FSDP 1 and its checkpointing put before the name of each module that they wrap; DDP wraps a whole
# model. Each pattern is taken off once, so that a compiled model of compiled layers needs the second one twice.
_WRAPPERS = r"(?:(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+"
CONVERSION = re.compile(r"^(.+?)\s*\|[^|]*CONVERSION", re.MULTILINE)  # a row of transformers' table
WRAPPERS = {rf"^(?:module\.|{_WRAPPERS})+": "", _WRAPPERS: "", rf"{_WRAPPERS}(?:)": ""}


def main(folder: Path, objective: str) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    try:
        check_headers(auto_class_of(objective), folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def auto_class_of(objective: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if objective == "masked" else AutoModelForCausalLM


def load_pretrained(auto_class: Any, folder: Path | str, *, dtype: torch.dtype, settings: Any = None) -> Any:
    """Return the model of a folder, or of the hub, with its tensors. Raises ValueError, with names, if they do not fit.

    Safetensors only: a .bin is a pickle, and whoever wrote it could run code here.
    """
    given = {"config": read_settings(folder) if settings is None else settings, "dtype": dtype}
    hf = _checked(auto_class.from_pretrained, folder, folder, use_safetensors=True, trust_remote_code=False, **given)
    if not Path(folder).is_dir():  # of the hub: nobody has read it before
        _check_numbers(hf, folder)
    output = hf.get_output_embeddings()
    if hf.config.get_text_config().tie_word_embeddings and hasattr(output, "weight"):
        _check_tied({"head": output.weight, "embedding": hf.get_input_embeddings().weight}, folder)
    return hf


def check_headers(auto_class: Any, folder: Path) -> None:
    """Raise ValueError as `load_pretrained` would, without reading tensors."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in saved_shapes(folder).items()}
    with torch.device("meta"):
        settings = read_settings(folder)
        model = auto_class.from_config(settings, dtype=torch.float32)
    if model.can_generate():
        _check_generation(folder)
    there = {"config": model.config, "state_dict": tensors, "device_map": {"": "meta"}}
    _checked(type(model).from_pretrained, folder, None, dtype=torch.float32, **there)
    rows = model.get_input_embeddings().weight
    alike = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight is rows}
    if len(alike & tensors.keys()) > 1:
        files = [open_tensors(path, framework="pt") for path in weight_files(folder)]
        _check_tied({name: file.get_tensor(name) for file in files for name in alike & {*file.keys()}}, folder)


def _check_generation(folder: Path) -> None:
    """Raise ValueError for a generation_config.json that transformers cannot read, which ranks would find later."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").exists():
        return
    try:
        GenerationConfig.from_pretrained(folder)
    except WRONG_VALUES as error:
        raise ValueError(f"{folder}/generation_config.json has a wrong value: {first_line(error)} Correct it") from None


def _check_numbers(hf: Any, folder: Path | str) -> None:
    for name, tensor in hf.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(NOT_FINITE.format(where=folder, name=name))


def _check_tied(weights: Mapping[str, torch.Tensor], folder: Path | str) -> None:
    """Raise ValueError unless matrices that a class ties are equal; if they are not, transformers does not tie them."""
    first, *others = weights.values()
    if not all(other is first or torch.equal(first, other) for other in others):
        raise ValueError(
            f"{folder}: its config.json ties the output layer to the embedding (tie_word_embeddings), and its files "
            "have two unlike matrices: set tie_word_embeddings to false in that config.json if both were trained, else "
            "delete the output layer's from the files"
        )


def _checked(load: Callable[..., tuple[Any, Any]], folder: Path | str, *arguments: Any, **options: Any) -> Any:
    """Return the model that `load` makes; transformers' own account of what fitted decides whether it is one."""
    with _captured_table() as table:
        try:
            hf, report = load(
                *arguments, output_loading_info=True, ignore_mismatched_sizes=True, key_mapping=WRAPPERS, **options
            )
        except RuntimeError:
            if not (parts := CONVERSION.findall("\n".join(table))):
                raise
            raise ValueError(
                f"{folder} does not fit its class: {', '.join(parts)} cannot be made, because tensors that are joined "
                "to it are missing or have another shape: give the whole model"
            ) from None
    if hugging_face.drop_renaming(hf):
        logger.info("%s: the prefixes of DDP, FSDP or torch.compile were taken off its tensors' names", folder)
    missing, unexpected = report["missing_keys"], report["unexpected_keys"]
    reshaped = {name: (saved, own) for name, saved, own in report["mismatched_keys"]}
    if found := differences(missing, unexpected, reshaped):
        raise ValueError(f"{folder} does not fit its class, {type(hf).__name__}: {found}: {_cure(hf, report)}")
    return hf


def _cure(hf: Any, report: dict[str, Any]) -> str:
    missing = report["missing_keys"]
    if not missing and not report["mismatched_keys"]:
        return (
            "a part of the model would be dropped. If its config.json is right, load it with transformers once and "
            "call save_pretrained(FOLDER), which leaves the others out, then give that folder"
        )
    if missing and missing <= {name for name, _ in hf.named_buffers()}:
        return (
            "the class's own values would take their place. Older versions of Shardline saved no persistent buffers: "
            "`shardline resume RUN train.steps=MORE` saves and exports them; otherwise give the whole model"
        )
    return "random numbers would take their place: give the whole model, under the names that transformers saves"


@contextmanager
def _captured_table() -> Iterator[list[str]]:
    """Keep transformers' table of what did not fit, which has colours and is no error, out of the log; yield it."""
    table: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        table.append(record.getMessage())
        return False

    source = logging.getLogger("transformers.modeling_utils")
    source.addFilter(keep)
    try:
        yield table
    finally:
        source.removeFilter(keep)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
