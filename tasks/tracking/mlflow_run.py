"""The MLflow run of a training: only this file opens, names and closes it, so that its status is true.

FINISHED, FAILED or KILLED is written on every way out. After a kill -9 no process is left to write it, so every flow
first closes the runs whose owner is gone (tasks/tracking/final_status.py).
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field

from tasks.runs.errors import RunFailed, RunStopped
from tasks.runs.folder import flattened, run_folders
from tasks.runs.history import note_start
from tasks.runs.owner import claim
from tasks.runs.resume import Resumptions
from tasks.tracking.client import (
    TRAINING_PAGES,
    check_artifacts,
    connect,
    experiment_of,
    log_inputs,
    mlflow_command,
    mlflow_gc_command,
    run_or_none,
)
from tasks.tracking.code_version import git_commit
from tasks.tracking.final_status import RunStatus, close, reopen
from tasks.workspace.locks import owned
from tasks.workspace.paths import home, mlflow_url, run_folder, tracking_uri
from tasks.workspace.skip import skip_unreadable
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.record import Record, sha256_config
from training.records.token_shards import Ledger, TokenShards
from training.records.train_result import TrainResult
from training.tracking.redaction import without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

RUN_ID = "shardline.run_id"
LEFT_OUT = "shardline.left_out_steps"
EXACT = "shardline.exact"  # "false" once a resume was forced
OVERRIDES = "shardline.resume_overrides"
PARENT = "mlflow.parentRunId"
FLOW_RUN, FLOW_RUN_STARTS = "prefect.flow_run_id", "prefect.flow_run_starts"
ROOT_FLOW_RUN = "prefect.root_flow_run_id"  # the outermost flow run, which people see if flows call flows
DESCRIPTION = "mlflow.note.content"
OURS = "\n\nreport.html, among the artifacts, has more."  # the end of a description that Shardline wrote
PARAMS_PER_REQUEST = 100
LONGEST_TAG = 8000  # characters, MLflow's limit


class TrackedRun(Record):
    """runs/ID/run.json: the run and its MLflow run."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    run_id: str
    """ID of the run, which is the name of its folder."""
    mlflow_run_id: str
    """MLflow's ID of the run."""
    experiment_id: str
    """MLflow's ID of the experiment that the run belongs to."""
    begun_with: RunConfig = Field(alias="config")
    """Config of the run's first start (in the file: `config`); the plan's, which a resume may change, is in force."""
    begun_by: str = ""
    """Flow run that started the run, the outermost where flows call flows; empty for a child of a comparison."""

    @property
    def folder(self) -> Path:
        return run_folder(self.run_id)

    def is_of(self, config: RunConfig) -> bool:
        """Whether the run began with this config, from whatever preset."""
        return self.begun_with.model_copy(update={"preset": config.preset}) == config


def read_run(run_id: str) -> TrackedRun:
    """Read run.json of a run. Raises ValueError if there is no such run."""
    path = run_folder(run_id) / "run.json"
    if not path.exists():
        raise ValueError(
            f"there is no run {run_id!r} in {home()}: `ls {home()}` lists the runs; one on a store is named by "
            "store.url/runs/RUN"
        )
    return TrackedRun.read(path)


def run_begun_by(flow_run: str, config: RunConfig) -> str:
    """Return the ID of the run that this flow run began with the same config before a retry; empty if there is none."""
    for path in (folder / "run.json" for folder in reversed(run_folders())):
        with skip_unreadable(f"whether this flow run began run {path.parent.name} is unknown"):
            if flow_run and flow_run.encode() in path.read_bytes():
                run = TrackedRun.read(path)
                if run.begun_by == flow_run and run.is_of(config):
                    return run.run_id
    return ""


@contextmanager
def tracked(config: RunConfig, *, run_id: str, tags: Mapping[str, str]) -> Iterator[TrackedRun]:
    """Open the MLflow run of `run_id` (the same one if it was opened before), and close it with the true status."""
    client = connect()
    with owned(run_folder(run_id)):
        is_child = PARENT in tags  # the flow run belongs to the parent, so the child's end must not change it
        run = _opened(client, config, run_id=run_id, begun_by="" if is_child else tags.get(ROOT_FLOW_RUN, ""))
        with _closed(client, run):
            claim(
                run.folder,
                flow_run="" if is_child else tags.get(FLOW_RUN, ""),
                flow_run_starts=int(tags.get(FLOW_RUN_STARTS, 0)),
            )
            note_start(run.folder, commit=git_commit()[0])
            for key, value in tags.items():
                client.set_tag(run.mlflow_run_id, key, value)
            yield run


@contextmanager
def _closed(client: MlflowClient, run: TrackedRun) -> Iterator[None]:
    """Give the MLflow run its true status, however the block ends."""
    ending = RunStatus(status="FAILED", cause="error")
    try:
        yield
        ending = RunStatus(status="FINISHED", cause="done")
    except RunStopped as stop:
        ending = RunStatus(status="KILLED", cause="stopped", why=str(stop))
        raise
    except RunFailed as failure:
        ending = RunStatus(status="FAILED", cause=failure.cause, why=str(failure))
        raise
    except Exception as error:
        cause = "bad config" if isinstance(error, ValueError) else "error"
        ending = RunStatus(status="FAILED", cause=cause, why=str(error))
        raise
    except BaseException as interruption:  # Ctrl-C, a Prefect cancel, SIGTERM
        why = f"interrupted ({type(interruption).__name__})"
        ending = RunStatus(status="KILLED", cause="stopped", why=why)
        raise
    finally:
        close(client, run.folder, run.mlflow_run_id, ending)


def _opened(client: MlflowClient, config: RunConfig, *, run_id: str, begun_by: str) -> TrackedRun:
    path = run_folder(run_id) / "run.json"
    if path.exists():
        run = TrackedRun.read(path)
        if _is_known(client, run):
            check_artifacts(client, run.experiment_id)
            reopen(client, run.folder, run.mlflow_run_id)
            logger.info("continuing MLflow run %s", run.mlflow_run_id)
            return run
        logger.warning(
            "MLflow at %s has no run %s, in which %s began: continuing in a new MLflow run, which gets all its metrics",
            mlflow_url(),
            run.mlflow_run_id,
            run_id,
        )
        config, begun_by = run.begun_with, run.begun_by
    experiment_id = experiment_of(client, config.name, tags=TRAINING_PAGES)
    check_artifacts(client, experiment_id)
    run = TrackedRun(
        run_id=run_id,
        mlflow_run_id=_created(client, experiment_id, run_id=run_id, tags=_code_tags(config, run_id=run_id)),
        experiment_id=experiment_id,
        begun_with=config,
        begun_by=begun_by,
    )
    try:
        run.write(path)
    except OSError:  # a full disk: nothing refers to this MLflow run
        client.set_terminated(run.mlflow_run_id, "FAILED")
        raise
    _log_config(client, run)
    return run


def _created(client: MlflowClient, experiment_id: str, *, run_id: str, tags: dict[str, str]) -> str:
    """Create the MLflow run and return its ID. If only the answer is lost, the run is found by its tag."""
    from mlflow.exceptions import MlflowException

    try:
        created = client.create_run(experiment_id, run_name=run_id, tags=tags)
    except MlflowException:
        found = client.search_runs([experiment_id], f"tags.`{RUN_ID}` = '{run_id}'", max_results=1)
        if not found:
            raise
        created = found[0]
    return str(created.info.run_id)


def _is_known(client: MlflowClient, run: TrackedRun) -> bool:
    """Whether MLflow has the run. Raises ValueError for one that was deleted there and can be restored."""
    known = run_or_none(client, run.mlflow_run_id)
    if known and known.info.lifecycle_stage == "deleted":
        raise ValueError(
            f"somebody deleted {run.run_id}'s run in MLflow: restore it "
            f"(`{mlflow_command(f'runs restore --run-id {run.mlflow_run_id}')}`), or remove it for good "
            f"(`{mlflow_gc_command([run.mlflow_run_id])}`), after which {run.run_id} continues in a new MLflow run"
        )
    return known is not None


def _code_tags(config: RunConfig, *, run_id: str) -> dict[str, str]:
    commit, dirty = git_commit()
    return {
        RUN_ID: run_id,
        "mlflow.source.git.commit": commit,
        "mlflow.source.name": "shardline",
        "shardline.version": importlib.metadata.version("shardline"),
        "shardline.git_dirty": str(dirty).lower(),
        "shardline.config_sha256": sha256_config(config),
    }


def _log_config(client: MlflowClient, run: TrackedRun) -> None:
    from mlflow.entities import Param

    params = [Param(key, str(value)[:6000]) for key, value in flattened(run.begun_with.model_dump(mode="json"))]
    for start in range(0, len(params), PARAMS_PER_REQUEST):
        client.log_batch(run.mlflow_run_id, params=params[start : start + PARAMS_PER_REQUEST])
    client.log_text(run.mlflow_run_id, run.begun_with.model_dump_json(indent=2), "config.json")


def log_plan(plan: RunPlan, inventory: Inventory, shards: TokenShards) -> None:
    """Log the plan and its reasons, the machines, and the data set as the run's input."""
    from mlflow.entities import Dataset, DatasetInput, Metric

    client = connect()
    client.log_text(plan.mlflow_run_id, plan.content().decode(), "plan.json")
    client.log_text(plan.mlflow_run_id, inventory.content().decode(), "inventory.json")
    client.log_text(plan.mlflow_run_id, shards.content().decode(), "dataset.json")
    dataset = Dataset(
        name=plan.config.data.described[:48],
        digest=shards.fingerprint[:36],  # MLflow's limit; the tag has the whole fingerprint
        source_type="local",
        source=f'{{"uri": "{Path(plan.shards_dir).as_uri()}"}}',
        profile=f'{{"train_tokens": {shards.tokens("train")}, "validation_tokens": {shards.tokens("validation")}}}',
    )
    log_inputs(client, plan.mlflow_run_id, datasets=[DatasetInput(dataset)])
    now, counts = int(time.time() * 1000), Ledger.total([shards])
    metrics = [Metric(f"data/{name}", number, now, 0) for name, number in counts.items()]
    client.log_batch(plan.mlflow_run_id, metrics=metrics)
    tags = {
        "shardline.dataset_fingerprint": shards.fingerprint,
        "shardline.tokenizer_sha256": shards.tokenizer_sha256,
        "shardline.precision": plan.describe_precision,
        "shardline.ranks": str(plan.world_size),
        "shardline.reasons": "; ".join(plan.reasons)[:LONGEST_TAG],
        "shardline.ledger": "; ".join(shards.ledger_lines() or ["all of the text was read"])[:LONGEST_TAG],
        "shardline.parameters": str(plan.shape.parameters),
    }
    for key, value in tags.items():
        client.set_tag(plan.mlflow_run_id, key, value)


def log_resumptions(run: TrackedRun, config: RunConfig, resumptions: Resumptions) -> None:
    """Log the changes of resumes in tags and config.json, because MLflow's parameters cannot change."""
    if not resumptions.resumptions:
        return
    client = connect()
    client.log_text(run.mlflow_run_id, resumptions.content().decode(), "resume-overrides.json")
    client.log_text(run.mlflow_run_id, config.model_dump_json(indent=2), "config.json")
    resumed = [f"after step {each.after_step}: {', '.join(map(str, each.changes))}" for each in resumptions.resumptions]
    tags = {
        OVERRIDES: "; ".join(resumed)[:4000],
        EXACT: str(resumptions.exact).lower(),
        "shardline.config_sha256": sha256_config(config),
    }
    for key, value in tags.items():
        client.set_tag(run.mlflow_run_id, key, value)


def log_spikes(run: TrackedRun, result: TrainResult) -> None:
    """Log in tags which steps were spikes, and which were left out; left_out.json has the reasons."""
    for key, steps in (("shardline.spikes", result.spikes), (LEFT_OUT, result.left_out)):
        if steps:
            connect().set_tag(run.mlflow_run_id, key, ", ".join(map(str, steps))[:LONGEST_TAG])


def log_figures(run: TrackedRun, figures: Mapping[str, float], *, step: int) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [Metric(key, value, now, step) for key, value in figures.items()]
    connect().log_batch(run.mlflow_run_id, metrics=metrics)


def log_files(run: TrackedRun, *paths: Path, folder: str | None = None) -> None:
    client = connect()
    check_artifacts(client, run.experiment_id)
    for path in paths:
        client.log_artifact(run.mlflow_run_id, str(path), folder)


def offer_files(run: TrackedRun, *paths: Path, folder: str | None = None) -> None:
    """Like `log_files`, but only warns if MLflow does not answer, so that the stage's own error is raised."""
    found = [path for path in paths if path.exists()]
    try:
        if found:
            log_files(run, *found, folder=folder)
    except Exception as error:
        why = without_credentials(str(error), uri=tracking_uri())
        logger.warning("could not log %s to MLflow (%s)", ", ".join(path.name for path in found), why)


def describe(run: TrackedRun, text: str) -> None:
    """Set the MLflow run's description, in Markdown; a description that a person wrote stays."""
    client = connect()
    known = client.get_run(run.mlflow_run_id).data.tags.get(DESCRIPTION, "")
    if not known or known.endswith(OURS):
        client.set_tag(run.mlflow_run_id, DESCRIPTION, text + OURS)
