"""Run a user's training program: in attempts on Docker hosts, or once on this machine; wait, and tell how it ended."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from tasks.launch import docker_hosts
from tasks.launch.attempt import new_folder
from tasks.launch.docker_hosts import AttemptRecord, attempts_of, now
from tasks.launch.failure import LAST_LINES, AttemptOutcome, HostStatus, classify
from tasks.launch.lease import Lease
from tasks.launch.local import POLL_S, end_earlier_attempt, grace_s
from tasks.runs.errors import RunFailed, RunStopped
from tasks.runs.owner import RanksLauncher
from tasks.workspace.paths import tracking_uri
from tasks.workspace.processes import free_port, process_key
from training.records.node import NodeEnd, NodeTask
from training.records.plan import CustomProgramPlan
from training.tracking.redaction import without_secrets

logger = logging.getLogger(__name__)


def run_custom_program(plan: CustomProgramPlan, *, run_dir: Path) -> None:
    """Start the program, and again where that can help. A program that is done is not started again.

    Raises RunFailed with the cause and the log's last lines, RunStopped if it, or we, were told to stop.
    """
    if is_done(run_dir):
        logger.info("%s is done already", plan.program)
    elif plan.config.launch.launcher == "docker":
        docker_hosts.run(plan.program, plan=plan, run_dir=run_dir, on_poll=lambda: None)
    else:
        run_here(plan, run_dir=run_dir)


def is_done(run_dir: Path) -> bool:
    attempts = attempts_of(run_dir)
    return bool(attempts) and attempts[-1]["ending"]["cause"] == "done"


def run_here(plan: CustomProgramPlan, *, run_dir: Path) -> None:
    """Run the program once, under the node program that containers run: it ends the ranks if we are killed."""
    end_earlier_attempt(run_dir, grace_s=grace_s(plan))
    folder, began_at, log_path = new_folder(run_dir / "attempts"), now(), run_dir / "logs" / "trainer.log"
    log_path.parent.mkdir(exist_ok=True)
    task_path = folder / "node.json"
    task = _task(plan, folder=folder, run_dir=run_dir)
    task.write(task_path)
    logger.info("starting %s on %d ranks; its output is in %s", plan.program, plan.world_size, log_path)
    with Lease(Path(task.lease), lease_s=task.lease_s), log_path.open("ab") as log:
        # -P: a folder named `training` where the user stands must not take our place. Ranks do not inherit it: a
        # script finds what lies beside it.
        node = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.node", str(task_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"MLFLOW_TRACKING_URI": tracking_uri()},  # not in the file: it may hold a password
            start_new_session=True,
        )
        RanksLauncher(launcher=process_key(node.pid)).write(run_dir / "gang.json")
        _wait(node, plan)
    outcome = _outcome(Path(task.end), plan, log_path=log_path)
    AttemptRecord(
        number=int(folder.name),
        program=plan.program,
        hosts=dict(zip(plan.hosts, plan.ranks_per_host, strict=True)),
        from_step=0,
        began_at=began_at,
        ended_at=now(),
        ending=outcome,
    ).write(folder / "attempt.json")
    _raise(outcome, plan, log_path=log_path)


def _task(plan: CustomProgramPlan, *, folder: Path, run_dir: Path) -> NodeTask:
    environment = {"GOMP_SPINCOUNT": "1000"} | dict(os.environ)  # why: tasks/launch/local.py
    return NodeTask(
        **plan.command("", run_dir=run_dir),
        num_ranks=plan.world_size,
        master_port=free_port(),
        environment={
            "GOMP_SPINCOUNT": environment["GOMP_SPINCOUNT"],
            "MLFLOW_RUN_ID": plan.mlflow_run_id,
            **plan.environment(),
            "OMP_NUM_THREADS": str(plan.threads_per_rank),
            "TOKENIZERS_PARALLELISM": "false",
        },
        lease=str(folder / "lease"),
        lease_s=plan.config.launch.lease_s,
        grace_s=grace_s(plan),
        end=str(folder / "node.end.json"),
    )


def _wait(node: subprocess.Popen[bytes], plan: CustomProgramPlan) -> None:
    try:
        while node.poll() is None:
            time.sleep(POLL_S)
    except BaseException as interruption:  # Ctrl-C, the SIGTERM that Prefect turns into an exception, or our own error
        logger.info("stopping: sent SIGTERM to the ranks, which may save a checkpoint (Ctrl-C again kills them)")
        node.terminate()
        node.wait()
        if isinstance(interruption, Exception):
            raise
        raise RunStopped(f"interrupted: `shardline resume {plan.run_id}` starts {plan.program} again") from None


def _outcome(path: Path, plan: CustomProgramPlan, *, log_path: Path) -> AttemptOutcome:
    """The outcome by the node's record, or by its output: on a full disk it cannot write a record."""
    end = NodeEnd.read(path) if path.exists() else None
    lines = log_path.read_text(errors="replace").splitlines()[-LAST_LINES:]
    host = HostStatus(state=None, end=end, last_lines=tuple(map(without_secrets, lines)))
    return classify({plan.hosts[0]: host}, stop_requested=True)  # whoever sends signals here is the user


def _raise(outcome: AttemptOutcome, plan: CustomProgramPlan, *, log_path: Path) -> None:
    again = f"`shardline resume {plan.run_id}` starts it again"
    if outcome.cause == "stopped":
        raise RunStopped(f"{plan.program}: {outcome.detail}; {again}")
    if outcome.cause != "done":
        lines = "\n".join(outcome.lines)
        raise RunFailed(
            f"{plan.program}: {outcome.cause} ({outcome.detail}); {again}\nThe last lines of {log_path}:\n{lines}",
            cause=outcome.cause,
        )
