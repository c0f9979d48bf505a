"""`shardline ps|stop|reap|reconcile|prune|metrics|image`: list and stop runs, clean up, build the training image."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flows.cli.arguments import add_json
from flows.cli.tables import print_table

DONE, FAILED = 0, 1
COLUMNS = ("run", "attempt", "host", "ranks", "status", "health", "since", "step", "launcher")
SERVER_COLUMNS = ("server", "replica", "serves", "version", "status", "pid", "since")


def add_operation_commands(command: Callable[..., argparse.ArgumentParser], commands: Any) -> None:
    """Add the commands above. `command` adds one to the parser; `commands`: its subparsers (flows/cli/command.py)."""
    about = "list everything that runs: containers on all hosts, Slurm jobs, runs and servers of this machine"
    ps = command("ps", _ps, about)
    about = "stop a run on all its hosts, with a checkpoint; or a model server and its replicas, by its URL"
    stop = command("stop", _stop, about)
    stop.add_argument("run", metavar="RUN|URL")
    reap = command("reap", _reap, "remove containers and Slurm jobs whose launcher is gone")
    about = "file with the hosts (default: the hosts of all runs in SHARDLINE_HOME)"
    for added in (ps, reap):
        added.add_argument("--hosts-file", default="", metavar="FILE", help=about)
    reconcile = command("reconcile", _reconcile, "report to MLflow and Prefect how crashed runs ended")
    reap.add_argument("--dry-run", action="store_true", help="only list them")
    prune = command("prune", _prune, "delete old runs, checkpoints and token shards that no registered version needs")
    prune.add_argument("--older-than-days", type=float, default=30, metavar="N", help="default: 30")
    prune.add_argument(
        "--keep-newest", type=int, default=10, metavar="N", help="number of the newest runs that are kept (default: 10)"
    )
    prune.add_argument(
        "--dry-run", action="store_true", help="delete nothing; list what would be deleted, and what is kept and why"
    )
    metrics = command("metrics", _metrics, "serve metrics of the runs in SHARDLINE_HOME, for Prometheus")
    metrics.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    metrics.add_argument("--port", type=int, default=9464, help="default: 9464")
    about = "show a run for this many hours after its end (default: 1)"
    metrics.add_argument("--keep-hours", type=float, default=1, metavar="N", help=about)
    add_json(ps, stop, reap, reconcile, prune)
    _add_image_commands(commands)


def _ps(options: argparse.Namespace) -> None:
    from tasks.operations.ps import known_hosts, list_running
    from tasks.operations.servers import list_servers

    listing, servers = list_running(known_hosts(options.hosts_file)), list_servers()
    if options.json:
        print(json.dumps({**listing.model_dump(), "servers": [row.model_dump() for row in servers]}))
    elif listing.running or servers:
        if listing.running:
            print_table(COLUMNS, [_cells(row) for row in listing.running])
        if servers:
            print_table(SERVER_COLUMNS, [_server_cells(row) for row in servers])
    else:
        print("nothing is running")
    _print_silent(listing.silent)


def _cells(row: Any) -> tuple[str, ...]:
    from tasks.operations.ps import ago

    ranks, step = ("" if number is None else f"{number:,}" for number in (row.ranks, row.step))
    return (row.run, row.attempt, row.host, ranks, row.status, row.health, ago(row.since), step, row.launcher)


def _server_cells(row: Any) -> tuple[str, ...]:
    from tasks.operations.ps import ago

    own = row.own_url if row.own_url != row.url else ""
    return (
        row.url,
        own,
        row.ref,
        str(row.version or ""),
        row.status,
        str(row.pid),
        ago(row.since) if row.since else "",
    )


def _print_silent(silent: Mapping[str, str], *, meaning: str = "so it is unknown what runs there") -> None:
    for name, error in silent.items():
        print(f"{name} did not answer, {meaning}: {error}", file=sys.stderr)


def _stop(options: argparse.Namespace) -> int:
    if "://" in options.run:
        return _stop_server(options)
    from tasks.operations.stop import stop

    stopped = stop(options.run)
    if stopped.by != "launcher":
        _report_crashed_runs()
    if options.json:
        print(stopped.model_dump_json())
    else:
        how = {"launcher": "stopped by its launcher", "stop": "stopped; its launcher was gone", "": "was not running"}
        goes_on = f"continues from step {step}" if (step := stopped.checkpoint_step) else "starts it again"
        print(f"{stopped.run}: {how[stopped.by]}; `shardline resume {stopped.run}` {goes_on}")
    _print_silent(stopped.silent, meaning="but its ranks end by themselves once they see that their lease is withdrawn")
    return FAILED if stopped.silent else DONE


def _stop_server(options: argparse.Namespace) -> int:
    from tasks.operations.servers import stop_server

    stopped = stop_server(options.run)
    pids = ", ".join(map(str, stopped.pids)) or "none, as it had been killed"
    print(stopped.model_dump_json() if options.json else f"{stopped.url}: stopped (processes {pids})")
    return DONE


def _metrics(options: argparse.Namespace) -> None:
    from tasks.operations.run_metrics import serve_run_metrics
    from tasks.workspace.paths import home

    thread = serve_run_metrics(home(), host=options.host, port=options.port, keep_s=3600 * options.keep_hours)
    print(f"metrics of {home()}: http://{options.host}:{options.port}/metrics", flush=True)
    thread.join()


def _prune(options: argparse.Namespace) -> None:
    from tasks.operations.prune import prune
    from tasks.tracking.client import mlflow_gc_command

    done = prune(older_than_days=options.older_than_days, keep_newest=options.keep_newest, dry_run=options.dry_run)
    if options.json:
        print(done.model_dump_json())
        return
    if done.items:
        verb = "delete" if options.dry_run else "deleted"
        rows = sorted(done.items, key=lambda item: (item.kept, -item.num_bytes))
        cells = [("kept" if row.kept else verb, row.kind, row.path, _gigabytes(row.num_bytes), row.why) for row in rows]
        print_table(("", "what", "in SHARDLINE_HOME", "size", "why"), cells)
    print(f"{_gigabytes(done.freed_bytes)} {'would be freed' if options.dry_run else 'freed'}")
    if done.mlflow_runs and not options.dry_run:
        print(f"MLflow shows their runs as deleted; this removes them for good: {mlflow_gc_command(done.mlflow_runs)}")


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB"


def _reconcile(options: argparse.Namespace) -> None:
    from flows.servers.embedded import start_prefect_server

    wait = start_prefect_server()
    from flows.reconcile import reconcile

    wait()
    rows = reconcile()
    if options.json:
        print(json.dumps(rows))
    elif rows:
        print_table(("run or container", "action", "reason"), [tuple(map(str, row.values())) for row in rows])
    else:
        print("nothing to reconcile")


def _report_crashed_runs() -> None:
    """Report runs that their launcher could not report any more: KILLED in MLflow, Crashed in Prefect."""
    from tasks.tracking.final_status import reconcile_mlflow

    if crashed := [run for run in reconcile_mlflow() if run.found]:
        from flows.servers.embedded import start_prefect_server

        wait = start_prefect_server()
        from flows.stages.crashed_runs import report_ended_runs

        wait()
        report_ended_runs(crashed)


def _reap(options: argparse.Namespace) -> None:
    from tasks.operations.ps import known_hosts
    from tasks.operations.stop import reap

    reaped = reap(known_hosts(options.hosts_file), dry_run=options.dry_run)
    if reaped.removed and not options.dry_run:
        _report_crashed_runs()
    if options.json:
        print(reaped.model_dump_json())
    else:
        for name in reaped.removed:
            print(f"{name}: {'would be removed' if options.dry_run else 'removed'}")
        for name, keeper in reaped.kept.items():
            print(f"{name}: kept, its launcher is running: {keeper}")
        if not reaped.removed:
            print("nothing to remove")
    _print_silent(reaped.silent)


# The training image


def _add_image_commands(commands: Any) -> None:
    about = "build the training image, or push it to a registry"
    actions = commands.add_parser("image", help=about, description=about).add_subparsers(
        required=True, metavar="ACTION"
    )
    about = "build infra/train.Dockerfile with the daemon that the `docker` command would use"
    build = actions.add_parser("build", help=about, description=about)
    build.set_defaults(call=_build_image)
    build.add_argument("--base", default="", metavar="IMAGE", help="base image (default: NVIDIA's PyTorch image)")
    about = "the Dockerfile's arguments, such as PIP_INDEX_URL=…"
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help=about)
    build.add_argument("--wheels", default="", metavar="FOLDER", help="wheels that pip may take, if no index has them")
    build.add_argument("--ca", default="", metavar="FILE", help="certificates that pip trusts, during the build only")
    build.add_argument(
        "--network", default="", help="network of the build, as in docker build --network, for example host"
    )
    about = "push it, and print NAME@sha256:… for launch.image"
    push = actions.add_parser("push", help=about, description=about)
    push.set_defaults(call=_push_image)
    build.add_argument("name", metavar="NAME", nargs="?", default="shardline-train", help="default: shardline-train")
    push.add_argument("name", metavar="REGISTRY/NAME:VERSION")
    add_json(build, push)


def _build_image(options: argparse.Namespace) -> None:
    from tasks.operations.images import build_image

    image_id = build_image(
        options.name,
        base_image=options.base,
        build_args=options.build_arg,
        wheels=options.wheels,
        ca=options.ca,
        network=options.network,
    )
    print(json.dumps({"name": options.name, "id": image_id}) if options.json else f"{options.name} is {image_id}")


def _push_image(options: argparse.Namespace) -> None:
    from tasks.operations.images import push_image

    image = push_image(options.name)
    print(json.dumps({"name": options.name, "image": image}) if options.json else image)
