"""Checks the Hugging Face model that a run starts from: its config.json, and that its vocabulary is the tokens'."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.store.local_copy import local_copy
from tasks.store.model_folder import check_model_folder
from training.config.model import ModelConfig
from training.config.run import RunConfig
from training.facts.cures import Cure
from training.facts.model_config import read_settings
from training.records.model_state import check_finite, saved_shapes, weight_map
from training.records.record import read_fields, sha256_file
from training.tokenizer.pretrained import open_pretrained

logger = logging.getLogger(__name__)

DEQUANTIZED_BY = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}  # of transformers; other kinds need a GPU
COMPARE_S = 600.0  # 5 s for most; for 100,000 tensors, with torch from a cold network disk, minutes


def hf_config(model: ModelConfig) -> dict[str, Any] | None:
    """Return the config.json of model.path, a local folder or a model on the hub; None if the config needs none."""
    if not model.path:
        return None
    folder, path = local_copy(model.path, field="model.path"), config_file(model)
    if model.init == "pretrained":
        _check_files(Path(folder).expanduser())
    content: dict[str, Any] = dict(read_fields(path))
    if model.init == "pretrained" and (quantized := content.get("quantization_config")):
        by = quantized.get("quant_method") if isinstance(quantized, dict) else repr(quantized)
        known = DEQUANTIZED_BY.get(str(by))
        raise ValueError(
            f"config.json of model.path = {model.path} has quantization_config, by {by}: weights that were rounded to "
            f"few bits cannot be trained: {Cure.UNQUANTIZED}{f', {Cure.DEQUANTIZE(config=known)}' if known else ''}"
        )
    if model.dropout:  # older files do not list all dropouts of their class
        content = vars(read_settings(path)) | content
    return content


def config_file(model: ModelConfig) -> Path:
    """Return the path of model.path's config.json, which is downloaded from a hub. Raises ValueError without one."""
    folder = local_copy(model.path, field="model.path")
    if Path(folder).is_file():
        raise ValueError(
            f"model.path = {model.path} is a file: give the folder that has config.json and *.safetensors (GGUF files "
            "are for inference: give the model that one was made of)"
        )
    path = _file(folder, "config.json", field="model.path")
    adapter = Path(folder) / "adapter_config.json"
    if model.init == "pretrained" and adapter.is_file():
        base = read_fields(adapter).get("base_model_name_or_path")
        raise ValueError(
            f"model.path = {model.path} has an adapter (adapter_config.json), made for {base}, which is not trained or "
            f"applied here: {Cure.MERGE}; or give {base} itself"
        )
    if path is None:
        raise ValueError(f"model.path = {model.path!r} has no config.json: give the folder or hub name of a model")
    return path


def generation(model: ModelConfig, end_id: int) -> dict[str, Any]:
    """Return the plan's fields on how a pretrained model makes text: generation_config.json, and what ends a text.

    Raises ValueError for end tokens that are not IDs.
    """
    if model.init != "pretrained":
        return {}
    file = _file(model.path, "generation_config.json", field="model.path")
    given = dict(read_fields(file)) if file else {}
    named = given.get("eos_token_id", read_fields(config_file(model)).get("eos_token_id"))
    ends = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise ValueError(
            f"model.path = {model.path}: eos_token_id of its {file.name if file else 'config.json'} is {named!r}, "
            "which is neither the ID of a token nor a list of IDs: correct it"
        )
    return {"generation_config": given, "more_ends": tuple(dict.fromkeys(end for end in ends if end != end_id))}


def check_weights(config: RunConfig) -> None:
    """Raise ValueError, with the names, if the tensors of a local model.path cannot be read or are not its class's.

    A process with torch compares them by the files' headers, in about 5 s. Without torch here, and for models on the
    hub, the ranks do it when they load the weights.
    """
    if config.model.init != "pretrained":
        return
    folder = Path(local_copy(config.model.path, field="model.path")).expanduser()
    if not folder.is_dir():
        return
    _check_files(folder)
    saved_shapes(folder)
    if importlib.util.find_spec("torch") is None:
        logger.info("the ranks will compare the tensors of model.path = %s with its class: no torch is here", folder)
        return
    program = [sys.executable, "-m", "training.models.pretrained", str(folder.resolve()), config.objective]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=COMPARE_S)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"model.path = {folder}: its tensors were not compared with its class within {COMPARE_S:g} s: start again, "
            "or take a model whose config.json and files are as save_pretrained leaves them"
        ) from None
    for line in done.stdout.splitlines():
        logger.info("model.path: %s", line)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode == 2:
        raise ValueError(f"model.path: {last.removeprefix('model.path: ')}")
    if done.returncode:
        logger.warning("the ranks will compare the tensors of model.path = %s with its class (%s)", folder, last)


def check_optimizer(config: RunConfig) -> None:
    """Raise ValueError if train.optimizer_path is not a checkpoint."""
    folder = Path(local_copy(config.train.optimizer_path, field="train.optimizer_path"))
    if config.train.optimizer_path and not (folder / "manifest.json").is_file():
        raise ValueError(
            f"train.optimizer_path = {config.train.optimizer_path} is not a checkpoint, it has no manifest.json: give "
            "runs/ID/checkpoints/STEP, or leave it out to begin with moments of zero"
        )


def check_start(config: RunConfig) -> None:
    """Raise ValueError if the weights or moments that a run starts from hold NaN or infinite numbers.

    Reads the files; models on the hub are read by the ranks.
    """
    if config.model.init == "pretrained":
        check_finite(Path(local_copy(config.model.path, field="model.path")).expanduser())
    if config.train.optimizer_path:
        check_finite(Path(local_copy(config.train.optimizer_path, field="train.optimizer_path")), "optimizer*")


def _check_files(folder: Path) -> None:
    """Raise ValueError for a local model whose weights are only pickles; for models on the hub the ranks check this."""
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(kind))
    if pickles and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"model.path = {folder} has no *.safetensors, only {pickles[0]}, a pickle, which may run any code when it "
            f"is read: if you trust its source, {Cure.SAFETENSORS}"
        )
    for index in folder.glob("*.safetensors.index.json"):
        weight_map(index)
    if any(folder.glob("*.safetensors")):
        saved_shapes(folder)


def check_tokenizer(config: RunConfig, tokenizer: Path | None = None) -> None:
    """Raise ValueError unless the corpus is tokenized with the vocabulary of the pretrained weights.

    `tokenizer`: the tokenizer.json of the token shards; None before there are shards: then only settings that cannot
    give that vocabulary are refused, so that no corpus is tokenized in vain. Vocabularies are compared, not files: the
    same tokenizer saved by another version of transformers has other bytes, and what a tokenizer's other files add to
    its tokenizer.json is in that of the shards.
    """
    if config.model.init != "pretrained":
        return
    path, wanted = config.model.path, config.data.tokenizer
    theirs = _file(path, "tokenizer.json", field="model.path")
    if theirs is None:
        if tokenizer is not None:
            logger.warning(
                "model.path = %s has no tokenizer.json: its vocabulary is not compared with that of the token shards",
                path,
            )
        return
    cure = f"use the model's own: {Cure.ITS_TOKENIZER(path=path)}"
    if tokenizer is None and wanted.kind == "bpe" and wanted.bpe_size < (size := len(_vocabulary(theirs))):
        raise ValueError(
            f"model.path = {path} was trained with a tokenizer of {size:,} tokens, which no BPE of {wanted.bpe_size:,} "
            f"can be: {cure}"
        )
    if tokenizer is None and wanted.kind != "pretrained":
        return
    ours = _vocabulary(tokenizer) if tokenizer else _whole_vocabulary(wanted.path, field="data.tokenizer.path")
    is_own = wanted.kind == "pretrained" and wanted.path == path
    if not is_own and ours != _vocabulary(theirs):
        _check_same(ours, _whole_vocabulary(path, field="model.path"), path=path, cure=cure)
    file, size = _file(path, "config.json", field="model.path"), max(ours.values()) + 1
    rows = read_fields(file).get("vocab_size") if file else None
    if rows and (beyond := [f"{word!r} ({number:,})" for word, number in ours.items() if number >= rows]):
        raise ValueError(
            f"the tokenizer has {size:,} tokens, the embedding of model.path = {path} {rows:,} rows (vocab_size of its "
            f"config.json); without a row: {', '.join(beyond[:4])}{' …' * (len(beyond) > 4)}: {Cure.ROWS(tokens=size)}"
        )


def _check_same(ours: dict[str, int], theirs: dict[str, int], *, path: str, cure: str) -> None:
    if ours != theirs:
        number, word = min((number, word) for word, number in ours.items() ^ theirs.items())
        raise ValueError(
            f"the corpus's tokenizer has {len(ours):,} tokens, the one that model.path = {path} was trained with "
            f"{len(theirs):,}; they differ from token {number}, {word!r}, on: {cure}"
        )


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether two tokenizer.json files give the same tokens the same IDs, however they were saved."""
    return sha256_file(one) == sha256_file(other) or _vocabulary(one) == _vocabulary(other)


def _vocabulary(file: Path) -> dict[str, int]:
    from training.tokenizer.text_encoder import open_tokenizer

    words: dict[str, int] = open_tokenizer(file, None).get_vocab(with_added_tokens=True)
    return words


def _whole_vocabulary(path: str, *, field: str) -> dict[str, int]:
    """Return the vocabulary of a stranger's tokenizer, with what its other files add to tokenizer.json."""
    words: dict[str, int] = open_pretrained(local_copy(path, field=field), name=f"{field}={path}").tokenizer.get_vocab()
    return words


def _file(path: str, name: str, *, field: str) -> Path | None:
    """Return the path of a file of a local model, or of a hub's model (downloaded); None if there is no such file."""
    path = local_copy(path, field=field)
    folder = Path(path)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        file = Path(hf_hub_download(path, name))
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:  # a wrong name, no such model, no network: each raises another type
        raise ValueError(f"{field} = {path!r} is neither a folder nor a model on the hub ({error})") from error
    check_model_folder(file)
    return file
