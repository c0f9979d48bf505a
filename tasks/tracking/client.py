"""MLflow's client with limited retries, few log lines, and clear errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from tasks.tracking.database import cure_of, make_database
from tasks.workspace.paths import (
    MLFLOW_PASSWORD,
    MLFLOW_USER,
    command,
    embedded_artifacts,
    home,
    mlflow_credentials,
    password_file,
    tracking_uri,
    up_url,
)
from tasks.workspace.wait import until
from training.config.credentials import without_url_credentials
from training.tracking.redaction import without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

TRAINING_PAGES = {"mlflow.experimentKind": "custom_model_development"}  # or MLflow opens its GenAI pages
PATIENCE_S, ASK_EVERY_S = 600.0, 2.0


def connect() -> MlflowClient:
    """Return a client of the store that this process uses. Raises RuntimeError within seconds if it does not answer."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return registry_client(tracking_uri())


def wait_for_store() -> None:
    """Wait until MLflow answers; it may restart in the middle of a run. Raises RuntimeError after PATIENCE_S."""
    errors: list[RuntimeError] = []

    def answers() -> bool:
        try:
            connect()
        except RuntimeError as error:
            if not errors:
                logger.warning("%s. The run waits up to %.0f min for it", error, PATIENCE_S / 60)
            errors.append(error)
            return False
        return True

    if not until(answers, timeout_s=PATIENCE_S, every_s=ASK_EVERY_S):
        raise errors[-1]


# With MLflow's defaults a request waits for minutes without a message. With these it waits 0, 2 and 4 s, each with up
# to 1 s of jitter, for a server that restarts. Variables that the user has set stay.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # no progress bars: there would be three per registration
}
# urllib3 would log every retry; the error at the end reports it once.
LOG_LEVELS = {"mlflow": logging.WARNING, "alembic": logging.WARNING, "urllib3.connectionpool": logging.ERROR}


def registry_client(tracking_uri: str) -> MlflowClient:
    """Return a client of one store for tracking and registry; the first one of a process takes about a second.

    Raises RuntimeError, without the URI's credentials, if it does not answer.
    """
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name, level in LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    try:
        make_database(tracking_uri)
        client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        client.search_experiments(max_results=1)
    except Exception as error:
        why = without_credentials(str(error), uri=tracking_uri)
        raise RuntimeError(
            f"MLflow at {without_url_credentials(tracking_uri)} does not answer ({why}): {cure_of(tracking_uri, why)}"
        ) from None  # without the cause: its text has the credentials, and a traceback would print it
    return client


def run_or_none(client: MlflowClient, mlflow_run_id: str) -> Run | None:
    """Return the run; None if MLflow has none of that ID, such as after `mlflow gc`."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(mlflow_run_id)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise


def log_inputs(client: MlflowClient, run_id: str, **inputs: list[Any]) -> None:
    """Log a run's inputs. If another run makes the row of the same data set at once, MLflow refuses ours."""
    from mlflow.exceptions import MlflowException

    try:
        client.log_inputs(run_id, **inputs)
    except MlflowException as error:
        if not any(name in str(error) for name in ("IntegrityError", "UniqueViolation")):  # SQLite, MySQL; PostgreSQL
            raise
        client.log_inputs(run_id, **inputs)  # now it finds the row


def check_artifacts(client: MlflowClient, experiment_id: str) -> None:
    """Raise ValueError if MLflow would write files to where SHARDLINE_HOME was before it was moved or copied: it keeps
    that path.
    """
    if (ours := embedded_artifacts()) is None:
        return
    theirs = client.get_experiment(experiment_id).artifact_location
    if theirs == ours or not theirs.startswith("file:") or Path(theirs).name != Path(ours).name:
        return
    old, here = Path(unquote(urlparse(theirs).path)).parent, home() / "mlflow.db"
    if (old / here.name).exists() and here.exists() and here.samefile(old / here.name):
        return
    first = f"Move {old} away, after its artifacts/ went to {home()}. " if old.exists() else ""
    raise ValueError(
        f"MLflow keeps the files of this experiment in {old}, where SHARDLINE_HOME was before it was moved or copied "
        f"to {home()}. {first}Let the old path lead to the new one, then start again: "
        f"mkdir -p {quote(str(old.parent))} && ln -s {quote(str(home()))} {quote(str(old))}"
    )


def mlflow_variables(uri: str) -> str:
    """Return assignments for a shell, by which programs find an MLflow, with the password of `shardline up`'s."""
    named = f"MLFLOW_TRACKING_URI={quote(without_url_credentials(uri))}"
    if uri != up_url("mlflow") or not (known := mlflow_credentials()):
        return named
    password = f"$(cut -d: -f2 {quote(str(password_file('mlflow')))})"
    return f"{named} {MLFLOW_USER}={known[MLFLOW_USER]} {MLFLOW_PASSWORD}={password}"


def mlflow_command(words: str) -> str:
    """Return a line for a shell: the mlflow command on the server or database of this process."""
    return f"{mlflow_variables(tracking_uri())} {command('mlflow')} {words}"


def mlflow_gc_command(run_ids: Iterable[str]) -> str:
    """Return the line by which deleted runs are removed for good; MLflow does that on its database only."""
    store = f"sqlite:///{home()}/mlflow.db" if embedded_artifacts() else "URI_OF_THE_DATABASE_OF_MLFLOW"
    return mlflow_command(f"gc --backend-store-uri {quote(store)} --run-ids {','.join(run_ids)}")


def experiment_of(client: MlflowClient, name: str, *, tags: Mapping[str, str] | None = None) -> str:
    """Return the ID of the experiment of this name; it is made if it is missing, and two commands may do so at once.

    `tags` are those of a new one.
    """
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name, artifact_location=embedded_artifacts(), tags=dict(tags or {})))
        except MlflowException as error:
            found = client.get_experiment_by_name(name) if error.error_code == "RESOURCE_ALREADY_EXISTS" else None
            if found is None:
                raise
    return str(found.experiment_id)
