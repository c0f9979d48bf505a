"""`make setup`, `make lock-check`: pip's settings for uv, torch for CPUs, a package that fails, a wrong lock."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra import setup_venv
from tests.support.made_up_wheel import made_up_wheel

REPO = Path(__file__).parents[2]


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The URL of a package index, of which tmp_path is the content."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_uv_is_told_what_pip_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = https://a/simple\nextra-index-url =\n  https://b/simple\n  https://c\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more")
    monkeypatch.setenv("PIP_INDEX_URL", "https://counts/simple")
    monkeypatch.setattr(setup_venv, "PYTHON", Path(sys.executable))
    told = setup_venv.uv_settings(setup_venv.pip_settings())
    assert told["UV_DEFAULT_INDEX"] == "https://counts/simple"
    assert told["UV_EXTRA_INDEX_URL"].split()[-2:] == ["https://b/simple", "https://c"]
    assert told["UV_FIND_LINKS"] == "/wheels,/more"


@pytest.mark.parametrize(
    ("gpu", "offered", "found"), [("", "2.13.0", True), ("nvidia0", "2.13.0", False), ("", "2.12.0", False)]
)
def test_torch_for_cpus_is_taken_where_there_is_no_gpu_and_the_index_has_our_version(
    tmp_path: Path, index: str, gpu: str, offered: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "index.html").write_text(f"<a href=torch-{offered}%2Bcpu-cp311-linux.whl>torch</a>")
    (tmp_path / "constraints.txt").write_text("numpy==2.0\ntorch==2.13.0\n")
    devices = tmp_path / "dev"
    devices.mkdir()
    if gpu:
        (devices / gpu).touch()
    monkeypatch.chdir(tmp_path)
    assert setup_venv.cpu_index(url=index, devices=devices) == (index if found else "")


def test_without_that_index_torch_is_what_the_others_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    monkeypatch.chdir(tmp_path)
    assert setup_venv.cpu_index(url="http://127.0.0.1:9", devices=tmp_path) == ""


@pytest.mark.slow
def test_a_package_for_another_python_is_installed_again_by_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In an environment that finds all but made-up, and pip, in this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    monkeypatch.setattr(setup_venv, "PYTHON", tmp_path / "venv" / "bin" / "python")
    options = ["--quiet", "--no-index", "--find-links", str(tmp_path)]
    older, ours = (f"py3{sys.version_info.minor - age}" for age in (1, 0))
    wrong = made_up_wheel(tmp_path, python=older, code="raise TypeError('21 given')")
    setup_venv._pip("install", *options, str(wrong), check=True)

    with pytest.raises(SystemExit, match=r"(?s)TypeError: 21 given.*installed does not work: made-up"):
        setup_venv.mend(options, modules=("made_up",))
    made_up_wheel(tmp_path, python=ours, code="")
    setup_venv.mend(options, modules=("made_up",))
    told = capfd.readouterr()
    assert (
        told.err.count("made-up, as it was installed, does not work (TypeError: 21 given): pip installs it again") == 2
    )
    assert told.out.startswith("made_up and new processes work")


@pytest.mark.slow
def test_a_lock_that_is_not_what_is_needed_is_named(tmp_path: Path) -> None:
    """A version that pyproject.toml refuses, a missing one, and one that nothing needs."""
    for name in ("Makefile", "pyproject.toml", "README.md"):
        (tmp_path / name).write_text((REPO / name).read_text())
    right = (REPO / "constraints.txt").read_text()
    wrong = re.sub("(?m)^(prefect|pluggy)==.*$", r"\1==0.1", right).replace("pluggy==0.1", "zzz==1.0")
    (tmp_path / "constraints.txt").write_text(wrong)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / ".venv" / ".installed").touch()
    done = subprocess.run(["make", "lock-check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert all(line in done.stdout for line in ("< prefect==0.1", "> prefect==3", "> pluggy==", "< zzz==1.0"))
    assert "make lock" in done.stderr
