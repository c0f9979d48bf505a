"""A host over ssh: with a real sshd in its network, and ssh's own configuration for key and host key."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import containers
from infra.hosts import DockerHost, HostError, connect
from tests.rig.test_containers import ended, job, output
from tests.support.rig.rig import Rig

SSHD = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized
StrictModes no
UsePAM yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
"""
SSH = """
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
"""


@pytest.fixture
def over_ssh(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerHost]:
    """host1, with `ssh` on PATH reading a configuration of the test's own."""
    sshd, host = shutil.which("sshd"), rig.hosts[1]
    if sshd is None:
        pytest.skip("no sshd: tests/rig/install.sh installs it")
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "authorized").write_bytes((tmp_path / "key.pub").read_bytes())
    (tmp_path / "sshd_config").write_text(SSHD.format(folder=tmp_path, address=host.address))
    (tmp_path / "ssh_config").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    Path("/run/sshd").mkdir(exist_ok=True)
    enter = ["nsenter", f"--net=/run/netns/{rig.network.namespaces[1]}"]
    server = subprocess.Popen([*enter, sshd, "-D", "-e", "-f", str(tmp_path / "sshd_config")])
    try:
        url = f"ssh://root@{host.address}{host.socket.removeprefix('unix://')}"
        yield host.docker_host(url=url, tls_dir=None)
    finally:
        server.kill()
        server.wait()


def patient_connect(host: DockerHost) -> containers.HostClient:
    """sshd takes a moment to listen."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return connect(host)
        except HostError:
            if time.monotonic() > deadline:
                raise


def test_a_job_runs_over_ssh_and_a_cut_is_noticed(rig: Rig, over_ssh: DockerHost) -> None:
    client = patient_connect(over_ssh)
    container = containers.start(client, job(rig, "import sys; print(sys.stdin.read())"), secret=b"hunter2")
    assert ended(client, container).exit_code == 0
    assert output(client, container).strip() == "hunter2"

    impatient = connect(over_ssh, timeout_s=2)
    rig.partition(rig.hosts[1])
    begin = time.monotonic()
    with pytest.raises(HostError) as caught:
        containers.state(impatient, container)
    assert caught.value.unreachable
    assert time.monotonic() - begin < 10
    rig.heal(rig.hosts[1])
    assert containers.state(patient_connect(over_ssh), container) is not None


def test_a_key_that_is_not_let_in_is_an_error_in_words(over_ssh: DockerHost, tmp_path: Path) -> None:
    patient_connect(over_ssh)
    (tmp_path / "authorized").write_text("")
    again = over_ssh.url.replace("ssh://root@", "ssh://nobody@")
    with pytest.raises(HostError, match="ssh-copy-id") as caught:
        connect(DockerHost(name="host1", url=again))
    assert not caught.value.unreachable
