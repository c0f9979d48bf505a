"""`shardline up|down|alerts|stack`, for flows/cli/command.py."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from flows.cli.arguments import add_json
from flows.cli.tables import print_pairs


def add_server_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands above. `command` adds one to the parser, as in flows/cli/command.py."""
    up = command(
        "up", _up, "start Prefect, MLflow and a worker on this machine; services that run already are left alone"
    )
    up.add_argument("--prefect-port", type=int, default=4200)
    up.add_argument("--mlflow-port", type=int, default=5000)
    about = "let everybody who reaches Prefect's port run commands; MLflow goes on asking for its password"
    up.add_argument("--no-password", action="store_true", help=about)
    down = command("down", _down, "stop the services that `up` started; stop all runs first, or use --force")
    down.add_argument("--force", action="store_true", help="also stop the runs under way; each saves a checkpoint")
    about = "make prefect.yaml's deployments in Prefect, as `up` does; one that exists keeps its settings"
    deployed = command("deploy", _deploy, about)
    about = "take prefect.yaml's settings for this deployment, instead of those that were set on its page"
    deployed.add_argument("--reset", metavar="NAME", action="append", default=[], help=about)
    alerts = command(
        "alerts", _alerts, "make Prefect send alerts to the receivers in SHARDLINE_HOME/alerts.yaml; `up` does this too"
    )
    alerts.add_argument(
        "--test", action="store_true", help="send a test alert to each receiver, and say whether it was delivered"
    )
    stack = command(
        "stack",
        _stack,
        "init: make the folder of a stack for Docker Compose: Postgres, Prefect, MLflow, a worker (docs/operations.md)",
        "ACTION",
    )
    stack.add_argument("folder", metavar="DIR", nargs="?", default="/srv/shardline", help="default: /srv/shardline")
    stack.add_argument("--docker", action="store_true", help="init: its worker may use this machine's Docker daemon")
    made_in = (
        "init: run each run as a process in the worker's container (process), or in a container of its own (docker)"
    )
    stack.add_argument("--pool", choices=("process", "docker"), help=made_in)
    add_json(up, down, deployed, alerts, stack)


def _up(options: argparse.Namespace) -> None:
    from flows.servers.local import up
    from tasks.tracking.client import mlflow_variables
    from tasks.workspace.paths import password_file, password_of_up

    found = up(prefect_port=options.prefect_port, mlflow_port=options.mlflow_port, password=not options.no_password)
    if options.json:
        print(json.dumps(found))
        return
    password = password_of_up("prefect")
    user, _, mlflow_password = password_of_up("mlflow").partition(":")
    rows = [
        ("Prefect: deployments, runs", found["prefect"]),
        *([("its page asks for", password)] if password else []),
        ("MLflow: metrics, models", f"{found['mlflow']}/#/experiments?workflowType=machine_learning"),
        ("its page asks for", f"user {user}, password {mlflow_password}"),
        ("a worker takes runs of pool", found["worker"]),
        ("a run", "shardline pretrain quickstart, or Deployments > quickstart > Custom run in Prefect"),
        ("the end", "shardline down"),
    ]
    print_pairs("up", rows)
    secret = f" PREFECT_API_AUTH_STRING=$(cat {shlex.quote(str(password_file('prefect')))})" if password else ""
    print(f"for scripts and Prefect's own command: export PREFECT_API_URL={found['prefect']}/api{secret}")
    print(f"for scripts and MLflow's own command: export {mlflow_variables(found['mlflow'])}")


def _down(options: argparse.Namespace) -> None:
    from flows.servers.local import down
    from tasks.operations.ps import known_hosts, list_running
    from tasks.operations.stop import stop

    under_way = sorted({row.run for row in list_running(known_hosts("")).running})
    if under_way and not options.force:
        raise ValueError(
            f"{', '.join(under_way)} {'is' if len(under_way) == 1 else 'are'} under way: "
            f"`shardline stop {under_way[0]}` first, or `shardline down --force`"
        )
    for run in under_way:
        stop(run)
    stopped = down()
    if options.json:
        print(json.dumps({"stopped": stopped}))
    else:
        print(f"stopped {', '.join(stopped)}" if stopped else "nothing ran")


def _use_running_prefect() -> None:
    """Name to Prefect's client the server that runs. Raises ValueError without one."""
    from tasks.workspace.paths import prefect_url

    if not prefect_url():
        raise ValueError("no Prefect server runs: start one with `shardline up`, or set PREFECT_API_URL")
    from flows.servers.embedded import start_prefect_server

    start_prefect_server()()


def _deploy(options: argparse.Namespace) -> None:
    _use_running_prefect()
    from flows.servers.deploy import deploy, make_pool

    make_pool()
    changed = deploy(reset=options.reset)
    if options.json:
        print(json.dumps({"deployments": {name: asdict(changes) for name, changes in changed.items()}}))
        return
    rows = []
    for name, changes in changed.items():
        parts = (
            ("as set in Prefect", changes.kept),
            ("taken off, as this version does not have them", changes.dropped),
        )
        done = "; ".join(f"{what}: {', '.join(fields)}" for what, fields in parts if fields)
        rows.append((name, "made" if changes.made else done or "as prefect.yaml has it"))
    print_pairs("deployments", rows)


def _alerts(options: argparse.Namespace) -> int:
    from flows.servers.alerts import FILE, read_alerts, send_test, set_up_alerts
    from tasks.workspace.paths import home

    addresses = read_alerts()
    _use_running_prefect()
    set_up_alerts(addresses)
    outcomes = send_test() if options.test else dict.fromkeys(addresses, "set up")
    if options.json:
        print(json.dumps({"alerts": outcomes}))
    elif outcomes:
        print_pairs("alerts", list(outcomes.items()))
    else:
        print(f"{home() / FILE} does not exist: no alerts are sent (docs/alerts.md has an example)")
    return int(options.test and any(outcome != "delivered" for outcome in outcomes.values()))


def _stack(options: argparse.Namespace) -> None:
    """Handle `shardline stack`. Only the stack's worker container calls `worker`."""
    from flows.servers.stack import init, work

    if options.action == "worker":
        work()
    if options.action != "init":
        raise ValueError(f"shardline stack {options.action}: there is `shardline stack init DIR`")
    folder = Path(options.folder).absolute()
    made = init(folder, docker=options.docker, pool=options.pool or "")
    if options.json:
        print(json.dumps({"folder": str(folder), "made": made}))
        return
    rows = [
        ("secrets", f"{folder}/secrets: {len(made)} made"),
        ("settings", f"{folder}/.env: ports, limits, the model that is served"),
        ("start", f"cd {folder} && docker compose up --build --detach --wait postgres prefect mlflow worker"),
        ("Prefect", f"http://127.0.0.1:4200, with the text of {folder}/secrets/prefect_auth"),
        ("MLflow", f"http://127.0.0.1:5000, as admin with {folder}/secrets/mlflow_admin_password"),
        ("the model's server", "docker compose up --detach, once there is a champion"),
    ]
    print_pairs("stack", rows)
