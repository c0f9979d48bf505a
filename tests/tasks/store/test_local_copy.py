"""Models, tokenizers and checkpoints that are named by URLs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tasks.data.corpus import prepare_corpus
from tasks.planning.plan import plan_run
from tasks.store.local_copy import local_copy
from tests.support.configs import inventory, read_plan, tiny_config
from tests.support.s3_server import BUCKET, S3Server, s3_server, seen_anew
from tests.support.tiny_run import tiny_run
from training.config.data import DataConfig
from training.models.language_model import unfilled_model


@pytest.fixture(scope="module")
def served() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(served: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    return seen_anew(served, monkeypatch)


def put_folder(s3: S3Server, folder: Path, key: str) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            s3.put(f"{key}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://{BUCKET}/{key}"


def test_a_folder_is_copied_once_and_again_when_its_content_changes(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "deep" / "weights").write_bytes(b"\x00" * 3_000_000)
    url = put_folder(s3, tmp_path / "model", "models/first")
    with caplog.at_level(logging.INFO):
        first, again = (Path(local_copy(each, field="model.path")) for each in (url, f"{url}/"))
    assert first == again
    assert caplog.text.count("copying s3://") == 1
    assert (first / "deep" / "weights").read_bytes() == b"\x00" * 3_000_000
    s3.put("models/first/config.json", b'{"changed": true}')
    assert (Path(local_copy(url, field="model.path")) / "config.json").read_text() == '{"changed": true}'
    assert (first / "config.json").read_text() == "{}", "a run that began with it still has it"
    assert local_copy("models/first", field="model.path") == "models/first", "a path is not a URL"


@pytest.mark.parametrize("fault", ["cut", "500"])
def test_a_copy_that_broke_off_is_not_taken_for_whole(fault: Any, s3: S3Server, tmp_path: Path) -> None:
    contents = {name: name.encode() * 200_000 for name in "abcdef"}
    for name, content in contents.items():
        s3.put(f"models/{fault}/{name}", content)
    url = f"s3://{BUCKET}/models/{fault}"
    s3.faults.kind, s3.faults.count = fault, 12
    with suppress(ValueError):  # s3fs itself goes on where an answer was cut
        local_copy(url, field="model.path")
    s3.faults.count = 0
    copied = Path(local_copy(url, field="model.path"))
    assert {path.name: path.read_bytes() for path in copied.glob("[a-f]")} == contents


def test_what_is_not_there_is_said_with_the_field(s3: S3Server) -> None:
    with pytest.raises(ValueError, match=r"model\.path = s3://corpus/nothing: there is no folder"):
        local_copy(f"s3://{BUCKET}/nothing", field="model.path")
    with pytest.raises(ValueError, match="contains credentials"):
        local_copy("s3://key:secret@bucket/model", field="model.path")


@pytest.mark.slow
def test_training_begins_with_a_model_and_a_tokenizer_of_the_store(s3: S3Server, tmp_path: Path) -> None:
    before = read_plan(tiny_run(tmp_path / "before"))
    run = tmp_path / "before"
    (weights,) = sorted((run / "checkpoints").iterdir())[-1:]
    model = put_folder(s3, weights, "models/tiny")
    tokenizer = put_folder(s3, Path(before.shards_dir) / "tokenizer", "tokenizers/tiny")
    text = tmp_path / "text.txt"
    text.write_text("one line of text\n" * 500)
    data = {"path": str(text), "text_unit": "line", "tokenizer": {"kind": "pretrained", "path": tokenizer}}
    shards, manifest = prepare_corpus(DataConfig.model_validate(data), tokens_home=tmp_path / "tokens")
    config = tiny_config(model__init="pretrained", model__path=model)
    plan = plan_run(config, inventory=inventory(1), shards=manifest, shards_dir=shards)
    assert plan.config.model.path == model, "the URL is what is recorded"
    expected = load_file(weights / "model.safetensors")
    loaded, _ = unfilled_model(plan)
    found = dict(loaded.hf.named_parameters())
    assert all(found[name].detach().equal(tensor) for name, tensor in expected.items() if name in found)
