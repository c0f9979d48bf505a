"""`shardline pretrain|resume|blame|reproduce|compare|plan|doctor`: start training runs; plan and measure before one."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_json, add_overrides
from flows.cli.tables import print_pairs, print_table

logger = logging.getLogger(__name__)

DONE, FAILED = 0, 1


def add_run_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands above. `command` adds one to the parser, as in flows/cli/command.py."""
    pretrain = command(
        "pretrain", _pretrain, "run the whole pipeline, from text to a registered model that can be served"
    )
    plan = command("plan", _plan, "show the plan of a run, here or on other machines (--hosts), without starting it")
    for added in (pretrain, plan):
        nargs = "?" if added is plan else None
        about = "a preset's name, or the path of a YAML file" + (" (default: quickstart)" if nargs else "")
        added.add_argument("preset", metavar="PRESET", nargs=nargs, default="", help=about)
        add_overrides(added, "for example data.path=my_texts")
    plan.add_argument("--fields", action="store_true", help="list every field, with its default and PRESET's value")
    about = "plan for machines that you do not have, for example 16x8xH100-80GB-SXM,400Gb (docs/hardware.md)"
    plan.add_argument("--hosts", metavar="HOSTSxGPUSxNAME,NETWORK", help=about)
    doctor = command("doctor", _doctor, "measure this machine and show how fast and how large a run on it could be")
    doctor.add_argument("--again", action="store_true", help="measure again instead of using earlier measurements")
    doctor.add_argument("--ranks", type=int, default=0, help="CPU ranks to measure with (default: up to two)")
    resume = command("resume", _resume, "continue a run that was stopped or killed, or train it longer", "RUN")
    add_overrides(resume, "settings that change, for example train.steps=2000")
    resume.add_argument(
        "--force",
        action="store_true",
        help="allow settings with which the results differ from a run that never stopped",
    )
    about = "leave out the batches of these steps, for example 37,40-42: train on from the checkpoint before them"
    resume.add_argument("--without", metavar="STEPS", help=about)
    blame = command("blame", _blame, "show which documents were in a step's batch, the worst loss first", "RUN")
    about = "ranks and precision, for example inference.parallel=tensor inference.degree=2"
    blame.add_argument("overrides", metavar="inference.field=value", nargs="*", default=[], help=about)
    blame.add_argument("--step", type=int, required=True, metavar="N", help="a training step, counted from 1")
    blame.add_argument("--top", type=int, default=10, metavar="K", help="number of documents (default: 10)")
    reproduce = command(
        "reproduce", _reproduce, "repeat a run (or the run of MODEL@champion), and compare the losses", "RUN"
    )
    add_json(pretrain, plan, doctor, resume, blame, reproduce)
    _add_compare_command(command)


def _pretrain(options: argparse.Namespace) -> None:
    from flows.presets import load_config
    from flows.stages.job_checks import check_job

    config = load_config(options.preset, options.overrides)
    check_job(config)  # at once, before any server is started
    _run_pretrain(config, run_id="", as_json=options.json)


def _resume(options: argparse.Namespace) -> int:
    from flows.presets import with_overrides
    from tasks.comparison.compare import REQUEST
    from tasks.runs.folder import latest_config, read_plan
    from tasks.runs.resume import accepted
    from tasks.runs.without import read_steps, resume_without
    from tasks.store.runs import RunOnStore, fetch_run, is_on_store, run_url
    from tasks.tracking.mlflow_run import read_run
    from tasks.workspace.locks import refuse_if_owned

    run = read_run(fetch_run(options.run) if is_on_store(options.run) else options.run)
    refuse_if_owned(run.folder)  # at once, before its settings are looked at and any server is started
    if (run.folder / REQUEST).exists():
        return _resume_comparison(run, options)
    config = with_overrides(latest_config(run.folder, begun_with=run.begun_with), options.overrides)
    if options.without:
        plan = read_plan(run.folder)
        steps = read_steps(options.without, of=plan.steps if plan is not None else config.train.steps)
        accepted(run.folder, config, begun_with=run.begun_with, force=options.force)  # before any checkpoint is deleted
        resume_without(run.folder, steps, force=options.force)
        if config.store.url:
            RunOnStore(run_url(config.store, run.run_id), run.folder).leave_out(steps)
    _run_pretrain(config, run_id=run.run_id, force=options.force, as_json=options.json)
    return DONE


def _blame(options: argparse.Namespace) -> None:
    from flows.presets import evaluate_config
    from tasks.evaluation.blame import blame, rows_of
    from tasks.store.runs import fetch_run, is_on_store
    from tasks.tracking.mlflow_run import offer_files, read_run

    run = read_run(fetch_run(options.run) if is_on_store(options.run) else options.run)
    inference = evaluate_config({}, options.overrides).inference
    found = blame(run.folder, step=options.step, top=options.top, inference=inference)
    offer_files(run, Path(found.page))
    if options.json:
        print(found.model_dump_json())
        return
    print_table(("loss", "tokens", "document", "place", "text"), rows_of(found))
    print(
        f"{len(found.documents)} of {found.of} documents in the batch of step {found.step}, measured under the "
        f"checkpoint of step {found.checkpoint_step}; their text: {found.page}"
    )


def _run_pretrain(config: Any, *, run_id: str, force: bool = False, as_json: bool) -> None:
    from flows.servers.embedded import start_servers

    wait = start_servers()
    from flows.pretrain import pretrain
    from tasks.planning.custom_program import CustomProgramOutcome
    from tasks.reports.outcome import Outcome, outcome_rows
    from tasks.reports.run_report import PAGE

    wait()
    outcome = pretrain(config, run_id=run_id, force=force)
    if as_json:
        print(outcome.model_dump_json())
        return
    if isinstance(outcome, CustomProgramOutcome):
        from flows.stages.custom_program import custom_program_rows

        print_pairs(f"run {outcome.run_id} is done", custom_program_rows(outcome))
        return
    assert isinstance(outcome, Outcome), "only a dry run returns a plan"
    if outcome.generated:
        print(f"\n{outcome.generated}\n")
    report = Path(outcome.checkpoint).parents[1] / PAGE
    print_pairs(f"run {outcome.run_id} is done", [*outcome_rows(outcome), ("report", str(report))])


def _plan(options: argparse.Namespace) -> None:
    from flows.presets import command_for_all_steps, field_rows, load_config
    from flows.stages.job_checks import check_inputs
    from tasks.data.estimate import estimate_text
    from tasks.planning.describe import describe_plan
    from tasks.planning.plan import plan_run
    from tasks.planning.pretrained import check_weights

    if options.fields:
        given = options.preset or options.overrides
        values = load_config(options.preset or "quickstart", options.overrides) if given else None
        for section, rows in itertools.groupby(field_rows(values=values), lambda row: row[0].rpartition(".")[0]):
            print_pairs(section or "the run", list(rows))
        return
    config = load_config(options.preset or "quickstart", options.overrides)
    with_text = bool(config.data.path or config.data.sources)
    if with_text and options.hosts is None:  # other machines have other files
        check_inputs(config)
    text = estimate_text(config) if with_text and options.hosts is None else None
    plan = plan_run(config, inventory=_inventory(config, hosts=options.hosts), text=text)
    check_weights(config)
    if options.json:
        print(plan.model_dump_json())
    else:
        fewer = plan.steps == plan.steps_in_time < config.train.steps
        all_steps = command_for_all_steps(config) if fewer else ""
        more = [("all its steps", all_steps)] if all_steps else []
        more += [] if with_text else [("text", "none: data.path is empty, and a run needs one")]
        print_pairs(f"plan of {config.name}", describe_plan(plan) + more)


def _inventory(config: Any, *, hosts: str | None) -> Any:
    """The inventory of the machines that `hosts` describes; without it, of this machine, measured."""
    from tasks.hardware.measure import check_hardware
    from tasks.workspace.paths import home
    from training.planner.hypothetical_hosts import hypothetical_inventory

    if hosts is not None:
        return hypothetical_inventory(hosts)
    if config.launch.launcher != "local":
        logger.warning(
            "this plan is for this machine, not for those of launch.launcher=%s: describe them with --hosts; "
            "`shardline pretrain` measures them, and plans for them before it trains",
            config.launch.launcher,
        )
    return check_hardware(home=home(), ranks=config.parallel.asked_ranks)


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


# Comparisons


def _add_compare_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    compare = command("compare", _compare, "train a config under several strategies and compare them in one report")
    compare.add_argument("preset", metavar="PRESET", help="a preset's name, or the path of a YAML file")
    add_overrides(compare, "for all strategies, for example train.steps=200")
    about = "such as ddp,zero2,fsdp+tp2,mine=parallel.bucket_mib=50 (docs/comparing.md); may be repeated"
    compare.add_argument("--strategies", action="append", required=True, metavar="LIST", help=about)
    about = "train on these Docker hosts (launch.launcher=docker, launch.hosts_file=FILE); needs launch.image=…"
    compare.add_argument("--hosts", default="", metavar="FILE", help=about)
    about = "compare the number of steps to this loss (default: to the lowest loss that all have reached)"
    compare.add_argument("--target-loss", type=float, default=0.0, metavar="NATS", help=about)
    compare.add_argument("--no-baseline", action="store_true", help="leave out the run on one device")
    add_json(compare)


def _compare(options: argparse.Namespace) -> int:
    from flows.presets import load_config
    from flows.stages.job_checks import check_job
    from tasks.comparison.compare import CompareRequest, check_comparable
    from tasks.comparison.strategies import check_shared_overrides, read_strategies

    hosts = ["launch.launcher=docker", f"launch.hosts_file={options.hosts}"] if options.hosts else []
    config = load_config(options.preset, [*hosts, *options.overrides])
    request = CompareRequest(
        strategies=tuple(options.strategies), target_loss=options.target_loss, baseline=not options.no_baseline
    )
    check_comparable(config)
    check_job(config)
    check_shared_overrides(options.overrides)
    read_strategies(request.strategies, baseline=request.baseline)  # at once, before any server is started
    return _run_compare(config, request, run_id="", as_json=options.json)


def _resume_comparison(run: Any, options: argparse.Namespace) -> int:
    """Resume a comparison: finished strategies stay, stopped ones continue, failed ones start again. `run`: parent."""
    from tasks.comparison.compare import REQUEST, CompareRequest

    if options.overrides or options.without:
        changed = " ".join([*options.overrides, *([f"--without {options.without}"] if options.without else [])])
        raise ValueError(
            f"{run.run_id} is a comparison, whose settings stay the same ({changed}): start a new one, or resume one "
            "of its runs"
        )
    request = CompareRequest.read(run.folder / REQUEST)
    return _run_compare(run.begun_with, request, run_id=run.run_id, as_json=options.json)


def _run_compare(config: Any, request: Any, *, run_id: str, as_json: bool) -> int:
    from flows.servers.embedded import start_servers

    wait = start_servers()
    from flows.compare import compare
    from tasks.comparison.report import describe_target, headline, table

    wait()
    comparison = compare(
        config,
        list(request.strategies),
        target_loss=request.target_loss,
        baseline=request.baseline,
        run_id=run_id,
    )
    if as_json:
        print(comparison.model_dump_json())
    else:
        print_table(*table(comparison, brief=True))
        print(f"{headline(comparison)}\n{describe_target(comparison)}")
        for row in comparison.rows:
            if row.outcome != "done":
                print(f"{row.strategy}, {row.outcome}: {row.cause}")
        print(f"report: {comparison.report}")
    return DONE if len(comparison.succeeded) == len(comparison.rows) else FAILED
