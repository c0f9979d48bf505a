"""What the tests of tasks share: MLflow stores, with room for exported runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mlflow_store import Store, new_store


@pytest.fixture(scope="session")
def exported_masked_run(exported_runs: Callable[[str], Path]) -> Path:
    """runs/ID of a tiny BERT."""
    return exported_runs("bert")


@pytest.fixture
def store(empty_store: Path, exported_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    return new_store(empty_store, tmp_path, exported=exported_run)


@pytest.fixture
def champion(store: Store) -> Store:
    """A store whose registry has tiny/1 as champion."""

    store.registered("one", loss=3.0)
    return store
