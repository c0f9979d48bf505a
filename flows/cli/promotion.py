"""`shardline promote|rollback|history|watch`, for flows/cli/command.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from flows.cli.arguments import add_json, add_overrides
from flows.cli.tables import print_table

DONE, FAILED = 0, 1


def add_promotion_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands above. `command` adds one to the parser, as in flows/cli/command.py."""
    promote = command("promote", _promote, "make a model version champion if it passes its gates", "MODEL")
    promote.add_argument(
        "--version", type=int, help="default: the challenger; a version that was judged before is judged again"
    )
    promote.add_argument("--force", action="store_true", help="skip the gates")
    promote.add_argument("--by", default="", help="the name that is recorded with the promotion (default: yours)")
    add_overrides(promote, "gates and rollout, for example rollout.watch_minutes=1")
    rollback = command("rollback", _rollback, "make the previous champion champion again, at once", "MODEL")
    rollback.add_argument("--to", type=int, metavar="VERSION", help="default: the version that the champion replaced")
    rollback.add_argument("--why", default="asked for", help="recorded with the move")
    history = command("history", _history, "list every change of a model's champion: who, what, when, why", "MODEL")
    watch = command("watch", _watch, "promote every version that gets the alias `challenger` in the registry")
    watch.add_argument("models", metavar="MODEL", nargs="*", help="default: all of the registry")
    about = "seconds between checks of the registry (default: 30)"
    watch.add_argument("--poll", type=float, default=30, metavar="SECONDS", help=about)
    watch.add_argument("--host", default="127.0.0.1", help="address on which webhooks are received")
    watch.add_argument("--port", type=int, help="receive MLflow's webhooks on this port (default: only poll)")
    watch.add_argument("--secret-file", default="", metavar="FILE", help="file with the webhooks' secret")
    watch.add_argument("--register-webhook", default="", metavar="URL", help="make MLflow send them to this address")
    add_json(promote, rollback, history)


def _promote(options: argparse.Namespace) -> int:
    from flows.servers.embedded import start_servers

    wait = start_servers()
    from flows.promote import promote

    wait()
    model = promote(
        options.model,
        version=options.version,
        force=options.force,
        overrides=tuple(options.overrides),
        by=options.by,
    )
    if options.json:
        print(model.model_dump_json())
    else:
        print(f"{model.name} version {model.version}: {model.verdict}; alias {model.alias or 'none'}")
    return DONE if model.alias == "champion" else FAILED


def _rollback(options: argparse.Namespace) -> int:
    from tasks.promotion.rollout import roll_back
    from tasks.workspace.paths import prefect_url, tracking_uri

    move = roll_back(options.model, to=options.to, why=options.why, tracking_uri=tracking_uri())
    if prefect_url() and move.kind == "rollback" and move.replaces is not None:
        from flows.servers.embedded import start_prefect_server

        start_prefect_server()()
        from flows.prefect_ui.events import report_taken_back

        why = f"rolled back by {move.who}: {move.why}"
        report_taken_back(move.model, version=move.replaces, now=move.version, why=why)
    if options.json:
        print(move.model_dump_json())
    else:
        print(f"{move.model}: {move.outcome}")
    return DONE if move.well else FAILED


def _history(options: argparse.Namespace) -> None:
    from tasks.promotion.journal import history
    from tasks.tracking.client import registry_client
    from tasks.workspace.paths import tracking_uri

    moves = history(registry_client(tracking_uri()), options.model)
    if options.json:
        print(json.dumps([json.loads(move.model_dump_json()) for move in moves]))
        return
    rows = [
        [
            move.began[:16].replace("T", " "),
            f"{move.kind} {move.replaces or 'none'} to {move.version}",
            move.who,
            move.why,
            move.outcome,
        ]
        for move in moves
    ]
    print_table(["when (UTC)", "what", "who", "why", "outcome"], rows)


def _watch(options: argparse.Namespace) -> None:
    from flows.servers.watch import watch

    watch(
        options.models,
        poll_s=options.poll,
        host=options.host,
        port=options.port,
        secret_file=options.secret_file,
        register_url=options.register_webhook,
    )
