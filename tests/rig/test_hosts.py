"""Reaching Docker hosts: over a unix socket, TLS and ssh; and what is said where that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from infra.hosts import DockerHost, HostClient, HostError, connect, host_errors, on_all, on_each
from tests.support.rig.certificates import make_certificate
from tests.support.rig.rig import Rig


def hostname(client: HostClient) -> str:
    return str(client.api.info()["Name"])


def test_hosts_are_reached_over_tls_and_unix_sockets(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever certificates and proxies the environment names."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(rig.wrong_tls_dir / "ca.pem"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    hosts = [rig.hosts[0].docker_host(), rig.hosts[1].docker_host(url=rig.hosts[1].socket, tls_dir=None)]
    assert on_all(hosts, lambda host: hostname(connect(host))) == {"host0": "host0", "host1": "host1"}


def _refused(host: DockerHost) -> HostError:
    with pytest.raises(HostError) as caught:
        connect(host, timeout_s=2)
    assert caught.value.hosts == (host.name,)
    assert str(caught.value).startswith(f"{host.name}: ")
    return caught.value


def test_certificates_that_do_not_match_are_named(rig: Rig, tmp_path: Path) -> None:
    host = rig.hosts[0]
    wrong_ca = _refused(host.docker_host(tls_dir=rig.wrong_tls_dir))
    assert "not signed by" in str(wrong_ca)
    assert str(rig.wrong_tls_dir / "ca.pem") in str(wrong_ca)

    make_certificate(tmp_path, authority=rig.folder / "other-authority", addresses=[])
    (tmp_path / "ca.pem").write_bytes((rig.tls_dir / "ca.pem").read_bytes())
    wrong_client = _refused(host.docker_host(tls_dir=tmp_path))
    assert f"does not accept {tmp_path}/cert.pem" in str(wrong_client)

    (tmp_path / "key.pem").unlink()
    assert "lacks key.pem" in str(_refused(host.docker_host(tls_dir=tmp_path)))
    assert "set the host's `tls` folder" in str(_refused(host.docker_host(tls_dir=None)))
    assert not any(error.unreachable for error in (wrong_ca, wrong_client))


def test_a_host_out_of_reach_says_so_within_the_timeout(rig: Rig) -> None:
    off = rig.hosts[1]
    client = connect(off.docker_host(), timeout_s=2)
    rig.partition(off)
    for request in (lambda: connect(off.docker_host(), timeout_s=2), lambda: connect_info(client)):
        begin = time.monotonic()
        with pytest.raises(HostError) as caught:
            request()
        assert caught.value.unreachable
        assert time.monotonic() - begin < 5
    rig.heal(off)
    assert hostname(connect(off.docker_host())) == "host1"


def connect_info(client: HostClient) -> None:
    with host_errors(client.host):
        client.api.info()


def test_a_dead_daemon_is_told_from_a_wrong_address(rig: Rig) -> None:
    host = rig.hosts[2]
    rig.kill_daemon(host)
    dead = _refused(host.docker_host())
    assert dead.unreachable
    assert "nothing listens there" in str(dead)
    dead_socket = _refused(host.docker_host(url=host.socket, tls_dir=None))
    assert dead_socket.unreachable
    unknown = _refused(host.docker_host(url="tcp://no-such-host.invalid:2376"))
    assert "does not resolve" in str(unknown)
    missing = _refused(host.docker_host(url="unix:///nowhere/docker.sock", tls_dir=None))
    assert "there is no daemon's socket" in str(missing)


def test_all_hosts_that_fail_are_named_at_once(rig: Rig) -> None:
    hosts = [
        rig.hosts[0].docker_host(tls_dir=rig.wrong_tls_dir),
        rig.hosts[1].docker_host(),
        rig.hosts[2].docker_host(url="tcp://no-such-host.invalid:2376"),
    ]
    with pytest.raises(HostError) as caught:
        on_all(hosts, lambda host: connect(host, timeout_s=2))
    assert caught.value.hosts == ("host0", "host2")
    assert "host0: " in str(caught.value)
    assert "host2: " in str(caught.value)
    each = on_each(hosts, lambda host: hostname(connect(host, timeout_s=2)))
    assert each["host1"] == "host1"
    assert isinstance(each["host0"], HostError)
