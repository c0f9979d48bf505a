"""The password of `up`'s MLflow reaches what runs here, by the environment, and nothing else's server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tasks.launch.rank_environment import tracking_for_ranks
from tasks.tracking.client import mlflow_variables
from tasks.workspace.paths import password_file, tracking_uri
from tasks.workspace.processes import process_key
from training.config.launch import LaunchConfig

UP = "http://127.0.0.1:5000"
KNOWN = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "hunter2-and-more"}


@pytest.fixture(autouse=True)
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home in which `up` has started MLflow: this process stands for the server's."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("MLFLOW_TRACKING_URI", *KNOWN):
        os.environ.pop(name, None)
    os.environ["SHARDLINE_HOME"] = str(tmp_path)
    (tmp_path / "up.json").write_text(json.dumps({"mlflow": {"url": UP, "process": process_key(os.getpid())}}))
    password_file("mlflow").parent.mkdir()
    password_file("mlflow").write_text(":".join(KNOWN.values()))


def known() -> dict[str, str]:
    return {name: os.environ[name] for name in KNOWN if name in os.environ}


@pytest.mark.parametrize("named", ["", UP])
def test_commands_find_it_and_hand_it_on(named: str) -> None:
    if named:
        os.environ["MLFLOW_TRACKING_URI"] = named
    assert tracking_uri() == UP
    assert known() == KNOWN
    variables, secrets = tracking_for_ranks(LaunchConfig(), mlflow_run_id="run")
    assert KNOWN.items() <= secrets.items()
    assert "hunter2" not in str(variables)


def test_another_server_does_not_get_it() -> None:
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:5001"
    assert tracking_uri() == "http://127.0.0.1:5001"
    assert known() == {}
    assert mlflow_variables(tracking_uri()) == "MLFLOW_TRACKING_URI=http://127.0.0.1:5001"


def test_a_user_that_is_named_beside_the_address_stays() -> None:
    mine = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "mine"}
    os.environ |= mine | {"MLFLOW_TRACKING_URI": UP}
    tracking_uri()
    assert known() == mine


def test_a_line_for_a_shell_names_the_file_and_not_the_password() -> None:
    line = mlflow_variables(tracking_uri())
    assert f"$(cut -d: -f2 {password_file('mlflow')})" in line
    assert "hunter2" not in line


def test_after_down_the_store_is_the_file() -> None:
    (Path(os.environ["SHARDLINE_HOME"]) / "up.json").write_text("{}")
    assert tracking_uri().startswith("sqlite:///")
    assert known() == {}
