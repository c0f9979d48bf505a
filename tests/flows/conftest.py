"""`shardline up` for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.local_servers import Up
from tests.support.user_folder import Shop


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Started, on a user's folder of its own; what still works at the module's end is stopped."""
    started = Up(Shop(tmp_path_factory.mktemp("shop")))
    try:
        started.start()
        yield started
    finally:
        started.stop()
