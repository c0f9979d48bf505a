"""`shardline ps|stop|reap|reconcile`, for flows/cli/command.py."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flows.cli.tables import print_table

DONE, FAILED = 0, 1
COLUMNS = ("run", "attempt", "host", "ranks", "status", "health", "since", "step", "launcher")


def add_running_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`command`: as flows/cli/command.py makes one."""
    ps = command("ps", _ps, "what runs: containers on all hosts, and runs of this machine")
    stop = command("stop", _stop, "end a run in order, with a checkpoint, on all its hosts", "RUN")
    reap = command("reap", _reap, "remove the containers that no launcher looks after any more")
    about = "these hosts, instead of those of all runs in SHARDLINE_HOME"
    for added in (ps, reap):
        added.add_argument("--hosts-file", default="", metavar="FILE", help=about)
    reconcile = command("reconcile", _reconcile, "tell MLflow and Prefect of runs that could not say how they ended")
    reap.add_argument("--dry-run", action="store_true", help="only say which")
    for added in (ps, stop, reap, reconcile):
        added.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _ps(options: argparse.Namespace) -> int:
    from tasks.operations.ps import known_hosts, list_running

    listing = list_running(known_hosts(options.hosts_file))
    if options.json:
        print(listing.model_dump_json())
    elif listing.running:
        print_table(COLUMNS, [_cells(row) for row in listing.running])
    else:
        print("nothing runs")
    _print_silent(listing.silent)
    return DONE


def _cells(row: Any) -> tuple[str, ...]:
    from tasks.operations.ps import ago

    ranks, step = ("" if number is None else f"{number:,}" for number in (row.ranks, row.step))
    return (row.run, row.attempt, row.host, ranks, row.status, row.health, ago(row.since), step, row.launcher)


def _print_silent(silent: Mapping[str, str], *, meaning: str = "what runs there is not known") -> None:
    for name, error in silent.items():
        print(f"{name} gave no answer, {meaning}: {error}", file=sys.stderr)


def _stop(options: argparse.Namespace) -> int:
    from tasks.operations.stop import stop

    stopped = stop(options.run)
    if stopped.by != "launcher":
        _close_lost()
    if options.json:
        print(stopped.model_dump_json())
    else:
        how = {"launcher": "stopped by its launcher", "stop": "stopped; it had no launcher", "": "was not running"}
        goes_on = f"goes on from step {step}" if (step := stopped.checkpoint_step) else "starts it again"
        print(f"{stopped.run}: {how[stopped.by]}; `shardline resume {stopped.run}` {goes_on}")
    _print_silent(stopped.silent, meaning="its ranks end by themselves once they see that their lease is withdrawn")
    return FAILED if stopped.silent else DONE


def _reconcile(options: argparse.Namespace) -> None:
    from flows.servers.embedded import start_prefect_server

    wait = start_prefect_server()
    from flows.reconcile import reconcile

    wait()
    rows = reconcile()
    if options.json:
        print(json.dumps(rows))
    elif rows:
        print_table(("what", "done", "why"), [tuple(map(str, row.values())) for row in rows])
    else:
        print("all is known already")


def _close_lost() -> None:
    """What their launcher could not say any more: KILLED in MLflow, Crashed in Prefect."""
    from tasks.tracking.final_status import reconcile_mlflow

    if lost := [run for run in reconcile_mlflow() if run.found]:
        from flows.servers.embedded import start_prefect_server

        wait = start_prefect_server()
        from flows.stages.crashed_runs import tell

        wait()
        tell(lost)


def _reap(options: argparse.Namespace) -> int:
    from tasks.operations.ps import known_hosts
    from tasks.operations.stop import reap

    reaped = reap(known_hosts(options.hosts_file), dry_run=options.dry_run)
    if reaped.removed and not options.dry_run:
        _close_lost()
    if options.json:
        print(reaped.model_dump_json())
    else:
        for name in reaped.removed:
            print(f"{name}: {'would be removed' if options.dry_run else 'removed'}")
        for name, keeper in reaped.kept.items():
            print(f"{name}: left to its launcher, {keeper}")
        if not reaped.removed:
            print("nothing to remove")
    _print_silent(reaped.silent)
    return DONE
