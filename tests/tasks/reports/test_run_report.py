"""report.html of runs that finished, failed, were stopped or never started."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tasks.display.numbers import format_count
from tasks.launch.failure import AttemptOutcome
from tasks.launch.recovery import AttemptRecord
from tasks.planning.custom_program import CustomProgramOutcome, plan_custom_program
from tasks.planning.price import RunCost
from tasks.reports.export_latency import draw_latency
from tasks.reports.outcome import Outcome
from tasks.reports.pictures import thinned
from tasks.reports.run_data import read_run_data
from tasks.reports.run_report import write_report
from tasks.runs.history import history, note_end, note_start
from tasks.tracking.mlflow_run import TrackedRun
from tests.support.configs import inventory, read_plan
from tests.support.tiny_run import another_run
from training.config.run import RunConfig
from training.records.results import EvalReport, ExportedModel, LatencyReport, Sample
from training.records.train_result import TrainFailure, TrainResult

HOSTILE = "</pre><script>alert('x')</script><img src=http://evil.example/x.png>"


@pytest.fixture
def run(exported_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackedRun:
    """A finished run of 8 steps."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    folder = another_run(exported_run, tmp_path / "tiny-1", mlflow_run_id="m" * 32, loss=5.5)
    plan = read_plan(folder)
    run = TrackedRun(run_id="tiny-1", mlflow_run_id="m" * 32, experiment_id="1", begun_with=plan.config)
    run.write(folder / "run.json")
    write_rows(folder, steps=8)
    (folder / "stages.json").write_text(json.dumps({"train": 1800.0, "evaluate": 360.0, "export": 36.0}))
    note_start(folder, commit="f" * 40)
    return run


def write_rows(folder: Path, *, steps: int) -> None:
    rows = [
        {"step": step, "time_ms": step, "loss": 6 - step / steps, "learning_rate": 1e-3, "tokens_per_s": 900.0,
         "tokens": 256 * step, "memory/resident_gib": 0.1}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def page_of(run: TrackedRun, **more: Any) -> str:
    write_report(read_run_data(run, **more))
    return (run.folder / "report.html").read_text()


def words(page: str) -> str:
    """The page's text as a reader sees it."""
    return re.sub(
        r"\s+", " ", unescape(re.sub(r"<(style|img)[^>]*>(.*?</style>)?|<[^>]+>", " ", page, flags=re.DOTALL))
    )


def test_the_summary_says_what_was_trained_how_good_how_fast_and_where_it_is_registered(run: TrackedRun) -> None:
    plan = read_plan(run.folder)
    note_end(run.folder, status="FINISHED", cause="done", why="")
    page = words(page_of(run, links={"MLflow": "http://127.0.0.1:5000/#/runs/1"}))
    top = page.partition("Evaluation")[0]
    assert "MLflow http://127.0.0.1:5000/#/runs/1" in top
    assert f"{format_count(plan.shape.parameters)} parameters" in top
    assert "8 of 8 steps on 2.05 k tokens of stdlib" in top
    assert "loss is 5.500 nats per token" in top
    assert "1 CPU rank (single, fp32) at 1,000 tokens/s" in top
    assert "0.61 CPU rank hours" in top, "0.5 of training, 0.1 of evaluation, 0.01 of export"
    assert "The run finished without an interruption" in top
    left_out = ExportedModel.read(run.folder / "export" / "export.json").skipped
    table = page.partition("Left out of the export what why")[2]
    assert all(f"{what} {why}" in table for what, why in left_out.items())
    assert re.search(r"These perplexities are at [1-9][\d,]* held-out positions, the sample", page)
    assert "cost" not in top, "there are no prices"
    measured, predicted = 256.0, plan.predicted.step_ms
    assert f"time of a step {predicted:,.1f} ms {measured:,.1f} ms {measured / predicted - 1:+.0%}" in page


def test_the_cost_is_that_of_all_stages_and_per_token_that_of_training(run: TrackedRun) -> None:
    read_plan(run.folder).model_copy(update={"price_per_hour": 2.0}).write(run.folder / "plan.json")
    tokens = TrainResult.read(run.folder / "result.json").tokens
    page = words(page_of(run))
    assert f"hours together, which cost 1.22 USD; training cost {1e9 / tokens:,.2f} USD per 1B tokens" in page
    for row in ("training 0.5 CPU rank hours 1.00 USD", "export 0.01 CPU rank hours 0.02 USD",
                "total 0.61 CPU rank hours 1.22 USD", f"per 1B tokens {5e8 / tokens:,.0f} CPU rank hours"):  # fmt: skip
        assert row in page


def test_each_attempt_costs_what_its_hosts_cost(run: TrackedRun) -> None:
    """Half an hour on 2 + 1 devices at 5 an hour in all, then as long on the 2 that are left, at 2."""
    plan = read_plan(run.folder)
    before = {"hosts": ("near", "far"), "ranks_per_host": (2, 1), "price_per_hour": 5.0}
    plan.model_copy(update=before).write(run.folder / "plan-1.json")
    now = plan.model_copy(update={"hosts": ("near",), "ranks_per_host": (2,), "price_per_hour": 2.0})
    now.write(run.folder / "plan.json")
    (run.folder / "stages.json").write_text("{}")
    for number, hosts in (("1", {"near": 2, "far": 1}), ("2", {"near": 2})):
        AttemptRecord(
            number=int(number), program="training.train", hosts=hosts, from_step=0,
            began_at=f"2026-11-23T0{number}:00:00+00:00", ended_at=f"2026-11-23T0{number}:30:00+00:00",
            ending=AttemptOutcome(cause="lost host"),
        ).write(run.folder / "attempts" / number / "attempt.json")  # fmt: skip
    spent = read_run_data(run).cost
    assert (spent.device_hours, spent.cost) == ({"training": 2.5}, {"training": 3.5})
    (run.folder / "plan-1.json").unlink()
    assert read_run_data(run).cost.cost is None, "what the lost host cost is not known any more"


def test_the_page_lists_settings_that_differ_and_the_lineage(run: TrackedRun) -> None:
    preset = run.begun_with.model_dump() | {"train": run.begun_with.train.model_dump() | {"steps": 9}}
    page = words(page_of(run, preset=preset, links={"MLflow": "http://127.0.0.1:5000/#/runs/1"}))
    assert "Settings that differ from its preset: train.steps = 8, not 9." in page
    assert "train.global_batch 8 16" in page
    result = TrainResult.read(run.folder / "result.json")
    for known in ("f" * 40, result.checkpoint_sha256, "a" * 64, "m" * 32, "http://127.0.0.1:5000/#/runs/1"):
        assert known in page
    assert "resume tiny-1 train.steps=16" in page
    assert "reproduce tiny-1" in page


def test_the_page_says_what_of_the_text_is_not_in_the_tokens(run: TrackedRun) -> None:
    data = read_run_data(run)
    assert data.shards is not None
    lost = {"characters": 1000, "lost_characters": 30, "unknown_tokens": 30, "special_as_text": 4, "skipped": 2}
    write_report(replace(data, shards=data.shards.model_copy(update=lost)))
    page = words((run.folder / "report.html").read_text())
    assert "not in the tokens 3.00% of the characters (30 of 1,000) are lost" in page
    assert "not in the tokens skipped 2 documents" in page
    assert "special tokens holds 4 strings that are special tokens of the tokenizer: 0 became" in page


def test_the_page_is_one_file_and_escapes_every_value(run: TrackedRun) -> None:
    evaluation = EvalReport.read(run.folder / "eval.json")
    samples = (Sample(prompt=HOSTILE, text="half a character \ufffd"),)
    evaluation.model_copy(update={"samples": samples}).write(run.folder / "eval.json")
    plan = read_plan(run.folder)
    data = plan.config.data.model_copy(update={"path": HOSTILE})
    plan.model_copy(update={"config": plan.config.model_copy(update={"data": data})}).write(run.folder / "plan.json")
    page = page_of(run, stop_reason=HOSTILE, links={HOSTILE: f"https://x/'\"><script>{HOSTILE}"})
    assert page.count(HOSTILE) == 0
    assert "<script" not in page
    assert re.findall(r"<img[^>]*src=\"(?!data:image/png;base64,)", page) == []
    assert words(page).count(HOSTILE) > 3, "it is all there to be read"


def test_a_run_that_failed_says_why_and_how_to_go_on(run: TrackedRun) -> None:
    for record in ("eval.json", "result.json"):
        (run.folder / record).unlink()
    failure = TrainFailure(step=4, checkpoint="checkpoints/00000004", stopped_by="out of memory", detail="rank 0")
    failure.write(run.folder / "result.json")
    write_rows(run.folder, steps=5)
    note_end(run.folder, status="FAILED", cause="out of memory", why="rank 0 ran out of memory")
    error = "rank 0 ran out of memory. Cure: lower train.micro_batch\nlast line of its log"
    page = words(page_of(run, stop_reason=error))
    assert "5 of 8 steps" in page
    assert "The run did not finish: rank 0 ran out of memory. Cure: lower train.micro_batch" in page
    assert "last line of its log" in page
    assert re.search(r"resume the run \S+ resume tiny-1 ", page)
    assert re.search(r"failed step \d+ rank 0 ran out of memory", page)


def test_a_run_that_was_refused_before_it_had_a_plan_has_a_page_too(run: TrackedRun) -> None:
    for record in run.folder.glob("*.json*"):
        if record.name not in {"run.json", "history.json"}:
            record.unlink()
    page = words(page_of(run, stop_reason="data.path is empty"))
    assert "it has no plan yet" in page
    assert "data.path is empty" in page


def test_a_users_own_program_has_a_page(run: TrackedRun) -> None:
    for record in run.folder.glob("*.json*"):
        if record.name not in {"run.json", "history.json", "stages.json"}:
            record.unlink()
    config = RunConfig.model_validate({"name": "mine", "trainer": {"script": "my.py", "args": ["--steps", "9"]}})
    run = run.model_copy(update={"begun_with": config})
    machine = inventory(2, kind="cuda")
    plan_custom_program(config, machine, run_id=run.run_id, mlflow_run_id=run.mlflow_run_id, experiment=("1", "mine"))
    CustomProgramOutcome(
        run_id=run.run_id, mlflow_run_id=run.mlflow_run_id, program="my.py", args=(), hosts={"host0": 2}, attempts=1,
        skipped=("plan",), stage_s={}, open_mlflow="",
    ).write(run.folder / "outcome.json")  # fmt: skip
    note_end(run.folder, status="FINISHED", cause="done", why="")
    page = words(page_of(run))
    assert "mine ran the user's training program my.py --steps 9 on 2 GPUs (2 on host0)." in page
    assert "The run finished without an interruption." in page
    assert "training 1 GPU hours" in page
    assert "Next commands" not in page, "a finished program of the user's has nothing to resume"
    assert "my.py --steps 9" in words(page_of(run, stop_reason="exit code 3"))
    assert "resume tiny-1" in words(page_of(run, stop_reason="exit code 3"))


def test_the_speed_of_the_exported_model_is_on_the_page(run: TrackedRun) -> None:
    figures = {"graph": "forward", "precision": "fp32", "batch": 1, "length": 8, "rounds": 9, "tokens_per_s": 4000.0}
    pair = [figures | {"engine": name, "median_ms": ms} for name, ms in (("torch", 2.0), ("onnxruntime-cpu", 0.5))]
    LatencyReport.model_validate({"device": "a CPU", "figures": pair, "seconds": 1.0}).write(
        run.folder / "export" / "latency.json"
    )
    draw_latency(run.folder / "export-latency.png", LatencyReport.read(run.folder / "export" / "latency.json"))
    page = page_of(run)
    assert "Speed of the exported model on a CPU" in words(page)
    assert re.search(r"forward 1 8 onnxruntime-cpu fp32 0\.500 [\d,]+ 4\.00", words(page))
    assert page.count('src="data:image/png;base64,') == 2


def test_stops_kills_and_resumes_are_listed_in_order(run: TrackedRun) -> None:
    note_end(run.folder, status="KILLED", cause="stopped", why="stopped by Ctrl-C")
    note_start(run.folder, commit="e" * 40)
    note_end(run.folder, status="KILLED", cause="killed", why="its process was killed")
    note_start(run.folder, commit="e" * 40)
    note_end(run.folder, status="FINISHED", cause="done", why="")
    assert [event.what for event in history(run.folder)] == ["begun", "stopped", "resumed", "killed", "resumed", "done"]
    page = words(page_of(run))
    assert "The run was stopped after step 8, killed after step 8, and resumed." in page
    assert f"commit {'f' * 40}, then {'e' * 40}" in page


def test_a_long_run_has_a_page_of_the_same_size_that_shows_its_extremes(run: TrackedRun) -> None:
    page_of(run)
    short = (run.folder / "report.html").stat().st_size
    write_rows(run.folder, steps=20_000)
    page_of(run)
    assert (run.folder / "report.html").stat().st_size < 2 * short
    points = [(float(step), 1.0) for step in range(10_000)]
    points[777] = (777.0, 50.0)
    lowest, means, highest = thinned(points)
    assert len(means) == 500
    assert max(value for _, value in highest) == 50.0
    assert {value for _, value in lowest} == {1.0}


def test_the_registered_version_is_read_from_the_outcome(run: TrackedRun) -> None:
    known = dict.fromkeys(Outcome.model_fields, "") | {
        "step": 8, "val_loss": 5.5, "bits_per_byte": None, "accuracy": 0.1, "tokens_per_s": 1.0, "samples_per_s": 1.0,
        "mfu": None, "matmul_share": None, "peak_memory_gib": 0.1, "against_plan": {}, "version": 3, "model": "verses",
        "alias": "champion", "verdict": "all gates held", "stage_s": {},
        "spent": RunCost(device_hours={}, cost=None, currency="USD", tokens=0),
    }  # fmt: skip
    Outcome.model_validate(known).write(run.folder / "outcome.json")
    page = words(page_of(run))
    assert "The model is version 3 of verses in the registry, with the alias champion (all gates held)." in page
    assert "serve verses@champion" in page
