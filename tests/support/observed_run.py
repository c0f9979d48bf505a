"""A small run that something happens to in the middle, and what both systems must say of it in the end, exactly."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.launch.recovery import attempts_of
from tasks.runs.owner import owner_record
from tasks.workspace.processes import local_process
from tests.support.local_servers import LocalServers
from tests.support.ranks import losses
from tests.support.user_folder import AS_FILES
from tests.support.waiting import until
from training.records.train_result import TrainResult
from training.tracking.mlflow_sender import NOT_METRICS, OF_THE_MODEL
from training.tracking.rows import read_rows

STEPS = 200
SETTINGS = (
    *AS_FILES,
    f"train.steps={STEPS}",
    "train.log_every_steps=1",
    "checkpoint.every_steps=25",
    "evaluation.every_steps=0",
    "parallel.ranks=2",
)
MIDDLE = 40  # a step with a checkpoint behind it and most of the run before it
WITHIN_S = 600.0


@dataclass
class ObservedRun:
    """One run: submitted to the worker, or begun by a command."""

    servers: LocalServers
    folder: Path
    flow_run_id: str

    @classmethod
    def submitted(cls, servers: LocalServers, *overrides: str) -> ObservedRun:
        known = servers.user_folder.run_dirs()
        flow_run_id = servers.submit("pretrain", servers.config(*SETTINGS, *overrides))
        return cls(servers, _new_folder(servers, known), flow_run_id)

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.folder / "plan.json")

    def wait_for_step(self, step: int) -> None:
        until(lambda: max(self._logged(), default=0) >= step, f"step {step} of {self.folder.name}", within_s=WITHIN_S)

    def _logged(self) -> dict[int, float]:
        return self.losses if (self.folder / "metrics.jsonl").exists() else {}

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in their order."""
        return sorted(filter(_is_rank, self.processes()), key=lambda process: process.name())

    def flow(self) -> psutil.Process:
        owner = owner_record(self.folder)
        process = local_process(owner.process) if owner else None
        assert process is not None, "nobody works on the run"
        return process

    def processes(self) -> list[psutil.Process]:
        """All that belong to the run: its flow's process, its launcher and ranks."""
        return [process for process in psutil.process_iter() if self._is_of_it(process)]

    def _is_of_it(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            named = any(str(self.folder) in word for word in process.cmdline())
            return named or process.environ().get("PREFECT__FLOW_RUN_ID") == self.flow_run_id
        return False

    @property
    def mlflow_run_id(self) -> str:
        return str(json.loads((self.folder / "run.json").read_text())["mlflow_run_id"])

    @property
    def mlflow(self) -> Any:
        return self.servers.mlflow.get_run(self.mlflow_run_id)

    def statuses(self) -> tuple[str, str, str]:
        """Prefect's state of the flow run, MLflow's status of the run, and the cause that MLflow has."""
        state = self.servers.prefect(f"/flow_runs/{self.flow_run_id}")["state_type"]
        return state, self.mlflow.info.status, self.mlflow.data.tags.get("shardline.cause", "")

    def message(self) -> str:
        """The message of the flow run's state in Prefect."""
        return str(self.servers.prefect(f"/flow_runs/{self.flow_run_id}")["state"]["message"])

    def check_the_rest(self) -> None:
        """Metrics in MLflow are those on disk, once each; one MLflow run; no process, lease or claim is left.

        The lease of a launcher that was killed stays, and nobody renews it, until the run is resumed.
        """
        self.check_metrics()
        experiments = [experiment.experiment_id for experiment in self.servers.mlflow.search_experiments()]
        of_it = self.servers.mlflow.search_runs(experiments, f"tags.`shardline.run_id` = '{self.folder.name}'")
        assert [run.info.run_id for run in of_it] == [self.mlflow_run_id]
        until(lambda: not self.processes(), f"the end of {self.processes()}", within_s=20)
        assert self.mlflow.info.status == "KILLED" or not list(self.folder.glob("attempts/*/lease"))
        assert json.loads(self.servers.user_folder.run("ps", "--json")[0])["running"] == []

    def check_metrics(self) -> None:
        """Rates of steps that a resume came by again are those of the first time."""
        rows = read_rows(self.folder / "metrics.jsonl")
        keys = {key for row in rows for key in row} - NOT_METRICS
        trained = [it for it in attempts_of(self.folder) if it["program"] == "training.train"]
        resumed = len(trained) > 1 or any(event["what"] == "resumed" for event in self.history())
        for key in sorted(keys):
            ours = Counter((row["step"], row[key]) for row in rows if key in row)
            theirs = Counter(
                (it.step, it.value) for it in self.servers.mlflow.get_metric_history(self.mlflow_run_id, key)
            )
            if resumed and key not in OF_THE_MODEL:
                ours, theirs = (Counter(step for step, _ in them) for them in (ours, theirs))
                # a row that the kill took back, and no later one has, such as of a checkpoint
                assert not ours - theirs, key
            else:
                assert ours == theirs, key
            assert max(theirs.values()) == 1, key

    def history(self) -> list[dict[str, Any]]:
        path = self.folder / "history.json"
        return list(json.loads(path.read_text())["events"]) if path.exists() else []

    def result(self) -> TrainResult:
        return TrainResult.read(self.folder / "result.json")


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.name().startswith("rank-")
    return False


def _new_folder(servers: LocalServers, known: list[Path]) -> Path:
    return Path(
        until(
            lambda: next(iter(set(servers.user_folder.run_dirs()) - {*known}), None),
            "the run's folder",
            within_s=WITHIN_S,
        )
    )


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def kill(*processes: psutil.Process) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    assert all(gone(process.pid) for process in processes), os.getpid()
