"""`shardline up` for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_servers import LocalServers
from tests.support.user_folder import UserFolder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, begun_home: Path) -> Iterator[LocalServers]:
    """Started, on a user's folder of its own; what still works at the module's end is stopped."""
    started = LocalServers(UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home))
    try:
        started.start()
        yield started
    finally:
        started.stop()
