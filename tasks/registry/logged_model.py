"""Logs a run's export as an MLflow model: a pyfunc folder with signature and example, linked to its run and data."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.registry.models import example_prompt
from tasks.registry.tags import TAG
from tasks.tracking.client import log_inputs

if TYPE_CHECKING:
    from mlflow.entities import Dataset, LoggedModel, Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

PYFUNC_MODEL = Path(__file__).with_name("pyfunc_model.py")
GENERATOR = Path(__file__).parents[1] / "inference" / "onnx_generator.py"
ENCODER = Path(__file__).parents[2] / "training" / "tokenizer" / "text_encoder.py"
RECORDS = ("plan.json", "result.json", "eval.json")
METRICS_PER_REQUEST = 1000
# Packages that a loaded version needs. They are listed, because MLflow would otherwise find them in a subprocess, which
# takes 10 s or more.
REQUIREMENTS = ("mlflow", "numpy", "onnxruntime", "pandas", "tokenizers")


def logged_model(
    client: MlflowClient,
    run: Run,
    *,
    tags: Mapping[str, str],
    objective: str,
    figures: Mapping[str, float],
    run_dir: Path,
    shards_dir: Path,
) -> LoggedModel:
    """Return the MLflow model of `run_dir`/export/, in status READY; finish a model that an earlier call began."""
    checkpoint_sha256 = tags[f"{TAG}checkpoint_sha256"]
    begun = client.search_logged_models(
        [run.info.experiment_id],
        filter_string=f"source_run_id = '{run.info.run_id}' AND tags.`{TAG}checkpoint_sha256` = '{checkpoint_sha256}'",
    )
    model = begun[0] if begun else None
    if model is None:
        model = client.create_logged_model(
            run.info.experiment_id,
            name=re.sub(r"[^A-Za-z0-9_-]", "-", f"{run_dir.name}-step-{tags['step']}"),
            source_run_id=run.info.run_id,
            tags=dict(tags),
            model_type=objective,
        )
    if model.status == "READY":
        return model
    with tempfile.TemporaryDirectory(dir=run_dir) as scratch:
        folder = Path(scratch) / "model"
        _save_pyfunc(folder, model=model, run_dir=run_dir, shards_dir=shards_dir)
        client.log_model_artifacts(model.model_id, str(folder))
    _link(client, run, model, tags=tags, figures=figures, shards_dir=shards_dir)
    return client.finalize_logged_model(model.model_id, "READY")


def _save_pyfunc(folder: Path, *, model: LoggedModel, run_dir: Path, shards_dir: Path) -> None:
    """Write a self-contained MLflow model: MLmodel, signature, example, code, in artifacts/ export, records, generator
    and encoder.
    """
    import mlflow
    import pandas as pd

    records = folder.with_name("records")
    records.mkdir()
    for name in RECORDS:
        shutil.copy(run_dir / name, records / name)
    shutil.copy(shards_dir / "manifest.json", records / "manifest.json")
    # MLflow copies every artifact that it gets, and weights may be many GB. So it gets only the record; the other files
    # are linked into its folder afterwards.
    export, stub = run_dir / "export", folder.with_name("export")
    stub.mkdir()
    shutil.copy(export / "export.json", stub)
    example = pd.DataFrame({"prompt": [example_prompt(records)]})
    sampling = {"new_tokens": 64, "temperature": 0.8, "top_k": 50, "seed": 1337}
    saved = mlflow.models.Model(run_id=model.source_run_id, model_id=model.model_id)
    mlflow.pyfunc.save_model(
        folder,
        python_model=PYFUNC_MODEL,
        artifacts={
            "export": str(stub),
            "records": str(records),
            "generator": str(GENERATOR),
            "encoder": str(ENCODER),
        },
        signature=mlflow.models.infer_signature(example, ["text"], sampling),
        input_example=(example, {"new_tokens": 32, "seed": 1}),
        pip_requirements=[f"{name}=={importlib.metadata.version(name)}" for name in REQUIREMENTS],
        mlflow_model=saved,
    )
    assert saved.model_size_bytes is not None, "MLflow did not record the size of the artifacts"
    for path in export.iterdir():
        if path.name != "export.json":
            link_or_copy(path, folder / "artifacts" / "export" / path.name)
            saved.model_size_bytes += path.stat().st_size
    saved.save(folder / "MLmodel")


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if the file system has no links or `target` is on another file system."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy(source, target)


def _link(
    client: MlflowClient,
    run: Run,
    model: LoggedModel,
    *,
    tags: Mapping[str, str],
    figures: Mapping[str, float],
    shards_dir: Path,
) -> None:
    """Log the model as the run's output, the data set as its input, and the figures with links to both."""
    from mlflow.entities import DatasetInput, LoggedModelOutput, Metric

    step = int(tags["step"])
    outputs = {output.model_id for output in run.outputs.model_outputs} if run.outputs else set()
    if model.model_id not in outputs:  # MLflow refuses to log a model twice
        client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step=step)])
    known = [given.dataset for given in run.inputs.dataset_inputs] if run.inputs else []
    dataset = known[0] if known else _dataset(tags[f"{TAG}dataset_fingerprint"], shards_dir=shards_dir)
    if not known:
        log_inputs(client, run.info.run_id, datasets=[DatasetInput(dataset)])
    now, dataset_of = int(time.time() * 1000), {"dataset_name": dataset.name, "dataset_digest": dataset.digest}
    metrics = [Metric(name, value, now, step, model_id=model.model_id, **dataset_of) for name, value in figures.items()]
    for start in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(run.info.run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])


def _dataset(fingerprint: str, *, shards_dir: Path) -> Dataset:
    """Return MLflow's entity of the data set.

    Its digest is the first 36 characters of the fingerprint (MLflow's limit).
    """
    from mlflow.entities import Dataset

    return Dataset(
        name=shards_dir.name,
        digest=fingerprint[:36],
        source_type="local",
        source=json.dumps({"uri": shards_dir.as_uri()}),
    )
