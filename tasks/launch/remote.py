"""What the launchers of other machines have in common: how their ranks reach MLflow, and the run's files there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.hosts import HostError
from tasks.launch.launcher import Host, grace_s
from tasks.launch.local import end_earlier_attempt
from tasks.launch.rank_environment import compile_cache, give_block_cache, give_to_ranks, tracking_for_ranks
from tasks.runs.folder import read_plan
from training.config.launch import LaunchConfig


class RemoteLauncher:
    """The part of Docker's, Slurm's and Kubernetes' launchers that does not depend on which of them it is."""

    pid_for_nodes = 0

    def __init__(self, launch: LaunchConfig, *, run_dir: Path, mlflow_run_id: str = "") -> None:
        self.launch, self.run_dir = launch, run_dir
        self.tracking = tracking_for_ranks(launch, mlflow_run_id=mlflow_run_id)
        self.ranks_send_metrics = "MLFLOW_RUN_ID" in self.tracking[0]

    def master_port(self) -> int:
        return self.launch.port

    def take_over(self) -> None:
        end_earlier_attempt(self.run_dir, grace_s=grace_s(read_plan(self.run_dir)))

    def check(self, hosts: Sequence[Host]) -> Mapping[str, HostError]:
        """Return nothing: the cluster checks its own machines, and ranks report missing files."""
        return {}

    def environment(self) -> tuple[dict[str, str], dict[str, str]]:
        return self.tracking

    def compile_cache(self) -> Path:
        return compile_cache(self.launch)

    def prepare(self) -> None:
        give_to_ranks(self.run_dir, self.launch)
        give_block_cache(self.launch)

    def log_path(self, host: str) -> Path:
        return self.run_dir / "logs" / f"{host}.log"
