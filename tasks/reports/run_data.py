"""All that a run's folder tells of it, done or not: what report.html is made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tasks.launch.docker_hosts import attempts_of
from tasks.planning.custom_program import PLAN, TrainerPlan
from tasks.reports.outcome import Outcome
from tasks.runs.folder import latest_config, read_plan
from tasks.runs.history import Event, history
from tasks.runs.resume import Resumptions, read_resumptions
from tasks.tracking.mlflow_run import TrackedRun
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.results import EvalReport, LatencyReport, RegisteredModel
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult, train_failure
from training.tracking.rows import read_rows

CUTS = {"failed", "stopped", "killed"}


@dataclass(frozen=True)
class RunStory:
    """What there is; None or empty where the run did not come so far. Of a program of the user's there is no plan.

    `ended`: why it went no further, if so. `preset`: the config of the preset that has the run's name.
    """

    run: TrackedRun
    config: RunConfig
    plan: RunPlan | None
    shards: TokenShards | None
    rows: Sequence[dict[str, Any]]
    result: TrainResult | None
    evaluation: EvalReport | None
    latency: LatencyReport | None
    model: RegisteredModel | None
    program: TrainerPlan | None
    events: Sequence[Event]
    resumptions: Resumptions
    attempts: Sequence[dict[str, Any]]
    stage_s: Mapping[str, float]
    ended: str = ""
    preset: Mapping[str, Any] | None = None
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def device(self) -> str:
        placed = self.plan or self.program
        return "GPU" if placed and placed.device_kind == "cuda" else "CPU rank"

    @property
    def device_hours(self) -> dict[str, float]:
        """By stage: what training, evaluation and export held, from the start of their ranks to their end.

        What a kill -9 of the launcher cut short is in there only on Docker hosts, whose attempts have records.
        """
        placed = self.plan or self.program
        ranks = placed.world_size if placed else 0
        by_stage = {"training": ranks, "evaluation": ranks, "export": 1}
        seconds = {name: self.stage_s.get(key, 0.0) for name, key in zip(by_stage, ("train", "evaluate", "export"),
                                                                          strict=True)}  # fmt: skip
        held = {name: seconds[name] * ranks / 3600 for name, ranks in by_stage.items()}
        if self.attempts:
            held["training"] = sum(map(_rank_hours, self.attempts))
        return {name: hours for name, hours in held.items() if hours}


def _rank_hours(attempt: Mapping[str, Any]) -> float:
    if attempt["program"].startswith("training.") and attempt["program"] != "training.train":
        return 0.0
    began, ended = (datetime.fromisoformat(attempt[key]) for key in ("began_at", "ended_at"))
    return (ended - began).total_seconds() / 3600 * sum(attempt["hosts"].values())


def read_story(
    run: TrackedRun,
    *,
    ended: str = "",
    preset: Mapping[str, Any] | None = None,
    links: Mapping[str, str] | None = None,
) -> RunStory:
    """`ended`: what a run that failed or was stopped said at its end."""
    folder, plan = run.folder, read_plan(run.folder)
    result, shards = folder / "result.json", Path(plan.shards_dir if plan else "") / "manifest.json"
    stages, latency, program = folder / "stages.json", folder / "export" / "latency.json", folder / PLAN
    return RunStory(
        run=run,
        config=latest_config(folder, begun_with=run.config),
        plan=plan,
        shards=TokenShards.read(shards) if plan and shards.exists() else None,
        rows=read_rows(folder / "metrics.jsonl"),
        result=TrainResult.read(result) if result.exists() and not train_failure(result) else None,
        evaluation=EvalReport.read(folder / "eval.json") if (folder / "eval.json").exists() else None,
        latency=LatencyReport.read(latency) if latency.exists() else None,
        model=None if run.config.trainer.given else _registered(folder / "outcome.json"),
        program=TrainerPlan.read(program) if program.exists() else None,
        events=history(folder),
        resumptions=read_resumptions(folder),
        attempts=attempts_of(folder),
        stage_s=json.loads(stages.read_text()) if stages.exists() else {},
        ended=ended,
        preset=preset,
        links=links or {},
    )


def _registered(path: Path) -> RegisteredModel | None:
    """As the run's outcome has it: of a run that is resumed after its end, what it had come to before."""
    if not path.exists():
        return None
    outcome = Outcome.read(path)
    return RegisteredModel(name=outcome.model, version=outcome.version, alias=outcome.alias, verdict=outcome.verdict)
