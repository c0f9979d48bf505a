"""`shardline promote|rollback|history|watch`, for flows/cli.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from flows.tables import print_table

DONE, FAILED = 0, 1
RunFlow = Callable[..., Any]


def add_promotion_commands(command: Callable[..., argparse.ArgumentParser], run_flow: RunFlow) -> None:
    """`command`: as flows/cli.py makes one. `run_flow`: calls a flow with Prefect set up."""
    promote = command(
        "promote",
        lambda options: _promote(options, run_flow),
        "put a model version through its gates, to champion",
        "MODEL",
    )
    promote.add_argument("--version", type=int, help="default: the challenger; judged again if it was judged")
    promote.add_argument("--force", action="store_true", help="past the gates")
    about = "gates and rollout, for example rollout.watch_minutes=1"
    promote.add_argument("overrides", metavar="section.field=value", nargs="*", default=[], help=about)
    rollback = command("rollback", _rollback, "put the version before in the champion's place, at once", "MODEL")
    rollback.add_argument("--to", type=int, metavar="VERSION", help="default: the one that the champion replaced")
    rollback.add_argument("--why", default="asked for", help="recorded with the move")
    history = command("history", _history, "every move of a model's champion: who, what, when, why", "MODEL")
    for added in (promote, rollback, history):
        added.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _promote(options: argparse.Namespace, run_flow: RunFlow) -> int:
    model = run_flow(
        "promote", options.model, version=options.version, force=options.force, overrides=tuple(options.overrides)
    )
    if options.json:
        print(model.model_dump_json())
    else:
        print(f"{model.name} version {model.version}: {model.verdict}; alias {model.alias or 'none'}")
    return DONE if model.alias == "champion" else FAILED


def _rollback(options: argparse.Namespace) -> int:
    from tasks.places import tracking_uri
    from tasks.switching import roll_back

    move = roll_back(options.model, to=options.to, why=options.why, tracking_uri=tracking_uri())
    if options.json:
        print(move.model_dump_json())
    else:
        print(f"{move.model}: {move.outcome}")
    return DONE if move.well else FAILED


def _history(options: argparse.Namespace) -> None:
    from tasks.moves import history
    from tasks.places import tracking_uri
    from tasks.registry import registry_client

    moves = history(registry_client(tracking_uri()), options.model)
    if options.json:
        print(json.dumps([json.loads(move.model_dump_json()) for move in moves]))
        return
    rows = [
        [move.began, f"{move.kind} {move.replaces or 'none'} to {move.version}", move.who, move.why, move.outcome]
        for move in moves
    ]
    print_table(["when", "what", "who", "why", "outcome"], rows)
