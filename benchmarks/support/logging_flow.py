"""A flow that looks like training to Prefect and MLflow: a run in both, metric rows and progress, but no model.

`benchmarks.operations` deploys it and runs ten of them at once.
"""

from __future__ import annotations

import json

from prefect import flow

from benchmarks.support.metric_writers import write_rows
from flows.prefect_ui.links import link, prefect_tags
from flows.stages.training import new_run_id
from tasks.display.progress import step_progress
from tasks.tracking.mlflow_run import tracked
from tasks.workspace.paths import tracking_uri
from training.config.run import RunConfig
from training.tracking.metrics_log import MetricsLog
from training.tracking.rows import read_rows

NAME = "load"
STALLS = "stalls.json"


@flow(name="Log rows")
def log_rows(rows: int, rows_per_s: float) -> None:
    with tracked(RunConfig(name=NAME), run_id=new_run_id(NAME), tags=prefect_tags()) as run:
        link(run)
        log = MetricsLog(run.folder, tracking_uri=tracking_uri(), mlflow_run_id=run.mlflow_run_id)
        with step_progress("training", total=rows) as show:

            def at_tenth() -> None:
                show(read_rows(log.path)[-1])

            written = write_rows(
                lambda step, values: log.write(step, **values), rows=rows, rows_per_s=rows_per_s, at_tenth=at_tenth
            )
        log.close()
        (run.folder / STALLS).write_text(json.dumps(written["stalls_ms"].tolist()))
