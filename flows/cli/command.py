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

from flows.cli.compare import add_compare_command, is_comparison, resume_comparison
from flows.cli.evaluate import add_evaluate_command
from flows.cli.images import add_image_commands
from flows.cli.models import add_model_commands
from flows.cli.promotion import add_promotion_commands
from flows.cli.runs import add_running_commands
from flows.cli.servers import add_server_commands
from flows.cli.tables import print_pairs

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    _set_up_logging(verbose=options.verbose)
    signal.signal(signal.SIGTERM, _interrupt)
    from tasks.runs.errors import RunStopped
    from tasks.workspace.paths import keep_password_apart
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
        print(f"shardline: {message}", file=sys.stderr)
        return BAD_INPUT if _is_bad_input(error) else FAILED


def _is_bad_input(error: Exception) -> bool:
    """ValueError is what users get wrong; a record or an answer that cannot be parsed is not their doing."""
    return isinstance(error, ValueError) and type(error).__name__ not in {"JSONDecodeError", "ValidationError"}


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
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere, after an option too, where argparse alone would refuse them."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not (hasattr(options, "overrides") and all("=" in part and part[0] != "-" for part in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardline", description="A corpus and machines in, a served language model out."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="debug logs, and tracebacks of errors")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int | None], help: str, *places: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(call=run)
        for place in places:
            added.add_argument(place.lower().replace("@alias", ""), metavar=place)
        return added

    _add_run_commands(command)
    add_compare_command(command)
    add_running_commands(command)
    add_server_commands(command)
    add_evaluate_command(command)
    add_model_commands(command)
    add_promotion_commands(command)
    add_image_commands(commands)
    return parser


def _add_run_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    pretrain = command("pretrain", _pretrain, "text in, served model out: the whole pipeline")
    plan = command("plan", _plan, "what a run would do, here or on other machines (--hosts), without doing it")
    for added in (pretrain, plan):
        nargs = "?" if added is plan else None
        about = "a preset's name, or the path of a YAML file"
        added.add_argument("preset", metavar="PRESET", nargs=nargs, default="quickstart", help=about)
        about = "for example data.path=my_texts"
        added.add_argument("overrides", metavar="section.field=value", nargs="*", default=[], help=about)
    plan.add_argument("--fields", action="store_true", help="list every field of the config, with its default")
    about = "plan for machines that are not there, for example 16x8xH100-80GB-SXM,400Gb (docs/hardware.md)"
    plan.add_argument("--hosts", metavar="HOSTSxGPUSxNAME,NETWORK", help=about)
    doctor = command("doctor", _doctor, "measure this machine, and say what it means for a run")
    doctor.add_argument("--again", action="store_true", help="measure again, whatever was measured before")
    doctor.add_argument("--ranks", type=int, default=0, help="CPU ranks to measure with (default: up to two)")
    resume = command("resume", _resume, "go on with a run that was stopped or killed, or for longer", "RUN")
    about = "settings that change, for example train.steps=2000"
    resume.add_argument("overrides", metavar="section.field=value", nargs="*", default=[], help=about)
    resume.add_argument("--force", action="store_true", help="with settings that break exactness, too")
    reproduce = command("reproduce", _reproduce, "run a run (or MODEL@champion) again, and compare the losses", "RUN")
    for added in (pretrain, plan, doctor, resume, reproduce):
        added.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _pretrain(options: argparse.Namespace) -> int:
    from flows.presets import load_config

    return _run_pretrain(load_config(options.preset, options.overrides), run_id="", as_json=options.json)


def _resume(options: argparse.Namespace) -> int:
    from flows.presets import with_overrides
    from tasks.runs.folder import latest_config
    from tasks.tracking.mlflow_run import read_run

    run = read_run(options.run)
    if is_comparison(run.folder):
        return resume_comparison(run, options)
    config = with_overrides(latest_config(run.folder, begun_with=run.begun_with).model_dump(), options.overrides)
    return _run_pretrain(config, run_id=options.run, force=options.force, as_json=options.json)


def _run_pretrain(config: Any, *, run_id: str, force: bool = False, as_json: bool) -> int:
    from flows.servers.embedded import start_servers

    wait = start_servers()
    from flows.pretrain import pretrain
    from tasks.planning.custom_program import TrainerOutcome
    from tasks.reports.outcome import Outcome, outcome_rows

    wait()
    outcome = pretrain(config, run_id=run_id, force=force)
    if as_json:
        print(outcome.model_dump_json())
        return DONE
    if isinstance(outcome, TrainerOutcome):
        from flows.stages.custom_program import trainer_rows

        print_pairs(f"run {outcome.run_id} is done", trainer_rows(outcome))
        return DONE
    assert isinstance(outcome, Outcome), "a plan only of a dry run"
    if outcome.generated:
        print(f"\n{outcome.generated}\n")
    print_pairs(f"run {outcome.run_id} is done", outcome_rows(outcome))
    return DONE


def _plan(options: argparse.Namespace) -> None:
    from flows.presets import field_rows, load_config
    from tasks.planning.describe import describe_plan
    from tasks.planning.plan import plan_run

    if options.fields:
        print_pairs("fields of the config", field_rows())
        return
    config = load_config(options.preset, options.overrides)
    plan = plan_run(config, inventory=_inventory(config, hosts=options.hosts))
    if options.json:
        print(plan.model_dump_json())
    else:
        print_pairs(f"plan of {config.name}", describe_plan(plan))


def _inventory(config: Any, *, hosts: str | None) -> Any:
    """Of the machines that `hosts` describes; else of this one, measured."""
    from tasks.hardware.measure import check_hardware
    from tasks.workspace.paths import home
    from training.planner.hypothetical_hosts import hypothetical_inventory

    if hosts:
        return hypothetical_inventory(hosts)
    return check_hardware(home=home(), ranks=1 if config.parallel.strategy == "single" else config.parallel.ranks)


def _doctor(options: argparse.Namespace) -> None:
    from tasks.hardware.doctor import doctor_record, doctor_report
    from tasks.hardware.measure import check_hardware
    from tasks.workspace.paths import home

    inventory = check_hardware(home=home(), ranks=options.ranks, measure_again=options.again)
    print(json.dumps(doctor_record(inventory)) if options.json else doctor_report(inventory))


def _reproduce(options: argparse.Namespace) -> int:
    from flows.servers.embedded import start_servers

    wait = start_servers()
    from flows.reproduce import reproduce
    from tasks.comparison.reproduce import agreement_rows

    wait()
    agreement = reproduce(options.run)
    if options.json:
        print(agreement.model_dump_json())
    else:
        print_pairs(f"{agreement.original} again, as {agreement.repeated}", agreement_rows(agreement))
    return DONE if agreement.agrees else FAILED
