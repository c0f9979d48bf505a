"""A stranger's model folder: what no library should open is refused with the file and the reason, at every door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli.command import _is_bad_input
from tasks.data.tokenizer import load_pretrained
from tasks.evaluation.evaluate import find_subject
from tasks.planning.pretrained import check_optimizer, hf_config
from tasks.store.local_copy import local_copy
from tests.support.configs import tiny_config
from tests.support.hostile_model import NOT_FILES, NOT_OBJECTS, huge
from training.config.data import TokenizerConfig
from training.config.model import ModelConfig

FILES = ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "model.safetensors")
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 16}


def plan_door(folder: Path) -> object:
    return hf_config(ModelConfig(architecture="path", path=str(folder), init="pretrained"))


def tokenizer_door(folder: Path) -> object:
    return load_pretrained(TokenizerConfig(kind="pretrained", path=str(folder)))


def optimizer_door(folder: Path) -> object:
    return check_optimizer(tiny_config(model__init="pretrained", model__path="x", train__optimizer_path=str(folder)))


def evaluation_door(folder: Path) -> object:
    return find_subject(str(folder))


DOORS = (plan_door, tokenizer_door, optimizer_door, evaluation_door)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps(GPT2))
    return folder


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("spoiled", NOT_FILES)
def test_what_is_no_file_is_not_waited_for(door: Callable[[Path], object], spoiled: str, model: Path) -> None:
    spoil, why = NOT_FILES[spoiled]
    spoil(model / "generation_config.json")
    with pytest.raises(ValueError, match=rf"generation_config\.json {why}") as refused:
        door(model)
    assert _is_bad_input(refused.value)


@pytest.mark.parametrize("name", [*FILES, "tokenizer.model", "merges.txt", "pytorch_model.bin"])
@pytest.mark.parametrize("spoiled", ["pipe", "device", "dangling"])
def test_so_it_is_for_every_file_that_libraries_open(name: str, spoiled: str, model: Path) -> None:
    spoil, why = NOT_FILES[spoiled]
    spoil(model / name)
    with pytest.raises(ValueError, match=rf"{name} {why}"):
        local_copy(str(model), field="model.path")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"])
def test_a_file_that_is_too_large_is_not_read(name: str, model: Path) -> None:
    huge(model / name)
    with pytest.raises(ValueError, match=rf"{name} has 8,589,934,592 bytes, more than"):
        local_copy(str(model), field="model.path")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("spoiled", NOT_OBJECTS)
def test_json_that_is_no_plain_object_is_refused(name: str, spoiled: str, model: Path) -> None:
    content, why = NOT_OBJECTS[spoiled]
    (model / name).write_bytes(content)
    for door in DOORS:
        if name == "config.json" or door is not evaluation_door:
            with pytest.raises(ValueError, match=rf"{name} .*{why}") as refused:
                door(model)
            assert _is_bad_input(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": {}}, "model_type = {}"),
        ({"n_layer": "2"}, "n_layer = 2: whole numbers up to 10,000"),
        ({"n_layer": 1_000_000}, "n_layer = 1000000: whole numbers up to 10,000"),
        ({"n_layer": [1, {}]}, "n_layer"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"vocab_size": 10**30}, "vocab_size = 10000"),
        ({"n_embd": True}, "n_embd = True"),
        ({"n_embd": 8.5}, r"n_embd = 8\.5"),
        ({"n_head": float("inf")}, "n_head = inf"),
        ({"n_positions": {"a": 1}}, "n_positions = "),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers = 1000000000"),
        ({"num_experts_per_tok": "all"}, "num_experts_per_tok = all"),
    ],
)
def test_a_number_that_is_none_is_refused_by_its_name(changes: dict[str, Any], words: str, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(GPT2 | changes))
    with pytest.raises(ValueError, match=f"config.json has {words}"):
        plan_door(model)


def test_a_folder_of_links_as_the_hubs_cache_has_it_is_taken(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    (linked / "onnx").mkdir()
    (linked / "notes.json").write_text("[1, 2]")
    assert local_copy(str(linked), field="model.path") == str(linked)
