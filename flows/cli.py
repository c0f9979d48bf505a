"""The `shardline` command. Exit codes: 0 done, 2 bad input, 1 failed, 130 stopped.

Results go to stdout (one JSON object with --json), logs and bars to stderr. Heavy libraries are imported by the
command that needs them, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _set_up_logging(verbose=options.verbose)
    signal.signal(signal.SIGTERM, _interrupt)
    from tasks.launch import RunStopped

    try:
        return int(options.run(options) or DONE)
    except (RunStopped, KeyboardInterrupt) as stop:
        print(f"stopped: {stop}" if str(stop) else "stopped", file=sys.stderr)
        return STOPPED
    except ValueError as error:
        print(f"shardline: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        if options.verbose:
            raise
        print(f"shardline: {error}", file=sys.stderr)
        return FAILED


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """SIGTERM is a Ctrl-C: the default would end us before embedded servers are stopped and statuses written."""
    raise KeyboardInterrupt


def _set_up_logging(*, verbose: bool) -> None:
    """Our own lines, and others' warnings. Prefect's errors repeat ours with a traceback: only with --verbose."""

    def is_for_people(record: logging.LogRecord) -> bool:
        room = record.name.partition(".")[0]
        return verbose or room in {"flows", "tasks"} or (record.levelno >= logging.WARNING and room != "prefect")

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger().handlers[0].addFilter(is_for_people)
    for room in ("flows", "tasks"):
        logging.getLogger(room).setLevel(logging.DEBUG if verbose else logging.INFO)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")


def _set_up_prefect() -> None:
    """Settings of the embedded Prefect, before it is imported; what the user set in the environment stays."""
    from tasks.places import home

    defaults = {
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # a first start migrates a database: 10 s and more
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # our own lines say it already
    }
    if "PREFECT_API_URL" not in os.environ:
        defaults["PREFECT_HOME"] = str(home() / "prefect")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardline", description="A corpus and machines in, a served language model out."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="debug logs, and tracebacks of errors")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Any], int | None], help: str, *, report: bool = False
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        if report:
            added.add_argument("--json", action="store_true", help="one JSON object on stdout")
        return added

    def with_preset(added: argparse.ArgumentParser, *, optional: bool = False) -> None:
        nargs = "?" if optional else None
        added.add_argument(
            "preset",
            metavar="PRESET",
            nargs=nargs,
            default="quickstart",
            help="a preset's name, or the path of a YAML file",
        )
        added.add_argument("overrides", metavar="section.field=value", nargs="*", help="for example data.path=my_texts")

    added = command("pretrain", _pretrain, "text in, served model out: the whole pipeline", report=True)
    with_preset(added)
    added = command("plan", _plan, "what a run would do on this machine, without doing it", report=True)
    with_preset(added, optional=True)
    added.add_argument("--fields", action="store_true", help="list every field of the config, with its bounds")
    added = command("doctor", _doctor, "measure this machine, and say what it means for a run", report=True)
    added.add_argument("--again", action="store_true", help="measure again, whatever was measured before")
    added.add_argument("--ranks", type=int, default=0, help="CPU ranks to measure with (default: up to two)")
    added = command("resume", _resume, "go on with a run that was stopped or killed", report=True)
    added.add_argument("run_id", metavar="RUN", help="the run's ID, a folder in SHARDLINE_HOME")
    added = command("reproduce", _reproduce, "run a run again, and say whether the losses agree", report=True)
    added.add_argument("ref", metavar="RUN", help="a run's ID, or MODEL@champion, or MODEL/VERSION")
    added = command("promote", _promote, "put a model version through the gate, to champion", report=True)
    added.add_argument("model", metavar="MODEL")
    added.add_argument("--version", type=int, help="default: the challenger")
    added.add_argument("--force", action="store_true", help="past the gate")
    added = command("lineage", _lineage, "from a model version back to run, code, data and checkpoint", report=True)
    added.add_argument("ref", metavar="MODEL@ALIAS")
    added = command("generate", _generate, "print text from a registered model")
    added.add_argument("ref", metavar="MODEL@ALIAS")
    added.add_argument("prompt", metavar="PROMPT")
    added.add_argument("--tokens", type=int, default=100)
    added.add_argument("--temperature", type=float, default=0.8)
    added.add_argument("--top-k", type=int, default=50)
    added.add_argument("--seed", type=int, default=1337)
    added = command("serve", _serve, "serve a registered model over HTTP; follows the alias")
    added.add_argument("ref", metavar="MODEL@ALIAS")
    added.add_argument("--host", default="127.0.0.1")
    added.add_argument("--port", type=int, default=8000)
    return parser


def _pretrain(options: argparse.Namespace) -> int:
    from flows.presets import load_config

    return _run_pretrain(load_config(options.preset, options.overrides), run_id="", as_json=options.json)


def _resume(options: argparse.Namespace) -> int:
    from tasks.places import home, run_folder
    from tasks.track import TrackedRun

    path = run_folder(options.run_id) / "run.json"
    if not path.exists():
        raise ValueError(f"there is no run {options.run_id!r} in {home()}: `ls {home()}` lists the runs")
    return _run_pretrain(TrackedRun.read(path).config, run_id=options.run_id, as_json=options.json)


def _run_pretrain(config: Any, *, run_id: str, as_json: bool) -> int:
    _set_up_prefect()
    from flows.pretrain import pretrain
    from tasks.report import outcome_rows

    outcome = _run_flow(pretrain, config, run_id=run_id)
    if as_json:
        print(outcome.model_dump_json())
        return DONE
    if outcome.generated:
        print(f"\n{outcome.generated}\n")
    _print_pairs(f"run {outcome.run_id} is done", outcome_rows(outcome))
    return DONE


def _run_flow(flow: Any, *arguments: Any, **named: Any) -> Any:
    """Call a Prefect flow; its Cancelled state is our RunStopped."""
    from prefect.exceptions import CancelledRun

    from tasks.launch import RunStopped

    try:
        return flow(*arguments, **named)
    except CancelledRun as stop:
        raise RunStopped(str(stop)) from None


def _plan(options: argparse.Namespace) -> None:
    from flows.presets import field_rows, load_config
    from tasks.hardware import check_hardware
    from tasks.places import home
    from tasks.planning import plan_in_words, plan_run

    if options.fields:
        _print_pairs("fields of the config", field_rows())
        return
    config = load_config(options.preset, options.overrides)
    ranks = 1 if config.parallel.strategy == "single" else config.parallel.ranks
    plan = plan_run(config, inventory=check_hardware(home=home(), ranks=ranks))
    if options.json:
        print(plan.model_dump_json())
    else:
        _print_pairs(f"plan of {config.name}", plan_in_words(plan))


def _doctor(options: argparse.Namespace) -> None:
    from tasks.doctor import doctor_record, doctor_report
    from tasks.hardware import check_hardware
    from tasks.places import home

    inventory = check_hardware(home=home(), ranks=options.ranks, measure_again=options.again)
    print(json.dumps(doctor_record(inventory)) if options.json else doctor_report(inventory))


def _reproduce(options: argparse.Namespace) -> int:
    _set_up_prefect()
    from flows.reproduce import reproduce
    from tasks.reproduce import agreement_rows

    agreement = _run_flow(reproduce, options.ref)
    if options.json:
        print(agreement.model_dump_json())
    else:
        _print_pairs(f"{agreement.original} again, as {agreement.repeated}", agreement_rows(agreement))
    return DONE if agreement.agrees else FAILED


def _promote(options: argparse.Namespace) -> int:
    from tasks.places import tracking_uri
    from tasks.register import promote

    model = promote(options.model, version=options.version, force=options.force, tracking_uri=tracking_uri())
    if options.json:
        print(model.model_dump_json())
    else:
        print(f"{model.name} version {model.version}: {model.verdict}; alias {model.alias or 'none'}")
    return DONE if model.alias == "champion" else FAILED


def _lineage(options: argparse.Namespace) -> None:
    from tasks.places import home, tracking_uri
    from tasks.registry import lineage

    found = lineage(options.ref, tracking_uri=tracking_uri(), cache_dir=home() / "models")
    if options.json:
        print(json.dumps(found))
        return
    from tasks.track import flattened

    _print_pairs(f"where {options.ref} comes from", [(key, str(value)) for key, value in flattened(found)])


def _generate(options: argparse.Namespace) -> None:
    from tasks.generate import TextGenerator
    from tasks.places import home, tracking_uri
    from tasks.registry import resolve

    model = resolve(options.ref, tracking_uri=tracking_uri(), cache_dir=home() / "models")
    print(options.prompt, end="", flush=True)
    for piece in TextGenerator(model.export_dir).stream(
        options.prompt,
        new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    ):
        print(piece, end="", flush=True)
    print()


def _serve(options: argparse.Namespace) -> None:
    from tasks.places import home, tracking_uri
    from tasks.serve import serve

    serve(
        options.ref,
        host=options.host,
        port=options.port,
        tracking_uri=tracking_uri(),
        cache_dir=home() / "models",
    )


def _print_pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for label, value in rows:
        table.add_row(label, Text(value, overflow="fold"))
    width = None if sys.stdout.isatty() else 140
    Console(width=width).print(table)


if __name__ == "__main__":
    sys.exit(main())
