"""A log's position beside its file, after a power cut."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from infra.hosts import DockerHost
from infra.logs import LogFollower, Position


@pytest.mark.parametrize("left", ["", "{", "null", '{"container": "abc"}', "\0\0\0\0"])
def test_a_broken_position_counts_as_none(tmp_path: Path, left: str) -> None:
    path, saved = tmp_path / "a.log", tmp_path / ".a.log.position"
    path.write_text("one\ntwo\n")
    saved.write_text(left)
    follower = LogFollower(DockerHost(name="a", url=f"unix://{tmp_path}/none"), "abc", path)
    follower.close()
    assert path.read_text() == "one\ntwo\n"
    assert json.loads(saved.read_text()) == asdict(Position("abc", size=8))
