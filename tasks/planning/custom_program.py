"""A user's own training program: checks that it can be started, and plans its ranks.

It gets torchrun's environment and the run in MLflow, and nothing else: no plan, no shards, no checkpoint to load.
"""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path
from urllib.parse import urlsplit

from tasks.hardware.hosts import read_hosts
from tasks.planning.price import price_per_hour
from tasks.workspace.paths import home, run_folder, tracking_uri
from training.config.credentials import without_url_credentials
from training.config.launch import LaunchConfig
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.plan import TRAINER_PLAN, CustomProgramPlan
from training.records.record import Record

logger = logging.getLogger(__name__)

SKIPPED = ("tokenize", "plan", "evaluate", "export", "register", "generate")  # Shardline's data and checkpoints


class CustomProgramOutcome(Record):
    """outcome.json: the result of a user's program."""

    run_id: str
    """ID of the run, which is the name of its folder."""
    mlflow_run_id: str
    """MLflow's ID of the run."""
    program: str
    """Module or script that was run, as the config names it."""
    args: tuple[str, ...]
    """Arguments of the program, as the config has them."""
    hosts: dict[str, int]
    """Number of ranks by the host's name."""
    attempts: int
    """Number of attempts that the program took."""
    skipped: tuple[str, ...]
    """Stages of other runs that such a run does not have."""
    stage_s: dict[str, float]
    """Seconds of each stage, by its name."""
    open_mlflow: str
    """What to do to see the run in MLflow."""


# Checks before anything starts


def check_custom_program(config: RunConfig) -> None:
    """Raise ValueError for a program that does not exist or could not reach MLflow."""
    trainer, launch = config.trainer, config.launch
    if launch.launcher == "local":
        if trainer.script and not Path(trainer.script).is_file():
            raise ValueError(f"trainer.script = {trainer.script} does not exist: give the path of a Python file")
        return
    check_tracking(launch)
    if trainer.script:
        check_script(Path(trainer.script), launch)


def check_script(script: Path, launch: LaunchConfig) -> None:
    """Raise ValueError for a script that no container can see. Only hosts know the files of the image."""
    if not script.is_absolute():
        raise ValueError(
            f"trainer.script = {script} is relative: give its path in the container, below {home()} (the shared "
            "folder), in one of launch.mounts, or in the image"
        )
    if script.is_relative_to(home()):
        if not script.is_file():
            raise ValueError(f"trainer.script = {script} does not exist: put it into SHARDLINE_HOME, {home()}")
        return
    targets = [mount.partition(":")[2] for mount in launch.mounts]
    if not any(script.is_relative_to(target) for target in targets):
        logger.info("%s lies neither in %s nor in launch.mounts, so the image must contain it", script, home())


def check_tracking(launch: LaunchConfig) -> None:
    """Raise ValueError if a program in containers could not log to the run."""
    uri = tracking_uri()
    cure = (
        "set MLFLOW_TRACKING_URI to the address of a server that asks for a password, such as http://10.0.0.9:5000 "
        "(docs/multi-node.md starts one)"
    )
    if urlsplit(uri).scheme not in {"http", "https"}:
        raise ValueError(
            f"a trainer in containers logs into MLflow by itself, and {without_url_credentials(uri)} is a file of this "
            f"machine: {cure}"
        )
    far = ["every pod" if launch.launcher == "kubernetes" else "Slurm's nodes"]
    if launch.launcher == "docker":
        far = [host.name for host in read_hosts(launch) if not host.docker.startswith("unix:")]
    if far and is_loopback(urlsplit(uri).hostname or ""):
        raise ValueError(
            f"MLFLOW_TRACKING_URI = {without_url_credentials(uri)} is another machine on {', '.join(far)}: {cure}"
        )


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


# The ranks


def plan_custom_program(
    config: RunConfig, inventory: Inventory, *, run_id: str, mlflow_run_id: str, experiment: tuple[str, str]
) -> CustomProgramPlan:
    """Write trainer.json: a rank for each device, or parallel.ranks of them. `experiment`: its ID and name.

    Raises ValueError for more ranks than there are devices.
    """
    layout = ranks_by_host(config, inventory)
    cores = {host.name: host.cores for host in inventory.hosts}
    price, why = price_per_hour(config.prices, inventory, layout)
    if why:
        logger.warning(why)
    plan = CustomProgramPlan(
        run_id=run_id,
        config=config,
        hosts=tuple(layout),
        ranks_per_host=tuple(layout.values()),
        threads_per_rank=min(max(1, cores[name] // ranks) for name, ranks in layout.items()),
        mlflow_run_id=mlflow_run_id,
        mlflow_experiment_id=experiment[0],
        mlflow_experiment_name=experiment[1],
        device_kind=inventory.hosts[0].devices[0].kind,
        price_per_hour=price,
    )
    plan.write(run_folder(run_id) / TRAINER_PLAN)
    return plan


def ranks_by_host(config: RunConfig, inventory: Inventory) -> dict[str, int]:
    slots = {host.name: len(host.devices) for host in inventory.hosts}
    left = config.parallel.asked_ranks or sum(slots.values())
    if left > sum(slots.values()):
        raise ValueError(
            f"parallel.ranks = {left}, but there are {sum(slots.values())} devices on {len(slots)} hosts: lower it, or "
            "set it to 0"
        )
    layout = {}
    for name, number in slots.items():
        layout[name] = min(number, left)
        left -= layout[name]
    return {name: number for name, number in layout.items() if number}


def replan_custom_program(plan: CustomProgramPlan, inventory: Inventory) -> CustomProgramPlan:
    """Return the plan for the current hosts; if they have fewer devices than parallel.ranks, it uses all of them."""
    devices = sum(len(host.devices) for host in inventory.hosts)
    parallel = plan.config.parallel
    ranks = parallel.ranks if parallel.ranks <= devices else 0
    config = plan.config.model_copy(update={"parallel": parallel.model_copy(update={"ranks": ranks})})
    experiment = (plan.mlflow_experiment_id, plan.mlflow_experiment_name)
    layout = ranks_by_host(config, inventory)
    if layout == dict(zip(plan.hosts, plan.ranks_per_host, strict=True)):
        return plan
    again = plan_custom_program(
        config, inventory, run_id=plan.run_id, mlflow_run_id=plan.mlflow_run_id, experiment=experiment
    )
    again = again.model_copy(update={"config": plan.config})
    again.write(run_folder(plan.run_id) / TRAINER_PLAN)
    return again
