"""Names that a listing, a manifest or an index gives stay below the folder that they are joined to, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.manifests import write_checkpoint_manifest
from training.facts.placed import place
from training.records.results import ExportedModel
from training.records.token_shards import Shard

HOSTILE = {
    "": "empty part",
    ".": "empty part",
    "a//b": "empty part",
    "a/": "empty part",
    "./a": "empty part",
    "..": "leads out",
    "../a": "leads out",
    "a/../../b": "leads out",
    "a/..": "leads out",
    "/etc/passwd": "leads out",
    "//server/share": "leads out",
    "C:/x": "leads out",
    "a/c:x": "leads out",
    "%2e%2e/a": "leads out",
    "%252e%252e%252fa": "leads out",
    "..%2fa": "leads out",
    "%2fetc/passwd": "leads out",
    "a%00b": "control character",
    "a\0b": "control character",
    "a\nb": "control character",
    "..\\a": "backslash",
    "a%5c..%5cb": "backslash",
    "\ud800": "not Unicode",
    "x" * 201: "200 of each part",
    "ä" * 101: "200 of each part",
    "x/" * 5000 + "x": "can be written",
    "x/" * 20 + "x": "16 folders deep",
}


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_that_leads_out_of_its_folder_is_refused_with_its_source(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"https://h/m names the file .*{HOSTILE[name]}"):
        place(tmp_path, ["config.json", name], source="https://h/m")


def test_other_names_are_placed(tmp_path: Path) -> None:
    names = [
        "config.json",
        "onnx/model.onnx",
        ".gitattributes",
        "a b%20c.txt",
        "größe…",
        "..a",
        "a..",
        "100%",
        "x" * 200,
    ]
    assert place(tmp_path, names, source="a store") == [tmp_path / name for name in names]


def test_a_name_through_a_link_of_the_folder_and_one_that_is_file_and_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "dangling").symlink_to(tmp_path / "not-yet")
    for name in ("link/a", "link", "dangling", "dangling/a/b"):
        with pytest.raises(ValueError, match="symbolic link"):
            place(folder, [name], source="a store")
    with pytest.raises(ValueError, match="'a', which is a file and a folder"):
        place(folder, ["a/b", "a"], source="a store")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a\0"])
def test_a_checkpoints_manifest_names_only_files_beside_it(name: str, tmp_path: Path) -> None:
    file = {"size_bytes": 1, "sha256": "0"}
    manifest = write_checkpoint_manifest(tmp_path, step=1, files={"NAME": file})
    with pytest.raises(ValidationError, match="a record names the file"):
        type(manifest).model_validate(manifest.model_dump() | {"files": {name: file}})


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "%2e%2e/a"])
def test_an_exports_record_names_only_files_beside_it(name: str) -> None:
    with pytest.raises(ValidationError, match="a record names the file"):
        ExportedModel.model_validate({"files": {name: "0"}})


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("train/00000", True),
        ("validation/00007-0001", True),
        ("../0123456789abcdef/train/00000", True),
        ("../../one/shards/train/00000", True),
        ("../other/../train/00000", False),
        ("/tmp/train/00000", False),
        ("train/../../00000", False),
        ("../../train/00000", False),
    ],
)
def test_a_shards_name_is_relative_and_does_not_turn_back(name: str, taken: bool) -> None:
    fields = {"split": "train", "tokens": 1, "documents": 1, "text_bytes": 1, "sha256": "0"}
    if taken:
        assert Shard.model_validate({"name": name, **fields}).name == name
    else:
        with pytest.raises(ValidationError, match="name"):
            Shard.model_validate({"name": name, **fields})
