"""Headers of safetensors files and their indexes, as a stranger may write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.hostile_model import HEADERS, TENSOR, device, folder, loop, pipe, tensors
from training.checkpoint.safetensors_files import TensorFiles
from training.records.model_state import saved_shapes


@pytest.mark.parametrize("header", HEADERS)
def test_a_hostile_header_is_refused_with_its_file(header: str, tmp_path: Path) -> None:
    tensors(tmp_path / "model.safetensors", *HEADERS[header])
    for door in (saved_shapes, lambda path: TensorFiles(path, "model")):
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors \(.+\): copy it again"):
            door(tmp_path)


@pytest.mark.parametrize("length", [0, 7, 2**27, 2**60, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused(length: int, tmp_path: Path) -> None:
    tensors(tmp_path / "model.safetensors", {"a": TENSOR}, b"0" * 8, length=length)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        saved_shapes(tmp_path)


@pytest.mark.parametrize("spoil", [pipe, device, loop, folder])
def test_weights_that_are_no_file_are_not_waited_for(spoil, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    spoil(tmp_path / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"model-1\.safetensors"):
        saved_shapes(tmp_path)
    with pytest.raises(ValueError, match=r"model-1\.safetensors"):
        TensorFiles(tmp_path, "model")["a"]


INDEXES = {
    "no map": ({}, "has no `weight_map`"),
    "a list": ({"weight_map": ["a"]}, "does not name a file for each tensor"),
    "numbers": ({"weight_map": {"a": 1}}, "does not name a file for each tensor"),
    "objects": ({"weight_map": {"a": {"file": "x"}}}, "does not name a file for each tensor"),
    "outside": ({"weight_map": {"a": "../x.safetensors"}}, "leads out of its folder"),
    "absolute": ({"weight_map": {"a": "/x.safetensors"}}, "leads out of its folder"),
    "encoded": ({"weight_map": {"a": "%2e%2e/x.safetensors"}}, "leads out of its folder"),
    "nul": ({"weight_map": {"a": "x\0"}}, "control character"),
    "long": ({"weight_map": {"a": "x" * 5000}}, "can be written"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_hostile_index_is_refused_with_its_file(kind: str, tmp_path: Path) -> None:
    content, why = INDEXES[kind]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    for door in (saved_shapes, lambda path: TensorFiles(path, "model")):
        with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json .*{why}"):
            door(tmp_path)


def test_an_index_that_names_what_its_files_do_not_have_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}')
    with pytest.raises(ValueError, match=r"index\.json names b, which its files do not have"):
        saved_shapes(tmp_path)
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    with pytest.raises(ValueError, match=r"model-2\.safetensors is missing"):
        saved_shapes(tmp_path)
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert saved_shapes(tmp_path) == {"a": (2,)}
