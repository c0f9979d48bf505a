"""Compares strategies on the same tokens, seed and global batch: a child run for each, one report in their parent."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from flows.prefect_ui import links
from flows.prefect_ui.artifacts import show_table
from flows.prefect_ui.flow import shardline_flow
from flows.presets import with_overrides
from flows.stages import training as stages
from flows.stages.crashed_runs import reconcile_statuses
from flows.stages.job_checks import check_job
from flows.stages.report import reported
from tasks.comparison.compare import (
    REQUEST,
    CompareRequest,
    Comparison,
    StrategyOutcome,
    check_comparable,
    compare_runs,
    describe_machine,
    one_device,
    outcome_of,
)
from tasks.comparison.picture import draw_comparison
from tasks.comparison.report import headline, table, write_page
from tasks.comparison.strategies import ComparedStrategy, read_strategies
from tasks.runs.errors import RunStopped
from tasks.runs.resume import changes
from tasks.tracking import mlflow_run
from tasks.tracking.code_version import git_commit
from tasks.tracking.mlflow_run import TrackedRun, tracked
from tasks.workspace.paths import command, run_folder, tracking_uri
from training.config.credentials import PublicText
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.token_shards import TokenShards
from training.tracking.redaction import without_credentials

logger = logging.getLogger(__name__)

INVENTORY = "inventory.json"
PICTURE, PAGE, RECORD, CONFIG = (f"comparison.{kind}" for kind in ("png", "html", "json", "yaml"))


@shardline_flow("Compare", run_name="compare {config.name}")
def compare(
    config: RunConfig,
    strategies: list[PublicText],
    target_loss: float = 0.0,
    baseline: bool = True,
    run_id: PublicText = "",
    overrides: tuple[PublicText, ...] = (),
) -> Comparison:
    """Train `config` under each of `strategies` and report how they compare.

    Args:
        config: As for pretrain.
        strategies: What is compared: ddp, fsdp+tp2, NAME=section.field=value, …
        target_loss: Count the steps to this validation loss; 0 means to the lowest that all reach.
        baseline: Also train on one device.
        run_id: ID of a comparison to continue. Empty begins a new one.
        overrides: Changes of any fields, as on the command line: section.field=value, such as train.context=512.
    """
    config = with_overrides(config, overrides)
    check_comparable(config)
    if run_id and not mlflow_run.read_run(run_id).is_of(config):
        raise ValueError(
            f"comparison {run_id} was started with another config, which cannot change: start a new comparison"
        )
    compared = read_strategies(strategies, baseline=baseline)
    if not (run_id := run_id or stages.begun_before(config)):
        check_job(config)
    request = CompareRequest(strategies=tuple(strategies), target_loss=target_loss, baseline=baseline)
    reconcile_statuses()
    run_id = run_id or stages.new_run_id(f"{config.name}-compare")
    tags = {"shardline.comparison": ", ".join(strategy.name for strategy in compared)}
    with tracked(config, run_id=run_id, tags=links.prefect_tags() | tags) as parent:
        links.link(parent)
        request.write(parent.folder / REQUEST)
        shards_dir, shards = stages.tokenize(config, parent)
        with stages.devices(config, parent):
            return _compared(compared, request, Children(config, parent, shards_dir, shards))


def _compared(strategies: Sequence[ComparedStrategy], request: CompareRequest, children: Children) -> Comparison:
    parent = children.parent
    outcomes: dict[str, StrategyOutcome] = {}
    try:
        for place, strategy in enumerate(strategies, 1):
            logger.info("strategy %d of %d: %s", place, len(strategies), strategy.name)
            outcomes[strategy.name] = _outcome(children, strategy)
    except BaseException as stop:  # Ctrl-C, which the stage Train usually turns into RunStopped
        outcomes[strategy.name] = children.ended(strategy, RunStopped("interrupted"))
        _report_so_far(children, strategies, outcomes, request)
        if isinstance(stop, RunStopped):
            raise RunStopped(f"stopped at {strategy.name}: `shardline resume {parent.run_id}` continues") from None
        raise
    comparison = report(children, strategies, outcomes, request)
    if not comparison.succeeded:
        causes = "; ".join(f"{row.strategy}: {row.cause}" for row in comparison.rows)
        raise RuntimeError(f"no strategy finished ({comparison.report} has more): {causes}")
    return comparison


def _outcome(children: Children, strategy: ComparedStrategy) -> StrategyOutcome:
    """Train one strategy. A failure becomes a row with its cause; a stop stops the comparison."""
    try:
        return train_child(children, strategy)
    except RunStopped:
        raise
    except Exception as error:
        outcome = children.ended(strategy, error)
        logger.error("strategy %s %s: %s", strategy.name, outcome.outcome, outcome.cause)
        return outcome


def _report_so_far(
    children: Children,
    strategies: Sequence[ComparedStrategy],
    outcomes: Mapping[str, StrategyOutcome],
    request: CompareRequest,
) -> None:
    try:
        logger.info("report of the strategies so far: %s", report(children, strategies, outcomes, request).report)
    except Exception as error:
        logger.warning("could not write a report of the strategies so far: %s", error)


def all_steps(config: RunConfig) -> RunConfig:
    """Return the config without train.target_minutes, which would give each strategy another number of steps."""
    if config.train.target_minutes:
        logger.info("each strategy trains all %s steps of train.steps, so that they compare", f"{config.train.steps:,}")
    return config.model_copy(update={"train": config.train.model_copy(update={"target_minutes": 0.0})})


class Children:
    """The child runs of a comparison: the settings that they share, and the folder of each."""

    def __init__(self, config: RunConfig, parent: TrackedRun, shards_dir: Path, shards: TokenShards) -> None:
        self.config, self.parent, self.shards_dir, self.shards = all_steps(config), parent, shards_dir, shards
        self.inventories: dict[int, Inventory] = {}  # by number of ranks, measured once for all strategies

    def run_id(self, strategy: ComparedStrategy) -> str:
        return f"{self.parent.run_id}-{strategy.slug}"

    def folder(self, strategy: ComparedStrategy) -> Path:
        return run_folder(self.run_id(strategy))

    def config_of(self, strategy: ComparedStrategy) -> RunConfig:
        """Return the config with the strategy's overrides. Raises ValueError for settings that exclude each other."""
        return with_overrides(self.config, strategy.overrides)

    def inventory(self, config: RunConfig, run: TrackedRun) -> Inventory:
        """Measure this machine once for all strategies; a run on one device gets one of them. Check hosts each time."""
        one, parallel = config.parallel.strategy == "single", config.parallel
        if one:
            parallel = self.config.parallel.model_copy(update={"strategy": "auto"})
        if config.launch.launcher != "local" or parallel.ranks not in self.inventories:
            found = stages.hardware(config.model_copy(update={"parallel": parallel}), run)
            self.inventories[parallel.ranks] = found
            found.write(self.parent.folder / INVENTORY)
        found = self.inventories[parallel.ranks]
        return one_device(found) if one else found

    def ended(self, strategy: ComparedStrategy, error: Exception) -> StrategyOutcome:
        """The outcome of a strategy that failed or was stopped, perhaps before it had a run."""
        path, outcome = self.folder(strategy) / "run.json", outcome_of(error)
        update = {"cause": without_credentials(outcome.cause, uri=tracking_uri())}
        if path.exists():
            update |= {"run_id": self.run_id(strategy), "mlflow_run_id": TrackedRun.read(path).mlflow_run_id}
        return outcome.model_copy(update=update)


@stages.stage("Strategy", run_name="Train with {strategy.name}")
def train_child(children: Children, strategy: ComparedStrategy) -> StrategyOutcome:
    """Train one strategy as a child run of the parent; skipped if it is done. Raises what its stages raise."""
    config, parent = children.config_of(strategy), children.parent
    tags = {"mlflow.parentRunId": parent.mlflow_run_id, "shardline.strategy": strategy.name}
    run_id = children.run_id(strategy)
    with reported(run_id), tracked(config, run_id=run_id, tags=links.prefect_tags() | tags) as run:
        changed = changes(run.folder, config, begun_with=run.begun_with)  # by a resume of the child alone
        inventory = children.inventory(config, run)
        plan = stages.write_plan(
            config, inventory, run, shards=children.shards, shards_dir=children.shards_dir, changes=changed
        )
        stages.train(plan, run)
        return StrategyOutcome(outcome="done", run_id=run.run_id, mlflow_run_id=run.mlflow_run_id)


@stages.stage("Report")
def report(
    children: Children,
    strategies: Sequence[ComparedStrategy],
    outcomes: Mapping[str, StrategyOutcome],
    request: CompareRequest,
) -> Comparison:
    """Write comparison.json, .png, .html and .yaml to the parent's folder and MLflow, and a table to Prefect."""
    parent, folder = children.parent, children.parent.folder
    folders = {
        strategy.name: children.folder(strategy) for strategy in strategies if children.folder(strategy).is_dir()
    }
    rows, target = compare_runs(strategies, outcomes, folders=folders, target_loss=request.target_loss)
    comparison = Comparison(
        run_id=parent.run_id,
        mlflow_run_id=parent.mlflow_run_id,
        name=children.config.name,
        rows=rows,
        target_loss=target,
        target_was_given=bool(request.target_loss),
        machine=describe_machine(Inventory.read(path)) if (path := folder / INVENTORY).exists() else (),
        commit=git_commit()[0],
        command=_command(folder / CONFIG, request),
        open_mlflow=links.open_mlflow(),
        report=str(folder / PAGE),
    )
    text = yaml.safe_dump(children.config.model_dump(mode="json"), sort_keys=False)
    (folder / CONFIG).write_text(text)
    draw_comparison(folder / PICTURE, comparison, folders=folders)
    write_page(folder / PAGE, comparison, chart=folder / PICTURE, config=text)
    comparison.write(folder / RECORD)
    mlflow_run.log_files(parent, *(folder / name for name in (PICTURE, PAGE, RECORD, CONFIG)))
    _log_to_children(comparison)
    headings, cells = table(comparison)
    shown = [dict(zip(headings, line, strict=True)) for line in cells]
    show_table(shown, key="comparison", description=headline(comparison))
    return comparison


def _command(config_path: Path, request: CompareRequest) -> str:
    """The command that makes this report again, also after the preset has changed."""
    words = [command("shardline"), "compare", str(config_path), "--strategies", ",".join(request.strategies)]
    words += ["--target-loss", f"{request.target_loss:g}"] if request.target_loss else []
    return shlex.join([*words, *([] if request.baseline else ["--no-baseline"])])


def _log_to_children(comparison: Comparison) -> None:
    """Log the figures to the child runs, so that MLflow's own table shows them side by side."""
    keys = (
        "speedup",
        "scaling_efficiency",
        "exposed_communication_ms",
        "steps_to_target",
        "seconds_to_target",
        "device_hours_per_1b_tokens",
        "cost_per_1b_tokens",
    )
    for row in comparison.rows:
        if row.run_id and row.steps is not None:
            figures = {f"compare/{key}": value for key in keys if (value := getattr(row, key)) is not None}
            mlflow_run.log_figures(mlflow_run.read_run(row.run_id), figures, step=row.steps)
