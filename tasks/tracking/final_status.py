"""Records a run's final status on disk and retries until MLflow and Prefect have it.

If MLflow is away at the end, or the process is killed before it could report, the next start, `shardline reconcile`
or the deployment of that name reports it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.runs.folder import run_folders
from tasks.runs.history import note_end
from tasks.runs.owner import end_orphans, owner_record
from tasks.tracking.client import registry_client
from tasks.workspace.locks import AlreadyOwned, owned
from tasks.workspace.paths import home, tracking_uri
from tasks.workspace.processes import local_process
from tasks.workspace.skip import skip_unreadable
from tasks.workspace.wait import until
from training.records.record import Record
from training.tracking.mlflow_sender import Sender, has_unsent_rows
from training.tracking.redaction import plain, without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

ENDING = "ending.json"
CAUSE, ENDED_BY = "shardline.cause", "shardline.ended_by"  # tags of the MLflow run
Status = Literal["FINISHED", "FAILED", "KILLED"]
PATIENCE_S, TRY_EVERY_S = 120.0, 5.0  # wait while the disk is full and MLflow does not answer


class RunStatus(Record):
    """runs/ID/ending.json: how the run ended, and who knows; a resume removes it."""

    status: Status
    """Final status of the run, by MLflow's name."""
    cause: str
    """Kind of the end, such as done, killed or the cause of a failure; a tag of the MLflow run."""
    why: str = ""
    """Why the run ended, as a sentence; empty if all went well."""
    mlflow_knows: bool = False
    """Whether MLflow has been told the status."""
    prefect_knows: bool = False
    """Whether the flow run has a final state, or there is no flow run."""


KILLED = RunStatus(status="KILLED", cause="killed", why="its process was killed")


class EndedRun(Record):
    """A run that has ended, while its flow run may not have."""

    run_id: str
    """ID of the run, which is the name of its folder."""
    ending: RunStatus
    """How the run ended."""
    found: bool
    """Whether `reconcile_mlflow` has just reported it to MLflow."""
    prefect_flow_run_id: str
    """ID of the run's flow run in Prefect."""
    prefect_starts: int
    """How often the flow run had been started when the run began; 0: unknown."""


def close(client: MlflowClient, folder: Path, mlflow_run_id: str, ending: RunStatus) -> None:
    """Record `ending`, then send the rest of the metrics and the status. A later `reconcile` repeats failed parts."""
    ending = ending.model_copy(update={"why": plain(ending.why)})
    note_end(folder, status=ending.status, cause=ending.cause, why=ending.why)
    until(lambda: _is_kept(client, folder, mlflow_run_id, ending), timeout_s=PATIENCE_S, every_s=TRY_EVERY_S)
    try:
        _report(client, folder, mlflow_run_id, ending)
    except Exception as error:
        why = without_credentials(str(error), uri=tracking_uri())
        said = "could not report the end of run %s to MLflow (%s): the next run or `shardline reconcile` will"
        logger.warning(said, folder.name, why)


def _is_kept(client: MlflowClient, folder: Path, mlflow_run_id: str, ending: RunStatus) -> bool:
    """Record the status on disk or, if the disk is full, in MLflow; without either the run would count as killed."""
    try:
        ending.write(folder / ENDING)
    except OSError as error:
        try:
            client.set_terminated(mlflow_run_id, ending.status)
        except Exception:
            logger.warning(
                "run %s ended as %s, which could be written neither to the disk (%s) nor to MLflow",
                folder.name,
                ending.status,
                error,
            )
            return False
    return True


def _report(client: MlflowClient, folder: Path, mlflow_run_id: str, ending: RunStatus) -> None:
    """Send the rest of the metrics, then the status, even if the metrics failed. Raises the first error."""
    unsent: Exception | None = None
    try:
        Sender(folder, tracking_uri=tracking_uri(), mlflow_run_id=mlflow_run_id).send()
    except Exception as error:  # the status is true without the metrics
        unsent = error
    client.set_tag(mlflow_run_id, CAUSE, ending.cause)
    if ending.why:
        client.set_tag(mlflow_run_id, ENDED_BY, ending.why[:4000])
    client.set_terminated(mlflow_run_id, ending.status)
    if unsent is not None:
        raise unsent
    ending.model_copy(update={"mlflow_knows": True}).write(folder / ENDING)


def reopen(client: MlflowClient, folder: Path, mlflow_run_id: str) -> None:
    """Mark the run as RUNNING again, and remove the record of its end."""
    (folder / ENDING).unlink(missing_ok=True)
    client.update_run(mlflow_run_id, status="RUNNING")
    for tag in {CAUSE, ENDED_BY} & client.get_run(mlflow_run_id).data.tags.keys():
        client.delete_tag(mlflow_run_id, tag)


def reconcile_mlflow() -> list[EndedRun]:
    """Report to MLflow the end of runs that no process works on, and end the helpers of killed owners.

    Returns the runs whose end Prefect may not know. Only runs of this SHARDLINE_HOME are checked, because it cannot be
    known here whether others live. A run whose records cannot be read is left out, with a warning.
    """
    client, ended = registry_client(tracking_uri()), list[EndedRun]()
    for path in (folder / "run.json" for folder in run_folders() if (folder / "run.json").exists()):
        with skip_unreadable(f"it is unknown how run {path.parent.name} ended"), suppress(AlreadyOwned):
            ended += _ended(client, path)
    return ended


def _ended(client: MlflowClient, path: Path) -> list[EndedRun]:
    """Report a run's end to MLflow; return it if Prefect may not know it. Raises AlreadyOwned for one that runs."""
    before = _read(path.parent)
    if before is not None and before.mlflow_knows and before.prefect_knows and not has_unsent_rows(path.parent):
        return []
    with owned(path.parent):
        ending = _settled(client, path.parent, Record.fields(path)["mlflow_run_id"])
    owner = owner_record(path.parent)
    if ending is None or ending.prefect_knows or owner is None or local_process(owner.process):
        return []
    return [
        EndedRun(
            run_id=path.parent.name,
            ending=ending,
            found=before is None or not before.mlflow_knows,
            prefect_flow_run_id=owner.flow_run,
            prefect_starts=owner.flow_run_starts,
        )
    ]


def _settled(client: MlflowClient, folder: Path, mlflow_run_id: str) -> RunStatus | None:
    """Report the final status of a run to MLflow and return it; None for a run of another MLflow."""
    from mlflow.exceptions import MlflowException

    ending, owner = _read(folder), owner_record(folder)
    if ending is None or not ending.mlflow_knows or has_unsent_rows(folder):
        try:
            status = client.get_run(mlflow_run_id).info.status
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if ending is None and status != "RUNNING":  # its disk was full
            Sender(folder, tracking_uri=tracking_uri(), mlflow_run_id=mlflow_run_id).send()
            ending = RunStatus(status=status, cause="", mlflow_knows=True)
        else:
            end_orphans(folder)
            if ending is None:
                ending = KILLED
                note_end(folder, status=ending.status, cause=ending.cause, why=ending.why)
            _report(client, folder, mlflow_run_id, ending)
            if not ending.mlflow_knows:
                _log(folder.name, ending)
            ending = ending.model_copy(update={"mlflow_knows": True})
    if owner is None or not owner.flow_run:
        ending = ending.model_copy(update={"prefect_knows": True})
    ending.write(folder / ENDING)
    return ending


def _log(run_id: str, ending: RunStatus) -> None:
    if ending == KILLED:
        logger.warning(
            "run %s was killed: reported it to MLflow as KILLED; `shardline resume %s` continues",
            run_id,
            run_id,
        )
    else:
        logger.warning("reported run %s to MLflow as %s (%s)", run_id, ending.status, ending.cause)


def mark_prefect_knows(run_id: str, ending: RunStatus) -> None:
    """Record that Prefect has the final state of the flow run, or does not know that flow run."""
    ending.model_copy(update={"prefect_knows": True}).write(home() / run_id / ENDING)


def _read(folder: Path) -> RunStatus | None:
    return RunStatus.read(folder / ENDING) if (folder / ENDING).exists() else None
