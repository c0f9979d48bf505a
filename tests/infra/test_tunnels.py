"""What ssh is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.tunnels import local_socket


def test_the_users_shared_connections_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master of theirs would hold our forwarding, and take it along when it ends."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" >&2\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConnectionError) as refused:
        local_socket("ssh://me@gpu1:2222", timeout_s=5)
    assert "-o ControlMaster=no -o ControlPath=none" in str(refused.value)
    assert "-p 2222 -l me -- gpu1 cat" in str(refused.value)
