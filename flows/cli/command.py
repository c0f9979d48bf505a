"""The `shardline` command. Exit codes: 0 done, 2 bad input, 1 failed, 130 stopped.

Results go to stdout (one JSON object with --json), logs and bars to stderr. Each command imports the heavy libraries
that it needs by itself, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from flows.cli.models import add_model_commands
from flows.cli.operations import add_operation_commands
from flows.cli.promotion import add_promotion_commands
from flows.cli.quote import add_quote_command
from flows.cli.runs import add_run_commands
from flows.cli.servers import add_server_commands
from tasks.display.suggestion import did_you_mean

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130
PLACES = {
    "RUN": "a run's ID, for example quickstart-20261124-093000: `ls runs` lists them",
    "MODEL": "the name of a registered model, for example quickstart",
    "MODEL@ALIAS": "a registered version: NAME@champion, NAME/3, or NAME for its champion",
    "DIR": "a folder, made if it is missing",
}


def main(arguments: Sequence[str] | None = None) -> int:
    gc.set_threshold(50_000)  # with 700, a fifth of the imports' time goes to looking for garbage
    options = parse_command(arguments)
    _set_up_logging(verbose=options.verbose)
    signal.signal(signal.SIGTERM, _interrupt)
    from tasks.runs.errors import RunStopped
    from tasks.workspace.paths import keep_password_apart
    from training.config.credentials import without_url_credentials
    from training.tracking.redaction import without_credentials

    keep_password_apart()
    try:
        return int(options.call(options) or DONE)
    except (RunStopped, KeyboardInterrupt) as stop:
        print(f"stopped: {stop}" if str(stop) else "stopped", file=sys.stderr)
        return STOPPED
    except Exception as error:
        if options.verbose:
            raise
        message = without_credentials(str(error), uri=os.environ.get("MLFLOW_TRACKING_URI", ""))
        print(f"shardline: {without_url_credentials(message)}", file=sys.stderr)
        return BAD_INPUT if _is_bad_input(error) else FAILED


def _is_bad_input(error: Exception) -> bool:
    """Whether the user caused the error: it is a ValueError, but not one from parsing a record or an answer."""
    parsing = {"DamagedRecord", "OtherFormat", "JSONDecodeError", "ValidationError"}
    return isinstance(error, ValueError) and type(error).__name__ not in parsing


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Treat SIGTERM like Ctrl-C: by default it ends the process before servers are stopped and statuses written."""
    raise KeyboardInterrupt


def _set_up_logging(*, verbose: bool) -> None:
    """Show Shardline's log and warnings of libraries; Prefect's only with --verbose, because its errors repeat ours."""

    def is_for_people(record: logging.LogRecord) -> bool:
        room = record.name.partition(".")[0]
        return verbose or room in {"flows", "tasks"} or (record.levelno >= logging.WARNING and room != "prefect")

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger().handlers[0].addFilter(is_for_people)
    for room in ("flows", "tasks"):
        logging.getLogger(room).setLevel(logging.DEBUG if verbose else logging.INFO)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results


def parse_command(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may stand anywhere, also after an option, where argparse would refuse them."""
    parser, words = make_parser(), list(sys.argv[1:] if arguments is None else arguments)
    for place in [place for place, word in enumerate(words) if word == "--hosts"][::-1]:  # -1x8xT4 is no option
        words[place : place + 2] = ["=".join(words[place : place + 2])]
    options, rest = parser.parse_known_args(words)
    if rest and not (hasattr(options, "overrides") and all("=" in part and part[0] != "-" for part in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


class _Parser(argparse.ArgumentParser):
    """Says which command is meant by one that is not known."""

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"(argument .*: invalid choice: '(.*)') (\(choose from (.*)\))", message)
        if wrong:
            known = [word.strip("' ") for word in wrong[4].split(",")]
            message = f"{wrong[1]}{did_you_mean(wrong[2], known)} {wrong[3]}"
        super().error(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="shardline", description="From a corpus and machines to a trained, evaluated and served language model."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="debug logs, and tracebacks of errors")
    parser.add_argument("--version", action="version", version=f"shardline {importlib.metadata.version('shardline')}")
    commands = parser.add_subparsers(metavar="COMMAND")
    parser.set_defaults(call=lambda _: parser.print_help())

    def command(name: str, run: Callable[[Any], int | None], help: str, *places: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(call=run)
        for place in places:
            added.add_argument(place.lower().replace("@alias", ""), metavar=place, help=PLACES.get(place))
        return added

    add_run_commands(command)
    add_quote_command(command)
    add_operation_commands(command, commands)
    add_server_commands(command)
    add_model_commands(command)
    add_promotion_commands(command)
    return parser
