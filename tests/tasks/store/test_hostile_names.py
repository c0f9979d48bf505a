"""A page, a store or a manifest that names files elsewhere: refused with the name, and nothing is written."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.data.tokenizer import load_pretrained
from tasks.planning.pretrained import check_optimizer, config_file
from tasks.store.local_copy import local_copy
from tasks.store.runs import fetch_run
from tasks.store.shards import find_shards
from tests.support.configs import tiny_config
from tests.support.manifests import write_checkpoint_manifest, write_manifest
from training.config.data import TokenizerConfig
from training.config.model import ModelConfig
from training.config.store import StoreConfig

NAMES = ("../../../evil.json", "%2e%2e/%2e%2e/evil.json", "..%2fevil.json", "a/../../evil.json", "..\\evil.json")


class Pages(BaseHTTPRequestHandler):
    links: tuple[str, ...] = ()

    def do_GET(self) -> None:
        is_page = self.path.rstrip("/").endswith("models")
        content = "".join(f'<a href="{link}">x</a>' for link in self.links).encode() if is_page else b"{}"
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if is_page else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "a" / "b" / "home"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/models"
        server.shutdown()


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))


def model_path(url: str) -> object:
    return config_file(ModelConfig(architecture="path", path=url))


def tokenizer_path(url: str) -> object:
    return load_pretrained(TokenizerConfig(kind="pretrained", path=url))


def optimizer_path(url: str) -> object:
    return check_optimizer(tiny_config(model__init="pretrained", model__path="x", train__optimizer_path=url))


@pytest.mark.parametrize("door", [model_path, tokenizer_path, optimizer_path])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_that_lists_files_elsewhere_is_refused(
    door: Any, name: str, pages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pages, "links", ("config.json", name))
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+/models names the file .*evil"):
        door(pages)
    assert written(tmp_path) == []


def test_an_honest_page_is_copied(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pages, "links", ("config.json", "../", "tokenizer%20config.json"))
    folder = Path(local_copy(pages, field="model.path"))
    assert written(folder) == ["config.json", "tokenizer%20config.json"]


@pytest.mark.parametrize("name", ["../../../evil", "/tmp/evil", "a/../../evil"])
def test_a_checkpoint_on_a_store_that_names_files_elsewhere_is_not_fetched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    run = tmp_path / "store" / "runs" / "verses-1"
    checkpoint = run / "checkpoints" / "00000010"
    checkpoint.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "owner.json").write_text('{"process": "of that machine"}')
    write_checkpoint_manifest(checkpoint, step=10, files={"NAME": {"size_bytes": 5, "sha256": "0"}})
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"NAME"', json.dumps(name)))
    for place in (checkpoint / name, checkpoint / "evil"):
        if tmp_path in place.parents:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.resolve().write_text("evil!")
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="none of the 1 checkpoints"):
        fetch_run(f"file://{run}")
    assert "DamagedRecord" in caplog.text
    assert written(tmp_path / "home") == ["run.json"], "neither the file, nor the owner of another machine"


@pytest.mark.parametrize("link", ["tokenizer", "tokenizer/tokenizer.json"])
def test_shards_of_a_store_are_not_written_through_a_link(link: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "store" / "tokens" / "f", tmp_path / "home" / "tokens" / "f"
    (theirs / "tokenizer").mkdir(parents=True)
    (theirs / "tokenizer" / "tokenizer.json").write_text("{}")
    write_manifest(theirs, [], vocab_size=3, end_id=0)
    place = ours / link
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "elsewhere")
    if link == "tokenizer":
        (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match="which leads through the symbolic link"):
        find_shards(StoreConfig(url=f"file://{tmp_path / 'store'}"), ours)
    assert not (tmp_path / "elsewhere").is_file()
    assert not (tmp_path / "elsewhere" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["../f/train/../../../x", "../../x/train/00000", "/x/train/00000"])
def test_shards_of_a_store_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / "store" / "tokens" / "f"
    theirs.mkdir(parents=True)
    write_manifest(theirs, [], vocab_size=3, end_id=0)
    shard = {"name": name, "split": "train", "tokens": 1, "documents": 1, "text_bytes": 1, "sha256": "0"}
    manifest = theirs / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"shards": [shard]}))
    with pytest.raises(ValueError, match=r"file://.*manifest\.json is damaged \(shards\.0\.name"):
        find_shards(StoreConfig(url=f"file://{tmp_path / 'store'}"), tmp_path / "home" / "tokens" / "f")
    assert not (tmp_path / "home").exists()
