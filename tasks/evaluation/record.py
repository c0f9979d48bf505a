"""An evaluation of a registered version: an MLflow run of its own, under the run that trained it, tied to its model."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tasks.evaluation.evaluate import Subject
from tasks.evaluation.report import metrics_of
from tasks.registry.tags import TAG, note_evaluation
from tasks.tracking.client import registry_client
from tasks.workspace.paths import tracking_uri
from training.records.results import EvalReport


def record(report: EvalReport, subject: Subject, *, text: str) -> str:
    """The ID of the MLflow run; empty for what is no registered version. `text`: its path, empty: held-out text.

    MLflow compares such runs like any others, and shows their figures on the model's page.
    """
    from mlflow.entities import Dataset, DatasetInput, LoggedModelInput, Metric

    version = subject.version
    if version is None:
        return ""
    client = registry_client(tracking_uri())
    trained = client.get_run(version.tags[f"{TAG}mlflow_run_id"])
    name, model_id = f"{version.name}/{version.version}", version.tags[f"{TAG}model_id"]
    source = text or "held-out text"
    tags = {
        "mlflow.parentRunId": trained.info.run_id,
        "mlflow.source.name": "shardline",
        f"{TAG}evaluates": name,
        f"{TAG}text": source,
        f"{TAG}dataset_fingerprint": report.shards_fingerprint,
        f"{TAG}checkpoint_sha256": report.checkpoint_sha256,
    }
    run = client.create_run(trained.info.experiment_id, run_name=f"evaluate {name} on {source}"[:250], tags=tags)
    run_id = run.info.run_id
    dataset = Dataset(
        name=report.shards_fingerprint[:16],  # its folder under SHARDLINE_HOME/tokens
        digest=report.shards_fingerprint[:36],  # MLflow's limit
        source_type="local",
        source=f'{{"uri": "{source}"}}',
    )
    client.log_inputs(run_id, models=[LoggedModelInput(model_id)], datasets=[DatasetInput(dataset)])
    now, tied = int(time.time() * 1000), {"dataset_name": dataset.name, "dataset_digest": dataset.digest}
    metrics = [
        Metric(key, value, now, report.step, model_id=model_id, run_id=run_id, **tied)
        for key, value in metrics_of(report).items()
    ]
    client.log_batch(run_id, metrics=metrics)
    with tempfile.TemporaryDirectory() as folder:
        report.write(Path(folder) / "eval.json")
        client.log_artifact(run_id, str(Path(folder) / "eval.json"))
    client.set_terminated(run_id, "FINISHED")
    fingerprint = report.shards_fingerprint
    note_evaluation(client, version.name, version.version, dataset=fingerprint, loss=report.loss, tokens=report.tokens)
    return str(run_id)
