"""Links between the Prefect run and the MLflow run."""

from __future__ import annotations

import os

from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL

from flows.prefect_ui.artifacts import name_flow_run, show_markdown
from flows.prefect_ui.tell import outermost_flow_run
from flows.servers.embedded import is_embedded
from tasks.tracking import mlflow_run
from tasks.tracking.mlflow_run import TrackedRun
from tasks.workspace.paths import command, mlflow_url


def prefect_tags() -> dict[str, str]:
    """Return tags for the MLflow run that lead to the Prefect run."""
    tags = {
        mlflow_run.FLOW_RUN: flow_run.id,
        mlflow_run.FLOW_RUN_STARTS: flow_run.run_count,
        mlflow_run.ROOT_FLOW_RUN: outermost_flow_run(),
    }
    if flow_run.id:
        tags["prefect.flow_run_url"] = prefect_page(flow_run.id)
    return {key: str(value) for key, value in tags.items() if value}


def prefect_page(flow_run_id: str) -> str:
    """Return the URL of a flow run in Prefect's UI; empty without one, or if the server ends with this process."""
    uri = PREFECT_UI_URL.value()
    return f"{uri}/flow-runs/flow-run/{flow_run_id}" if uri and flow_run_id and not is_embedded() else ""


def link(run: TrackedRun) -> None:
    """Show the MLflow run on the Prefect run's page, and rename the Prefect run to the run's ID."""
    page = mlflow_page(run)
    where = f"[MLflow run {run.run_id}]({page})" if page else f"MLflow run `{run.mlflow_run_id}`: `{open_mlflow()}`"
    show_markdown(f"{where}\n\nRun folder: `{run.folder}`", key="mlflow-run", description="MLflow run")
    name_flow_run(run.run_id)


def mlflow_page(run: TrackedRun, tab: str = "") -> str:
    """Return the URL of the run in MLflow's UI (its training pages, not those of GenAI); empty without a server."""
    uri, page = mlflow_url(), f"/#/experiments/{run.experiment_id}/runs/{run.mlflow_run_id}{tab}"
    return f"{uri}{page}?workflowType=machine_learning" if uri.startswith("http") else ""


def open_mlflow() -> str:
    """Return MLflow's address for people, or the command that starts it, with a password, on SHARDLINE_HOME's store."""
    uri = mlflow_url()
    return uri if os.environ.get("MLFLOW_TRACKING_URI") or uri.startswith("http") else f"{command('shardline')} up"
