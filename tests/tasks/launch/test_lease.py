"""The lease: renewed while its holder lives, gone when it is withdrawn, by whatever launcher."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasks.launch import local
from tasks.launch.lease import Lease


def test_it_is_renewed_and_goes(tmp_path: Path) -> None:
    with Lease(tmp_path / "lease", lease_s=0.06) as lease:
        begun, seen = lease.path.read_bytes(), b""
        while seen in {b"", begun}:
            seen = lease.path.read_bytes()
    assert not lease.path.exists()


def test_a_withdrawn_lease_is_never_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Lease(tmp_path / "lease", lease_s=0.06) as lease:
        lease.path.unlink()
        lease._thread.join(10)
        assert "another launcher has withdrawn the lease" in caplog.text
    assert not lease.path.exists()


def test_a_resume_on_this_machine_ends_what_runs_on_docker_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tasks.launch.local.FENCE_S", 0.0)
    with Lease(tmp_path / "attempts" / "1" / "lease", lease_s=60.0) as lease, caplog.at_level(logging.WARNING):
        local.end_containers(tmp_path)
        assert not lease.path.exists()
    assert "shardline reap" in caplog.text
    caplog.clear()
    local.end_containers(tmp_path)
    assert not caplog.text
