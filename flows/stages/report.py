"""The report of a run: its outcome in one record, and its page, also for a run that failed or was stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.runtime import flow_run

from flows.prefect_ui.artifacts import as_picture, show_markdown, show_pairs
from flows.prefect_ui.links import mlflow_page, open_mlflow, prefect_page
from flows.presets import preset_of, presets
from flows.stages.stage import stage, stage_seconds
from tasks.display.markdown import escape_markdown
from tasks.planning.price import COST
from tasks.reports.outcome import Outcome, against_plan, outcome_rows
from tasks.reports.pictures import draw_summary
from tasks.reports.run_data import RunData, read_run_data
from tasks.reports.run_report import CURVES, PAGE, write_report
from tasks.reports.run_summary import summary
from tasks.tracking import client, mlflow_run
from tasks.tracking.mlflow_run import TrackedRun
from tasks.workspace.paths import command, run_folder, tracking_uri
from training.records.plan import RunPlan
from training.records.results import EvalReport, ExportedModel, RegisteredModel
from training.records.train_result import TrainResult
from training.tracking.redaction import without_credentials

logger = logging.getLogger(__name__)


@contextmanager
def reported(run_id: str) -> Iterator[None]:
    """Write the page of a run when it ends, however it ends; if that fails, only a warning is logged.

    Use it around `tracked`, so that the run's final status is known first.
    """
    ended = ""
    try:
        yield
    except BaseException as error:
        ended = without_credentials(str(error), uri=tracking_uri()) or type(error).__name__
        raise
    finally:
        try:
            if (run_folder(run_id) / "run.json").exists():  # else the run was refused before it began
                write_page(run_id, ended=ended)
        except Exception as error:
            if str(error) != ended:  # which is said already
                logger.warning("could not write the report page of %s (%s)", run_id, error)


def write_page(run_id: str, *, ended: str, flow_run_id: str = "") -> None:
    """Write the page and the run's cost into the run's folder, MLflow and Prefect.

    `flow_run_id`: the run's; default this flow run.
    """
    run, of = mlflow_run.read_run(run_id), flow_run_id or str(flow_run.id or "")
    links = {"MLflow": mlflow_page(run) or open_mlflow()} | ({"Prefect": prefect_page(of) or of} if of else {})
    name = preset_of(run.begun_with)
    preset = presets()[name] | {"preset": run.begun_with.preset} if name else None
    data = read_run_data(run, stop_reason=ended, preset=preset, links=links)
    data.cost.write(run.folder / COST)
    written = write_report(data)
    logger.info("report: %s", run.folder / PAGE)
    _show(data, drawn=run.folder / CURVES in written, flow_run_id=flow_run_id)
    mlflow_run.log_files(run, *written)
    mlflow_run.log_figures(run, data.cost.figures(), step=data.step)
    mlflow_run.describe(run, "\n\n".join([escape_markdown(" ".join(summary(data))), *_link_to_prefect(data)]))


def _link_to_prefect(data: RunData) -> list[str]:
    url = data.links.get("Prefect", "")
    return [f"[Prefect's page of the run]({url})"] if url.startswith("http") else []


def _show(data: RunData, *, drawn: bool, flow_run_id: str) -> None:
    """Show the report's sentences and curves in Prefect, which shows no HTML, and a link to the page."""
    run, page = data.run, mlflow_page(data.run, tab=f"/artifacts/{PAGE}")
    where = f"[The whole report]({page}), in MLflow" if page else f"The whole report: `{run.folder / PAGE}`"
    parts = [escape_markdown(" ".join(summary(data))), where]
    parts += [as_picture(run.folder / CURVES, alt="loss, learning rate, throughput and memory")] if drawn else []
    show_markdown("\n\n".join(parts), key="report", description=f"Report of {run.run_id}", flow_run_id=flow_run_id)


@stage("Report")
def report(plan: RunPlan, run: TrackedRun, model: RegisteredModel, *, generated: str) -> Outcome:
    result = TrainResult.read(run.folder / "result.json")
    evaluation = EvalReport.read(run.folder / "eval.json")
    seconds = stage_seconds(run)
    draw_summary(
        run.folder / "summary.png",
        plan=plan,
        run_dir=run.folder,
        result=result,
        report=evaluation,
        exported=ExportedModel.read(run.folder / "export" / "export.json"),
        model=model,
        stage_s=seconds,
    )
    client.wait_for_store()
    mlflow_run.log_files(run, run.folder / "summary.png")
    outcome = Outcome(
        run_id=run.run_id,
        mlflow_run_id=run.mlflow_run_id,
        step=result.step,
        val_loss=evaluation.loss,
        bits_per_byte=evaluation.bits_per_byte,
        accuracy=evaluation.accuracy,
        tokens_per_s=result.tokens_per_s,
        samples_per_s=result.samples_per_s,
        mfu=result.mfu,
        matmul_share=result.matmul_share,
        peak_memory_gib=result.peak_memory_gib,
        against_plan=against_plan(plan, result),
        checkpoint=str(run.folder / result.checkpoint),
        model=model.name,
        version=model.version,
        alias=model.alias,
        verdict=model.verdict,
        generated=generated,
        stage_s=seconds,
        spent=read_run_data(run).cost,
        open_mlflow=open_mlflow(),
        serve=""
        if plan.config.objective == "masked"
        else f"{command('shardline')} serve {model.name}@{model.alias or 'champion'}",
    )
    outcome.write(run.folder / "outcome.json")
    show_pairs(outcome_rows(outcome), key="outcome", description="Results of the run")
    return outcome
