"""`python -m tests.programs.train_run RUN`: the flow's training stage as a process that tests kill."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

from tasks.launch import programs
from tasks.launch.docker_hosts import hosts_of
from tasks.launch.fencing import remove_containers
from tasks.launch.launcher import grace_s
from tasks.launch.slurm_allocation import held_nodes
from tasks.launch.slurm_launcher import stop_steps
from tasks.runs.errors import RunStopped
from tasks.tracking.final_status import reconcile_mlflow
from tasks.tracking.mlflow_run import tracked
from tasks.workspace.paths import run_folder
from training.records.plan import RunPlan


def main(run_id: str) -> int:
    folder = run_folder(run_id)
    plan = RunPlan.read(folder / "plan.json")
    reconcile_mlflow()
    try:
        with tracked(plan.config, run_id=run_id, tags={}) as run:
            plan.model_copy(update={"mlflow_run_id": run.mlflow_run_id}).write(folder / "plan.json")
            with held_nodes(plan.config.launch, run_dir=folder) as nodes:
                if nodes is not None:
                    nodes.ensure()
                    stop_steps(folder, nodes.job_id, grace_s=grace_s(plan))
                elif plan.config.launch.launcher == "docker":
                    remove_containers(hosts_of(plan.config.launch), run_id, folder, grace_s=grace_s(plan))
                programs.train(RunPlan.read(folder / "plan.json"), run_dir=folder, on_row=lambda row: None)
    except RunStopped as stop:
        print(stop)
        return 130
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # as flows/cli/command.py has it


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(level=logging.INFO)
    sys.exit(main(sys.argv[1]))
