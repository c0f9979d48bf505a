"""What a host's container finds out about its surroundings, run here as a program of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import training
from training.node import host_check, infiniband
from training.node.host_check import (
    COUNT_S,
    Asked,
    count_models,
    counted_name,
    counting_s,
    local_addresses,
    prepare_host_memory,
    request_name,
    sources_sha256,
)


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


def test_a_model_is_counted_once_within_a_time_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, answer = tmp_path / request_name("causal"), tmp_path / counted_name("causal")
    assert counting_s(tmp_path) == 0
    request.write_text('{"model_type": "tomorrow"}')
    assert counting_s(tmp_path) == COUNT_S
    asked = Asked("a", str(tmp_path), str(tmp_path), "t", "127.0.0.1", "lo", 0, 0.001, 0.001)
    monkeypatch.setattr(host_check, "COUNT_S", 0.01)
    (finding,) = count_models(asked, tmp_path)
    assert finding.startswith("model.path's parameters were not counted within 0.01 s on a: start the run again")
    answer.touch()
    assert count_models(asked, tmp_path) == []


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


def adapter(sys_class: Path, name: str, *, state: str = "4: ACTIVE") -> None:
    port = sys_class / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")


def test_adapters_whose_device_nodes_a_container_lacks_are_refused_where_gpus_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / ".preflight-t").touch()
    adapter(tmp_path / "sys", "mlx5_0")
    adapter(tmp_path / "sys", "mlx5_1", state="1: DOWN")
    seen = {"adapters": str(tmp_path / "sys"), "gpus": True}
    report = look(tmp_path, **seen)
    assert report["infiniband"] == ["mlx5_0"]
    (finding,) = report["findings"]
    assert finding.startswith("mlx5_0 is in this host, but a container has no /dev/infiniband/uverbs*")
    assert "modprobe ib_uverbs" in finding
    for without in ({"gpus": False}, {"infiniband": False}):
        (tmp_path / ".preflight-t-a").unlink()
        assert look(tmp_path, **seen | without)["findings"] == []


def test_device_nodes_that_ranks_cannot_open_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "uverbs0"
    node.touch()
    assert infiniband.findings(["mlx5_0"], devices=str(tmp_path)) == []
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may open anything
    (finding,) = infiniband.findings(["mlx5_0"], devices=str(tmp_path))
    assert f"cannot open {node}: give them mode 0666" in finding


@pytest.mark.parametrize(
    ("line", "network"),
    [
        ("gpu1:83:95 [0] NCCL INFO Using network Socket", "Socket"),
        ("gpu1:83:95 [0] NCCL INFO Using network IB\n", "IB"),
        ("ip-10-0-0-7:61:83 [2] NCCL INFO Using network Libfabric", "Libfabric"),
        ("gpu1:83:95 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>", ""),
    ],
)
def test_nccls_report_names_its_network(line: str, network: str) -> None:
    assert infiniband.network_used(f"gpu1:83:83 [0] NCCL INFO cudaDriverVersion 12080\n{line}") == network


def test_the_runs_folder_in_the_hosts_memory_is_made_for_its_ranks(tmp_path: Path) -> None:
    request = Asked(
        host="a",
        home="/mnt/s",
        folder="/runs/run-1",
        token="t",
        address="127.0.0.1",
        interface="lo",
        port=0,
        shm_gib=0.0,
        disk_gib=0.0,
        memory_dir="/dev/shm/shardline",
    )
    assert prepare_host_memory(request, mounted_at=tmp_path) == []
    made = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert made == ["shardline", "shardline/run-1", "shardline/run-1/used_at"]
    (finding,) = prepare_host_memory(request, mounted_at=Path("/proc/sys"))
    assert finding.startswith(f"uid {os.getuid()} cannot make /dev/shm/shardline/run-1 (")
    assert finding.endswith("in checkpoint.memory_dir, or set checkpoint.memory_every_steps=0")
