"""`shardline compare`, for flows/cli/command.py; `shardline resume` of a comparison comes here too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.cli.tables import print_table

DONE, FAILED = 0, 1


def add_compare_command(command: Callable[..., argparse.ArgumentParser], run_flow: Callable[..., Any]) -> None:
    """`command`: as flows/cli/command.py makes one. `run_flow`: calls a flow by name."""
    compare = command("compare", lambda options: _compare(options, run_flow), "strategies side by side, in one report")
    compare.add_argument("preset", metavar="PRESET", help="a preset's name, or the path of a YAML file")
    about = "for all strategies, for example train.steps=200"
    compare.add_argument("overrides", metavar="section.field=value", nargs="*", default=[], help=about)
    about = "such as ddp,zero2,fsdp+tp2,mine=parallel.bucket_mib=50 (docs/comparing.md); may be repeated"
    compare.add_argument("--strategies", action="append", required=True, metavar="LIST", help=about)
    about = "train on these Docker hosts (launch.launcher=docker, launch.hosts_file=FILE); needs launch.image=…"
    compare.add_argument("--hosts", default="", metavar="FILE", help=about)
    about = "count the steps to this loss (default: to the lowest that all have reached)"
    compare.add_argument("--target-loss", type=float, default=0.0, metavar="NATS", help=about)
    compare.add_argument("--no-baseline", action="store_true", help="leave out the run on one device")
    compare.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _compare(options: argparse.Namespace, run_flow: Callable[..., Any]) -> int:
    from flows.presets import load_config
    from tasks.comparison.compare import CompareRequest, check_comparable
    from tasks.comparison.strategies import check_shared_overrides, read_strategies

    hosts = ["launch.launcher=docker", f"launch.hosts_file={options.hosts}"] if options.hosts else []
    config = load_config(options.preset, [*hosts, *options.overrides])
    request = CompareRequest(
        strategies=tuple(options.strategies), target_loss=options.target_loss, baseline=not options.no_baseline
    )
    check_comparable(config)
    check_shared_overrides(options.overrides)
    read_strategies(request.strategies, baseline=request.baseline)  # at once, before any server is started
    return _run(config, request, run_flow, run_id="", as_json=options.json)


def is_comparison(run_dir: Path) -> bool:
    from tasks.comparison.compare import REQUEST

    return (run_dir / REQUEST).exists()


def resume_comparison(run: Any, options: argparse.Namespace, run_flow: Callable[..., Any]) -> int:
    """What is done stays, what was stopped goes on, what failed is tried again. `run`: the parent."""
    from tasks.comparison.compare import REQUEST, CompareRequest

    if options.overrides:
        raise ValueError(
            f"{run.run_id} is a comparison, whose settings stay the same ({' '.join(options.overrides)}): start a new "
            "one, or resume one of its runs"
        )
    request = CompareRequest.read(run.folder / REQUEST)
    return _run(run.config, request, run_flow, run_id=run.run_id, as_json=options.json)


def _run(config: Any, request: Any, run_flow: Callable[..., Any], *, run_id: str, as_json: bool) -> int:
    from tasks.comparison.report import describe_target, headline, table

    comparison = run_flow(
        "compare",
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
