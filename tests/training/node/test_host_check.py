"""What a host's container finds out about its surroundings, run here as a program of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import training
from training.node.host_check import local_addresses, sources_sha256


def look(folder: Path, **more: Any) -> dict[str, Any]:
    request = {"host": "a", "home": "/mnt/s", "folder": str(folder), "token": "t", "address": "127.0.0.1"}
    request |= {"interface": "lo", "port": 0, "shm_gib": 0.001, "disk_gib": 0.001, **more}
    command = [sys.executable, "-m", "training.node.host_check", json.dumps(request)]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def test_all_is_well_where_the_launchers_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / ".preflight-t").touch()
    report = look(tmp_path)
    assert report["findings"] == []
    assert report["wrote"]
    assert (tmp_path / ".preflight-t-a").read_text() == "a"
    assert report["hostname"] == socket.gethostname()
    assert report["disk_free_gib"] > 0


def test_another_folder_is_left_as_it_was(tmp_path: Path) -> None:
    report = look(tmp_path)
    assert "/mnt/s is not the launcher's storage" in report["findings"][0]
    assert not report["wrote"]
    assert list(tmp_path.iterdir()) == []


def test_a_port_is_taken_while_somebody_listens_on_any_address(tmp_path: Path) -> None:
    (tmp_path / ".preflight-t").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = look(tmp_path, port=port)["findings"]
    assert finding.startswith(f"port {port} is not available (Address already in use)")


def test_address_and_interface_belong_together(tmp_path: Path) -> None:
    (tmp_path / ".preflight-t").touch()
    assert ("lo", "127.0.0.1") in local_addresses()
    strange, missing = look(tmp_path, address="203.0.113.9", interface="eth77")["findings"]
    assert strange.startswith("address 203.0.113.9 is not this host's. Its addresses: ")
    assert missing.startswith("there is no interface eth77. Its addresses: ")


def test_the_sources_are_those_of_the_whole_training_package(tmp_path: Path) -> None:
    """The launcher compares them with its own: tasks/hardware/preflight.py, warn_of_other_sources."""
    assert look(tmp_path)["sources"] == sources_sha256(Path(training.__path__[0]))
