"""Folders of a model or a tokenizer behind a web server's listing, which has neither sizes nor hashes."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.store.local_copy import local_copy
from training.facts.cures import Cure

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "deep/tokenizer.json": b"tokens"}


class Apache(http.server.SimpleHTTPRequestHandler):
    """Its listings have links that sort them, as Apache's have."""

    has_sizes = True

    def list_directory(self, path: object) -> None:
        links = [f"{each.name}/" if each.is_dir() else each.name for each in Path(str(path)).iterdir()]
        page = "".join(f'<a href="{link}">{link}</a>' for link in ["?C=N;O=D", "../", *links]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length" or self.has_sizes:
            super().send_header(keyword, value)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Unsized(Apache):
    has_sizes = False


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    for name, content in FILES.items():
        path = tmp_path / "web" / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "web" / "model"


def serve(root: Path, handler: type[Apache]) -> Iterator[str]:
    serving = functools.partial(handler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serving) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_behind_a_listing_is_copied_and_a_changed_one_again(model: Path, end: str) -> None:
    for url in serve(model.parent, Apache):
        copy = Path(local_copy(f"{url}/model{end}", field="model.path"))
        copied = {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        assert copied == FILES
        assert local_copy(f"{url}/model{end}", field="model.path") == str(copy)
        (model / "model.safetensors").write_bytes(b"other weights")
        again = Path(local_copy(f"{url}/model{end}", field="model.path"))
        assert again != copy
        assert (again / "model.safetensors").read_bytes() == b"other weights"


def test_a_server_that_says_no_sizes_is_named_with_the_cure(model: Path) -> None:
    for url in serve(model.parent, Unsized):
        with pytest.raises(ValueError, match=rf"^model\.path = {url}/model: the server does not say") as refused:
            local_copy(f"{url}/model", field="model.path")
        assert str(refused.value).endswith(Cure.DOWNLOAD)
    assert local_copy(str(model), field="model.path") == str(model), "the cure"
