"""The preflight on real daemons: each fault is one clear line under its host, and nothing is left on any host."""

from __future__ import annotations

import io
import logging
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.containers import Job, start
from infra.hosts import HostError, connect
from infra.preflight import finish, probe
from tasks.hardware.hosts import docker_hosts, read_hosts
from tasks.hardware.measure_hosts import measure_hosts, strongest_first
from tasks.hardware.preflight import HostFacts, HostsNotReady, check_hosts, container_spec
from tests.support.rig.rig import Rig, RigHost
from training.config.launch import LaunchConfig


@pytest.fixture
def run_dir(rig: Rig, home: Path) -> Path:
    """A run folder as the launcher leaves it: the ranks' user owns it."""
    folder = home / "tiny-1"
    folder.mkdir()
    own(folder, rig)
    return folder


def own(folder: Path, rig: Rig) -> None:
    uid, gid = map(int, rig.user.split(":"))
    os.chown(folder, uid, gid)


def launch(rig: Rig, *hosts: dict[str, Any], **more: Any) -> LaunchConfig:
    """Two hosts as the rig has them, unless given; on a kernel like this one's, locked memory stays limited."""
    fields = {"image": rig.image, "mounts": rig.mounts, "memlock": False, "shm_gib": 0.25, "user": rig.user, **more}
    given = hosts or (rig.host_config(0), rig.host_config(1))
    return LaunchConfig.model_validate({"launcher": "docker", "hosts": given, **fields})


def check(config: LaunchConfig, run_dir: Path) -> dict[str, HostFacts]:
    home = run_dir.parent
    return check_hosts(docker_hosts(read_hosts(config), home=home), config, home=home, run_dir=run_dir)


def faults(rig: Rig, config: LaunchConfig, run_dir: Path) -> dict[str, tuple[str, ...]]:
    """What the preflight says of each host; it must refuse, and leave nothing."""
    with pytest.raises(HostsNotReady) as refused:
        check(config, run_dir)
    assert str(refused.value).endswith(tuple(found for lines in refused.value.findings.values() for found in lines))
    assert_nothing_left(rig, run_dir)
    return dict(refused.value.findings)


def assert_nothing_left(rig: Rig, run_dir: Path) -> None:
    assert [found.name for host in rig.hosts for found in rig.containers(host)] == []
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []


def only(found: dict[str, tuple[str, ...]], host: str) -> str:
    """The one finding, of that host."""
    assert list(found) == [host], found
    assert len(found[host]) == 1, found
    return found[host][0]


def may_lock_memory() -> bool:
    code = "import resource as r; r.setrlimit(r.RLIMIT_MEMLOCK, (r.RLIM_INFINITY,) * 2)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@contextmanager
def listening(rig: Rig, host: RigHost, port: int) -> Iterator[None]:
    """A program on the host that holds a port."""
    code = f"import socket, sys; s = socket.create_server(('', {port})); print('up', flush=True); sys.stdin.read()"
    command = ["nsenter", f"--net=/run/netns/{rig.network.namespaces[host.index]}", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        try:
            yield
        finally:
            process.stdin.close()


def test_healthy_hosts_pass_in_seconds_and_say_what_they_have(rig: Rig, run_dir: Path) -> None:
    config = launch(rig, rig.host_config(0, home=str(run_dir.parent)), rig.host_config(1), rig.host_config(2))
    begin = time.perf_counter()
    facts = check(config, run_dir)
    took_s = time.perf_counter() - begin
    print(f"preflight of 3 hosts: {took_s:.2f} s")
    assert took_s < 10  # 2 s on a quiet machine
    assert [facts[host.name].hostname for host in rig.hosts] == [host.name for host in rig.hosts]
    assert {there.image_id for there in facts.values()} == {rig.image}
    assert {there.cores for there in facts.values()} == {len(os.sched_getaffinity(0))}
    assert all(there.shared_memory_gib == pytest.approx(0.25) for there in facts.values())
    assert all(there.disk_free_gib > 1 for there in facts.values())
    assert_nothing_left(rig, run_dir)


def test_everything_wrong_on_every_host_is_in_one_error(rig: Rig, run_dir: Path) -> None:
    config = launch(
        rig,
        rig.host_config(0, gpus=2, interface="eth7"),
        rig.host_config(1, home="/not/there"),
        rig.host_config(2, tls=str(rig.wrong_tls_dir)),
        port=29_411,
    )
    with listening(rig, rig.hosts[0], 29_411):
        found = faults(rig, config, run_dir)
    gpu, interface, port, *more = found["host0"]
    assert "no NVIDIA runtime for the GPUs: install nvidia-container-toolkit" in gpu
    assert "there is no interface eth7. Its addresses:" in interface
    assert f"eth0 {rig.hosts[0].address}" in interface
    assert port.startswith("port 29411 is not available (Address already in use)")
    assert more == []
    assert "a folder to mount does not exist" in found["host1"][0]
    assert "/not/there" in found["host1"][0]
    assert "its certificate is not signed by" in found["host2"][0]


def test_an_image_that_is_not_there(rig: Rig, run_dir: Path) -> None:
    found = faults(rig, launch(rig, image="shardline/nowhere:1"), run_dir)
    assert list(found) == ["host0", "host1"]
    for (finding,) in found.values():
        assert "does not have the image shardline/nowhere:1: `docker pull shardline/nowhere:1` there" in finding


def test_one_name_for_two_images(rig: Rig, run_dir: Path) -> None:
    name = "shardline-rig-two"
    with closing(connect(rig.hosts[0].docker_host())) as client:
        client.images.get(rig.image).tag(name, "x")
    with closing(connect(rig.hosts[1].docker_host())) as client:
        buffer = io.BytesIO()
        tarfile.open(fileobj=buffer, mode="w").close()
        variables = client.images.get(rig.image).attrs["Config"]["Env"]
        client.api.import_image_from_data(
            buffer.getvalue(), repository=name, tag="x", changes=[f"ENV {variable}" for variable in variables]
        )
    finding = only(faults(rig, launch(rig, image=f"{name}:x"), run_dir), "host1")
    assert finding.startswith(f"its {name}:x is sha256:")
    assert f"on host0 it is {rig.image[:19]}: set launch.image to one digest" in finding


def test_an_image_without_python_or_without_shardline(rig: Rig, run_dir: Path) -> None:
    found = faults(rig, launch(rig, rig.host_config(0), mounts=()), run_dir)
    assert "has no python in it: build one with `shardline image build`" in only(found, "host0")
    system = tuple(mount for mount in rig.mounts if not Path("training").absolute().is_relative_to(mount.split(":")[0]))
    found = faults(rig, launch(rig, rig.host_config(0), mounts=system), run_dir)
    assert "has no Shardline in it: build one with `shardline image build`" in only(found, "host0")


def test_storage_that_is_not_the_launchers(rig: Rig, run_dir: Path) -> None:
    other = rig.make_home()
    config = launch(rig, rig.host_config(0), rig.host_config(1, home=str(other)))
    finding = only(faults(rig, config, run_dir), "host1")
    assert finding.startswith(f"{other} is not the launcher's storage, because it has no tiny-1/: mount the launcher's")
    shutil.copytree(run_dir, other / "tiny-1")  # as left by a copy that somebody made once
    own(other / "tiny-1", rig)
    finding = only(faults(rig, config, run_dir), "host1")
    assert finding.startswith(
        f"{other} is not the launcher's storage, because its tiny-1/ lacks the file that the launcher"
    )
    assert list((other / "tiny-1").iterdir()) == []


def test_a_run_folder_that_ranks_may_not_write(rig: Rig, run_dir: Path) -> None:
    os.chown(run_dir, 0, 0)
    finding = only(faults(rig, launch(rig, rig.host_config(0)), run_dir), "host0")
    assert finding.startswith(f"uid 10001 cannot write {run_dir} (Permission denied; it belongs to 0:0, mode 0755)")
    assert f"`chown -R 10001:10001 {run_dir.parent}` there, or set launch.user" in finding
    own(run_dir, rig)
    (run_dir / "checkpoints").mkdir()  # of an earlier attempt, by another user
    finding = only(faults(rig, launch(rig, rig.host_config(0)), run_dir), "host0")
    assert finding.startswith(f"uid 10001 cannot write {run_dir / 'checkpoints'}")
    own(run_dir / "checkpoints", rig)
    check(launch(rig, rig.host_config(0)), run_dir)


def test_a_home_that_ranks_may_not_enter(rig: Rig, run_dir: Path) -> None:
    os.chown(run_dir.parent, 0, 0)
    run_dir.parent.chmod(0o700)
    finding = only(faults(rig, launch(rig, rig.host_config(0)), run_dir), "host0")
    assert finding.startswith(f"uid 10001 cannot enter {run_dir.parent} (Permission denied): `chown -R")


def test_a_disk_without_room(rig: Rig) -> None:
    small = rig.make_home(size_mib=16) / "tiny-1"
    small.mkdir()
    own(small, rig)
    finding = only(faults(rig, launch(rig, rig.host_config(0)), small), "host0")
    assert finding == f"{small.parent} has 0.02 GiB free, 1 are needed: free some space"


def test_an_address_of_another_host(rig: Rig, run_dir: Path) -> None:
    wrong = launch(rig, rig.host_config(0, address=rig.hosts[1].address, interface="lo"))
    not_its_own, not_on_it = faults(rig, wrong, run_dir)["host0"]
    assert not_its_own.startswith(f"address {rig.hosts[1].address} is not this host's. Its addresses: ")
    assert not_on_it.startswith(f"interface lo does not have the address {rig.hosts[1].address}")


def test_a_host_that_is_cut_off_and_one_without_daemon(rig: Rig, run_dir: Path) -> None:
    rig.partition(rig.hosts[0])
    rig.kill_daemon(rig.hosts[1])
    config = launch(rig, *(rig.host_config(i) for i in range(3)))
    with pytest.raises(HostsNotReady) as refused:
        check(config, run_dir)
    assert refused.value.unreachable == {"host0", "host1"}
    assert set(refused.value.findings) == {"host0", "host1"}  # the third is fit, and was asked all the same
    assert "no answer: check the host's power" in refused.value.findings["host0"][0]
    assert "nothing listens there: start Docker" in refused.value.findings["host1"][0]
    assert rig.containers(rig.hosts[2]) == []


def test_a_container_that_hangs_is_given_up_and_removed(rig: Rig) -> None:
    hangs = Job(image=rig.image, command=("sleep", "600"), name="hangs", mounts=rig.binds, memlock=False)
    found = probe(rig.hosts[0].docker_host(), hangs, timeout_s=1)
    assert found.findings == ("a container gave no answer in 1 s: its shared folder may hang; check with `df` there",)
    assert rig.containers(rig.hosts[0]) == []


def test_gpus_that_are_granted_but_not_there(rig: Rig, run_dir: Path, tmp_path: Path) -> None:
    hook = tmp_path / "nvidia-container-runtime-hook"  # a daemon that finds one says yes to GPUs; this one adds none
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        rig.kill_daemon(rig.hosts[0])
        rig.start_daemon(rig.hosts[0])
    try:
        finding = only(faults(rig, launch(rig, rig.host_config(0, gpus=2)), run_dir), "host0")
        assert finding.startswith("2 GPUs were granted, but a container sees 0: `nvidia-smi -L` there must list them")
    finally:
        rig.kill_daemon(rig.hosts[0])
        rig.start_daemon(rig.hosts[0])


@pytest.fixture
def adapters(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    """A config whose containers see an InfiniBand adapter: a stand-in for /sys/class/infiniband is mounted there."""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    monkeypatch.setattr("tasks.hardware.preflight.ADAPTERS", "/infiniband")
    mounts = (*rig.mounts, f"{tmp_path / 'infiniband'}:/infiniband")
    return launch(rig, rig.host_config(0, gpus=1), mounts=mounts)


@pytest.fixture
def device_nodes() -> Iterator[Path]:
    """/dev/infiniband/uverbs0 on this machine, whose /dev the rig's hosts share; it works as /dev/null does."""
    folder = Path("/dev/infiniband")
    if folder.exists():
        pytest.skip("this machine has InfiniBand of its own")
    folder.mkdir()
    os.mknod(folder / "uverbs0", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "uverbs0").chmod(0o666)
    yield folder
    shutil.rmtree(folder)


def test_adapters_without_device_nodes_are_refused(rig: Rig, run_dir: Path, adapters: LaunchConfig) -> None:
    found = faults(rig, adapters, run_dir)["host0"]
    assert any(line.startswith("mlx5_0 is in this host, but a container has no /dev/infiniband") for line in found), (
        found
    )
    over_tcp = adapters.model_copy(update={"devices": ()})
    assert not any("mlx5_0" in line for line in faults(rig, over_tcp, run_dir)["host0"])


def test_device_nodes_reach_the_containers(rig: Rig, run_dir: Path, adapters: LaunchConfig, device_nodes: Path) -> None:
    assert not any("mlx5_0" in line for line in faults(rig, adapters, run_dir)["host0"])
    (host,) = docker_hosts(read_hosts(launch(rig, rig.host_config(0))), home=run_dir.parent)
    for devices in ("auto", (str(device_nodes),)):
        config = launch(rig, rig.host_config(0), devices=devices)
        command = ("sh", "-c", "test -c /dev/infiniband/uverbs0")
        job = container_spec(host, config, home=run_dir.parent, run_id=run_dir.name, what="probe", command=command)
        with closing(connect(host)) as client:
            container = start(client, job)
            passed = client.api.inspect_container(container)["HostConfig"]["Devices"]
            output = finish(client, container, timeout_s=30)
        assert [device["PathInContainer"] for device in passed] == [str(device_nodes)]
        assert output.code == 0


def test_a_device_that_a_host_has_not_got(rig: Rig, run_dir: Path) -> None:
    finding = only(faults(rig, launch(rig, rig.host_config(0), devices=("/dev/none",)), run_dir), "host0")
    assert finding == "it has no /dev/none: load the device's driver there, or take it out of launch.devices"


@pytest.mark.skipif(may_lock_memory(), reason="this kernel lets Docker lift the limit on locked memory")
def test_a_kernel_that_keeps_its_limit_on_locked_memory(rig: Rig, run_dir: Path) -> None:
    finding = only(faults(rig, launch(rig, rig.host_config(0), memlock=True), run_dir), "host0")
    assert "refuses to lift the limit on locked memory: set launch.memlock=false" in finding


def test_hosts_are_measured_in_their_containers_once(
    rig: Rig, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tasks.hardware.measure_hosts.BUSY_PERCENT", 101.0)  # whatever else runs beside the tests
    caplog.set_level(logging.INFO, logger="tasks")
    config = launch(rig, rig.host_config(0, cpus=1, memory_gib=2), rig.host_config(1))
    hosts, home = docker_hosts(read_hosts(config), home=run_dir.parent), run_dir.parent
    place = {"home": home, "run_dir": run_dir, "facts": check(config, run_dir), "slots": {"host0": 1, "host1": 2}}
    measured = measure_hosts(hosts, config, **place).hosts
    assert "measured host0, host1 in" in caplog.text
    assert measured == strongest_first(measured), "two daemons share these cores: either may be the stronger"
    weak, strong = sorted(measured, key=lambda host: host.name)  # the second has twice the ranks, and no quota
    assert [len(strong.devices), len(weak.devices)] == [2, 1]
    assert strong.allreduce_gb_per_s > 0
    assert (weak.cores, weak.memory_gib, weak.devices[0].memory_gib) == (1, 2, 2)
    assert weak.versions["image"] == rig.image
    assert_nothing_left(rig, run_dir)
    caplog.clear()
    assert measure_hosts(hosts, config, **place).hosts == measured
    assert "measured" not in caplog.text


def test_a_measurement_that_fails_says_on_which_host_and_why(rig: Rig, run_dir: Path) -> None:
    config = launch(rig, rig.host_config(0, memory_gib=0.03))
    (host,) = docker_hosts(read_hosts(config), home=run_dir.parent)
    facts = check(launch(rig, rig.host_config(0)), run_dir)
    with pytest.raises(HostError, match=r"host0: measuring 1 rank failed \(exit code 137\)"):
        measure_hosts([host], config, facts=facts, slots={"host0": 1}, home=run_dir.parent, run_dir=run_dir)
    assert_nothing_left(rig, run_dir)
