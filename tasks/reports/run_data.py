"""Reads everything that a run's folder records about the run, finished or not; report.html is made from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tasks.display.numbers import device_noun
from tasks.launch.recovery import attempts_of
from tasks.planning.price import TRAINING, RunCost, attempt_price, price_per_device
from tasks.reports.outcome import Outcome
from tasks.runs.folder import earlier_plans, latest_config, read_plan
from tasks.runs.history import Event, history
from tasks.runs.resume import Resumptions, read_resumptions
from tasks.tracking.mlflow_run import TrackedRun
from tasks.workspace.paths import present
from training.config.run import RunConfig
from training.records.plan import TRAINER_PLAN, AnyPlan, CustomProgramPlan, RunPlan
from training.records.record import read_fields
from training.records.results import EvalReport, ExportedModel, LatencyReport, RegisteredModel
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult, train_failure
from training.tracking.rows import read_rows

INTERRUPTIONS = {"failed", "stopped", "killed"}


@dataclass(frozen=True)
class RunData:
    """The run's records; a record is None or empty if the run did not get that far.

    A run of a user's own program has a `program` instead of a `plan`. `stop_reason`: why the run failed or was stopped;
    empty for one that finished. `earlier_plans`: newest first. `preset`: the config of the preset that it began with.
    """

    run: TrackedRun
    config: RunConfig
    plan: RunPlan | None
    shards: TokenShards | None
    rows: Sequence[dict[str, Any]]
    result: TrainResult | None
    evaluation: EvalReport | None
    latency: LatencyReport | None
    exported: ExportedModel | None
    model: RegisteredModel | None
    program: CustomProgramPlan | None
    earlier_plans: Sequence[RunPlan]
    events: Sequence[Event]
    resumptions: Resumptions
    attempts: Sequence[dict[str, Any]]
    stage_s: Mapping[str, float]
    stop_reason: str = ""
    preset: Mapping[str, Any] | None = None
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def tokens(self) -> int:
        """Tokens that training has seen; 0 if that is unknown."""
        logged = next((row["tokens"] for row in reversed(self.rows) if "tokens" in row), 0)
        return self.result.tokens if self.result else int(logged)

    @property
    def placement(self) -> AnyPlan | None:
        return self.plan or self.program

    @property
    def device(self) -> str:
        return self.devices(1)

    def devices(self, count: int) -> str:
        return device_noun(self.placement.device_kind if self.placement else "cpu", count)

    @property
    def device_hours(self) -> dict[str, float]:
        """Hours that training, evaluation and export used devices, from the start of their ranks to their end.

        Training is the sum of its attempts, each with its own ranks. An attempt that ended with kill -9 of the launcher
        left no record, and is not counted.
        """
        ranks = self.placement.world_size if self.placement else 0
        stages = {TRAINING: ("train", ranks), "evaluation": ("evaluate", ranks), "export": ("export", 1)}
        hours = {name: self.stage_s.get(stage, 0.0) * count / 3600 for name, (stage, count) in stages.items()}
        if self.attempts:
            hours[TRAINING] = sum(map(_rank_hours, self.attempts))
        return {name: used for name, used in hours.items() if used}

    @property
    def cost(self) -> RunCost:
        """The device hours and their cost: attempts are priced by their own plans, all others by the latest plan. If a
        stage leaves some of the plan's devices idle, as an export does, the mean of the devices' prices counts.
        """
        cost: dict[str, float] | None = {}
        for stage, hours, price in self._priced_hours():
            cost = None if cost is None or price is None else cost | {stage: cost.get(stage, 0.0) + hours * price}
        currency = self.config.prices.currency
        return RunCost(device_hours=self.device_hours, cost=cost or None, currency=currency, tokens=self.tokens)

    def _priced_hours(self) -> Iterator[tuple[str, float, float | None]]:
        """Return (stage, device hours, price of one hour)."""
        if self.placement is None:
            return
        for stage, hours in self.device_hours.items():
            if stage != TRAINING or not self.attempts:
                yield stage, hours, price_per_device(self.placement)
        plans = [self.placement, *self.earlier_plans]
        for attempt in self.attempts:
            if hours := _rank_hours(attempt):
                yield TRAINING, hours, attempt_price(plans, attempt["hosts"])


def _rank_hours(attempt: Mapping[str, Any]) -> float:
    if attempt["program"].startswith("training.") and attempt["program"] != "training.train":
        return 0.0
    began, ended = (datetime.fromisoformat(attempt[key]) for key in ("began_at", "ended_at"))
    return (ended - began).total_seconds() / 3600 * sum(attempt["hosts"].values())


def read_run_data(
    run: TrackedRun,
    *,
    stop_reason: str = "",
    preset: Mapping[str, Any] | None = None,
    links: Mapping[str, str] | None = None,
) -> RunData:
    """Read the run's folder. `stop_reason`: the error of a run that failed or was stopped."""
    folder, plan = run.folder, read_plan(run.folder)
    result, shards = folder / "result.json", present(Path(plan.shards_dir if plan else "")) / "manifest.json"
    stages, export, program = folder / "stages.json", folder / "export", folder / TRAINER_PLAN
    latency, exported = export / "latency.json", export / "export.json"
    return RunData(
        run=run,
        config=latest_config(folder, begun_with=run.begun_with),
        plan=plan,
        shards=TokenShards.read(shards) if plan and shards.exists() else None,
        rows=read_rows(folder / "metrics.jsonl"),
        result=TrainResult.read(result) if result.exists() and not train_failure(result) else None,
        evaluation=EvalReport.read(folder / "eval.json") if (folder / "eval.json").exists() else None,
        latency=LatencyReport.read(latency) if latency.exists() else None,
        exported=ExportedModel.read(exported) if exported.exists() else None,
        model=None if run.begun_with.trainer.given else _registered(folder / "outcome.json"),
        program=CustomProgramPlan.read(program) if program.exists() else None,
        earlier_plans=earlier_plans(folder),
        events=history(folder),
        resumptions=read_resumptions(folder),
        attempts=attempts_of(folder),
        stage_s=read_fields(stages) if stages.exists() else {},
        stop_reason=stop_reason,
        preset=preset,
        links=links or {},
    )


def _registered(path: Path) -> RegisteredModel | None:
    """Return the version in the run's outcome; after a resume of a finished run, its earlier version."""
    if not path.exists():
        return None
    outcome = Outcome.read(path)
    return RegisteredModel(name=outcome.model, version=outcome.version, alias=outcome.alias, verdict=outcome.verdict)
