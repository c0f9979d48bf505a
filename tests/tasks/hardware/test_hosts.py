"""Hosts from the config or a hosts file: what is filled in, and what is refused before any daemon is asked."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tasks.hardware.hosts import binds, docker_hosts, memory_binds, read_hosts, slots
from training.config.launch import HostConfig, LaunchConfig
from training.config.run import CheckpointConfig

HERE = {"name": "a", "address": "10.0.0.1", "interface": "eth0", "docker": "tcp://10.0.0.1:2375", "tls": "none"}
THERE = {"name": "b", "address": "10.0.0.2", "interface": "eth0", "docker": "tcp://10.0.0.2:2375", "tls": "none"}


def launch(*hosts: dict[str, Any], **more: Any) -> LaunchConfig:
    return LaunchConfig.model_validate({"launcher": "docker", "image": "sha256:1", "hosts": hosts, **more})


def tls_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("-----BEGIN CERTIFICATE-----")
    return folder


def test_without_hosts_it_is_this_machines_daemon(tmp_path: Path) -> None:
    (host,) = docker_hosts(read_hosts(launch()), home=tmp_path)
    assert (host.name, host.url) == (socket.gethostname(), "unix:///var/run/docker.sock")
    assert (host.address, host.home) == ("127.0.0.1", str(tmp_path))


def test_a_hosts_file_says_the_same_as_the_config(tmp_path: Path) -> None:
    tls_folder(tmp_path / "tls", "ca.pem", "cert.pem", "key.pem")
    (tmp_path / "hosts.yaml").write_text("""
- {name: a, docker: 'tcp://10.0.0.1:2376', tls: tls, address: 10.0.0.1, interface: eth0, gpus: -1, home: /mnt/s}
- {docker: 'ssh://me@gpu2.example', address: 10.0.0.2, interface: ib0, gpu_ids: ['0', GPU-7], memory_gib: 32}
""")
    first, second = docker_hosts(read_hosts(launch(hosts_file=str(tmp_path / "hosts.yaml"))), home=Path("/runs"))
    assert (first.tls_dir, first.gpus, first.home) == (tmp_path / "tls", -1, "/mnt/s")
    assert (second.name, second.gpu_ids, second.home) == ("gpu2.example", ("0", "GPU-7"), "/runs")
    assert (second.memory_gib, second.interface) == (32, "ib0")
    (tmp_path / "mapping.yaml").write_text("hosts:\n- {name: only}\n")
    assert [host.name for host in read_hosts(launch(hosts_file=str(tmp_path / "mapping.yaml")))] == ["only"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"docker": "tcp://10.0.0.1:2375"},
            r"b and a have the same daemon, tcp://10.0.0.1:2375: write one entry per daemon",
        ),
        ({"address": "10.0.0.1"}, "b and a have the same address, 10.0.0.1"),
        ({"address": "127.0.0.1"}, "host b: address = 127.0.0.1 cannot be reached from other hosts"),
        ({"address": "0.0.0.0"}, "host b: address = 0.0.0.0 cannot be reached"),
        ({"address": "gpu2"}, "host b: address = 'gpu2' is not an IP address"),
        ({"interface": ""}, "host b: interface is empty: with several hosts, give the one that has 10.0.0.2"),
        ({"tls": "/nowhere/at/all"}, "host b: /nowhere/at/all has no ca.pem, cert.pem, key.pem"),
        ({"tls": ""}, "host b: without TLS whoever reaches tcp://10.0.0.2:2375 is root on that host: .*; tls: none"),
        ({"docker": "ssh://me@b", "tls": "/etc"}, "host b: tls is for tcp:// daemons, not ssh://me@b"),
        ({"home": "runs"}, "host b: home = runs is relative"),
        ({"gpus": 4, "gpu_ids": ["0", "1"]}, "host b: gpus = 4, but 2 gpu_ids"),
        ({"gpus": 2, "slots": 3}, "host b: 3 slots on 2 GPUs"),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_hosts(launch(HERE, THERE | change))


def test_the_tls_file_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = tls_folder(tmp_path / "tls", "ca.pem", "cert.pem")
    with pytest.raises(ValueError, match=r"has no key\.pem: put"):
        read_hosts(launch(HERE, THERE | {"tls": str(folder)}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: give the path"),
        ("- {name: a", "is not valid YAML"),
        ("", "has no list of hosts"),
        ("hosts: {a: {}}", "has no list of hosts"),
        ("- {name: a, adress: 10.0.0.1}", "host 1: adress: Extra inputs are not permitted. Its fields: name, docker"),
        ("- {name: a}\n- 'ssh://b'", "host 2: entry: "),
        ("- {name: a, docker: 'http://b'}", "host 1: docker: String should match"),
        ("- {name: a}\n- {name: a}", "two hosts named a have the same name"),
    ],
)
def test_a_wrong_hosts_file_says_where(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "hosts.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_hosts(launch(hosts_file=str(tmp_path / "hosts.yaml")))


def test_more_hosts_needed_than_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("- {name: a}")
    with pytest.raises(ValueError, match=r"launch\.min_hosts = 2 of 1 hosts"):
        read_hosts(launch(hosts_file=str(tmp_path / "hosts.yaml"), min_hosts=2))


def test_one_host_alone_may_meet_itself_on_loopback() -> None:
    (host,) = read_hosts(launch({"docker": "tcp://10.0.0.1:2375", "tls": "none"}))
    assert docker_hosts([host], home=Path("/runs"))[0].tls_dir is None
    assert (host.name, host.address, host.interface) == ("10.0.0.1", "127.0.0.1", "")


@pytest.mark.parametrize(
    ("host", "found", "ranks"),
    [
        ({}, 0, 1),
        ({"slots": 3}, 0, 3),
        ({"gpus": -1}, 8, 8),
        ({"gpus": -1, "slots": 4}, 8, 4),
        ({"gpu_ids": ["3", "5"]}, 2, 2),
    ],
)
def test_slots_follow_the_gpus_unless_given(host: dict[str, Any], found: int, ranks: int) -> None:
    assert slots(HostConfig.model_validate(host), gpus_found=found) == ranks


def test_more_slots_than_the_gpus_that_turn_out_to_be_there() -> None:
    with pytest.raises(ValueError, match="host a: 9 slots on 8 GPUs: set slots=0"):
        slots(HostConfig(name="a", gpus=-1, slots=9), gpus_found=8)


def test_the_shared_folder_lies_at_the_launchers_path_in_every_container() -> None:
    config = launch(HERE | {"home": "/mnt/shared"}, THERE, mounts=["/data/text:/data"])
    first, second = docker_hosts(read_hosts(config), home=Path("/home/me/runs"))
    home, data = binds(first, config, home=Path("/home/me/runs"))
    assert (str(home.source), str(home.target), home.read_only) == ("/mnt/shared", "/home/me/runs", False)
    assert (str(data.source), str(data.target), data.read_only) == ("/data/text", "/data", True)
    assert str(binds(second, config, home=Path("/home/me/runs"))[0].source) == "/home/me/runs"


@pytest.mark.parametrize("mount", ["/data", "data:/data", "/data:data", "/data:/data:rw"])
def test_a_mount_needs_two_absolute_paths(mount: str) -> None:
    config = launch(mounts=[mount])
    (host,) = docker_hosts(read_hosts(config), home=Path("/runs"))
    with pytest.raises(ValueError, match="is not SOURCE:TARGET with two absolute paths"):
        binds(host, config, home=Path("/runs"))


def test_ranks_see_their_own_runs_folder_in_the_hosts_memory_alone() -> None:
    assert memory_binds(CheckpointConfig(), run_id="run-1") == ()
    (bind,) = memory_binds(CheckpointConfig(memory_every_steps=5), run_id="run-1")
    assert (bind.source, bind.target, bind.read_only) == ("/dev/shm/shardline/run-1", "/dev/shm/shardline/run-1", False)
