"""What the tests of these tasks share: one exported run, and MLflow stores with room for more of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.mlflow_store import Store
from tests.support.tiny_run import export_by_program, tiny_run


@pytest.fixture(scope="session")
def exported_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ID of a tiny Llama, exported by the program, as the flow does it."""
    run_dir = tiny_run(tmp_path_factory.mktemp("runs") / "run-a")
    done = export_by_program(run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="session")
def exported_masked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a tiny BERT."""
    run_dir = tiny_run(tmp_path_factory.mktemp("runs") / "run-b", architecture="bert")
    done = export_by_program(run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables: making them takes seconds, so it is done once and copied."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_registered_models()
    return path


@pytest.fixture
def store(empty_store: Path, exported_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    artifacts = (tmp_path / "artifacts").as_uri()
    experiment_id = MlflowClient(uri).create_experiment("tests", artifact_location=artifacts)
    return Store(uri=uri, folder=tmp_path, experiment_id=experiment_id, exported=exported_run)


@pytest.fixture
def champion(store: Store) -> Store:
    """A store whose registry has tiny/1 as champion."""
    from tasks.promotion.register import register_model

    register_model(store.finished_run("one", loss=3.0), tracking_uri=store.uri)
    return store
