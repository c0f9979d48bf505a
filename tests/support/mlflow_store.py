"""An MLflow store of one test, with runs as training leaves them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.tiny_run import another_run

if TYPE_CHECKING:
    from tasks.promotion.register import RegisteredModel


@dataclass(frozen=True)
class Store:
    """An MLflow store of one test, with an experiment whose artifacts lie beside it."""

    uri: str
    folder: Path
    experiment_id: str
    exported: Path

    def finished_run(self, name: str, *, loss: float, commit: str = "0" * 40, **changes: Any) -> Path:
        """runs/NAME, trained, evaluated to `loss` and exported, with its MLflow run."""
        from mlflow.tracking import MlflowClient

        tags = {"mlflow.source.git.commit": commit}
        run = MlflowClient(self.uri).create_run(self.experiment_id, run_name=name, tags=tags)
        folder = self.folder / "runs" / name
        return another_run(self.exported, folder, mlflow_run_id=run.info.run_id, loss=loss, **changes)

    def registered(self, name: str, *, loss: float, **changes: Any) -> RegisteredModel:
        """Such a run's model as a version of the registry, judged against the champion."""
        from tasks.promotion.register import register_model

        return register_model(self.finished_run(name, loss=loss, **changes), tracking_uri=self.uri)


def new_store(empty_store: Path, folder: Path, *, exported: Path) -> Store:
    """A store in `folder`, made from a database that has MLflow's tables."""
    from mlflow.tracking import MlflowClient

    shutil.copy(empty_store, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    artifacts = (folder / "artifacts").as_uri()
    experiment_id = MlflowClient(uri).create_experiment("tests", artifact_location=artifacts)
    return Store(uri=uri, folder=folder, experiment_id=experiment_id, exported=exported)
