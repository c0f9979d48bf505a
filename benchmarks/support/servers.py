"""Runs the servers of `shardline up` for benchmarks/operations.py, submits flows and counts the rows in MLflow."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.support.metric_writers import METRICS
from flows.servers.deploy import POOL
from tasks.workspace.wait import until
from tests.support.local_servers import FINAL, LocalServers
from tests.support.user_folder import UserFolder

REPO = Path(__file__).parents[2]
UNSET = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME")
POLL_S = 0.1


class Servers(LocalServers):
    """Local servers that run inside a `with` block, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(UserFolder(folder))
        self.home = self.user_folder.home
        inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
        self.environment = inherited | {"SHARDLINE_HOME": str(self.home), "MLFLOW_TRACKING_URI": self.url("mlflow")}

    def __enter__(self) -> Servers:
        self.start()
        self.environment |= self.mlflow_address
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def deploy(self, flow: str, *, name: str, entrypoint: str) -> None:
        """Deploy a flow into a queue without a concurrency limit."""
        here = {"prefect.deployments.steps.set_working_directory": {"directory": str(REPO)}}
        flow_id = self.prefect("/flows/", {"name": flow})["id"]
        pool = {"work_pool_name": POOL, "work_queue_name": "default"}
        known = {"name": name, "flow_id": flow_id, "entrypoint": entrypoint, "pull_steps": [here]}
        self.prefect("/deployments/", known | pool)

    def ended(self, flow_runs: list[str], *, timeout_s: float) -> list[dict[str, Any]]:
        """Wait until all flow runs have ended, or the time is over; return the ended ones, the first started first."""
        wanted = {"flow_runs": {"id": {"any_": flow_runs}}, "sort": "START_TIME_ASC"}

        def ended() -> list[dict[str, Any]]:
            return [run for run in self.prefect("/flow_runs/filter", wanted) if run["state_type"] in FINAL]

        until(lambda: len(ended()) == len(flow_runs), timeout_s=timeout_s, every_s=POLL_S)
        return ended()

    def mlflow_runs(self, experiment: str) -> dict[str, tuple[str, str]]:
        """Return flow run -> (MLflow run, its status), from MLflow's database."""
        query = (
            "select value, run_uuid, status from runs join tags using (run_uuid) "
            "join experiments using (experiment_id) where key = 'prefect.flow_run_id' and experiments.name = ?"
        )
        with closing(self._database()) as database:
            return {flow_run: (run, status) for flow_run, run, status in database.execute(query, (experiment,))}

    def rows(self, mlflow_run: str, *, written: int, keys: tuple[str, ...] = METRICS) -> tuple[int, int]:
        """Count (rows lost, rows doubled) of steps 1 to `written` in MLflow's database."""
        query = (
            "select count(*), count(distinct key) from metrics where run_uuid = ? and step between 1 and ? "
            f"and key in ({','.join('?' * len(keys))}) group by step"
        )
        with closing(self._database()) as database:
            by_step = database.execute(query, (mlflow_run, written, *keys)).fetchall()
        whole = sum(different == len(keys) for _, different in by_step)
        return written - whole, sum(count > different for count, different in by_step)

    def _database(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.home}/mlflow.db?mode=ro", uri=True, timeout=60)
