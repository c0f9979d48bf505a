"""SHARDLINE_HOME keeps other users out, whatever the umask is and whatever the modes were before."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.tracking.database import make_database
from tasks.workspace import paths
from tasks.workspace.paths import home, make_private, open_private


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "a" / "home"))
    return tmp_path / "a" / "home"


def test_a_new_home_is_its_owners(folder: Path, umask: None) -> None:
    assert home() == folder
    assert mode(folder) == 0o700


@pytest.mark.parametrize("before", [0o755, 0o750, 0o777, 0o2770])
def test_a_home_that_others_could_enter_is_closed(before: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(parents=True)
    folder.chmod(before)
    with caplog.at_level("INFO"):
        assert home() == folder
    assert mode(folder) == 0o700
    assert f"had mode {before:04o}: now only its owner may enter it" in caplog.text


def test_a_home_that_cannot_be_closed_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o1777)  # a folder of all users
    home(), home()
    assert mode(folder) == 0o1777
    assert caplog.text.count("other users may enter SHARDLINE_HOME") == 1


def test_logs_and_keys_are_private_also_where_they_were_not(folder: Path, umask: None) -> None:
    old = home() / "old.log"
    old.write_text("before\n")
    old.chmod(0o666)
    for path in (old, home() / "new.log"):
        with open_private(path, "ab") as file:
            file.write(b"text\n")
        assert mode(path) == 0o600
    assert old.read_text() == "before\ntext\n"
    make_private(home() / "no such file")


def test_mlflows_database_is_private(folder: Path, umask: None, empty_store: Path) -> None:
    file = home() / "mlflow.db"
    file.write_bytes(empty_store.read_bytes())
    file.chmod(0o664)
    make_database(f"sqlite:///{file}")
    assert mode(file) == 0o600


@pytest.mark.slow
def test_a_new_database_of_mlflow_is_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        make_database(f"sqlite:///{home()}/mlflow.db")
    finally:
        os.umask(before)
    assert [mode(path) for path in home().glob("mlflow.db*")] == [0o600]


def test_a_database_elsewhere_keeps_its_mode(folder: Path, tmp_path: Path, empty_store: Path) -> None:
    file = tmp_path / "teams.db"
    file.write_bytes(empty_store.read_bytes())
    file.chmod(0o660)
    make_database(f"sqlite:///{file}")
    assert mode(file) == 0o660
    assert paths.home() == folder
