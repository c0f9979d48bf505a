"""The stages of training as Prefect tasks: each calls a function of tasks/, times it and shows its result."""

from __future__ import annotations

import datetime
import json
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from flows.prefect_ui.artifacts import show_markdown, show_pairs, show_table
from flows.prefect_ui.events import emit, report_refusal
from flows.prefect_ui.links import prefect_page
from flows.prefect_ui.tell import outermost_flow_run
from flows.presets import command_for_all_steps
from flows.servers.alerts import DISK_FILLS, RUN_STUCK
from flows.stages.engine import engine_of
from flows.stages.job_checks import check_job
from flows.stages.stage import stage, timed
from tasks.data import corpus
from tasks.data.estimate import estimate_text
from tasks.display.markdown import escape_markdown
from tasks.display.progress import step_progress, time_progress
from tasks.evaluation import beside
from tasks.evaluation import champion as champion_evaluation
from tasks.evaluation.checks import check_beside, check_prompts, check_tasks
from tasks.evaluation.report import metrics_of, metrics_of_checkpoint, table_of, table_of_checkpoints
from tasks.hardware import measure as machines
from tasks.hardware.doctor import hardware_rows
from tasks.hardware.machine import gpus_here, usable_cores
from tasks.inference.open_engine import open_engine
from tasks.launch import batch_size_trial, check_hosts, nsight, programs
from tasks.launch.local import imports_ahead, kept_node, wait_for_imports
from tasks.launch.recovery import attempts_of
from tasks.launch.slurm_allocation import held_nodes, note_run, run_before_requeue
from tasks.operations import gpu_queue
from tasks.planning import plan as planning
from tasks.planning.counted import counted_by_hosts
from tasks.planning.describe import describe_plan
from tasks.planning.pretrained import check_tokenizer, check_weights
from tasks.promotion.gates import is_refusal
from tasks.promotion.register import register_model
from tasks.registry.models import example_prompt, resolve
from tasks.registry.tags import TAG_CHARS
from tasks.reports.export_latency import (
    describe_precisions,
    draw_latency,
    latency_rows,
    precision_figures,
    precision_rows,
)
from tasks.reports.outcome import against_plan
from tasks.reports.run_report import LATENCY
from tasks.runs import resume
from tasks.runs.resume import Change
from tasks.runs.watch import RunWatch
from tasks.store.runs import RunOnStore, fetch_run, is_on_store, run_url
from tasks.store.uploads import Uploads, check_store
from tasks.tracking import mlflow_run
from tasks.tracking.client import connect, wait_for_store
from tasks.tracking.mlflow_run import TrackedRun
from tasks.workspace.locks import refuse_if_owned
from tasks.workspace.paths import command, home, run_folder, tracking_uri
from training.config.run import RunConfig
from training.records.checkpoint import finished_checkpoints
from training.records.inventory import Inventory
from training.records.left_out import LEFT_OUT_STEPS
from training.records.plan import RunPlan
from training.records.record import write_atomically
from training.records.results import EvalReport, ExportedModel, LatencyReport, PrecisionQuality, RegisteredModel
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.tracking.rows import SAMPLES, read_rows

logger = logging.getLogger(__name__)

ON_STORE = "shardline.store"  # tag: the run's URL
LEFT_OUT = "shardline.left_out"  # tag: what the export lacks, and why
CHECKPOINTS_LEFT_OUT = "eval/checkpoints_left_out"


def choose_run(run_id: str, config: RunConfig, *, force: bool) -> tuple[str, tuple[Change, ...]]:
    """Return the run's ID, new or resumed, and the changes that `config` makes. Raises ValueError for refused ones, for
    a run that is running, and for a new one that cannot work.

    A flow run that Prefect starts again (Retry) resumes the run that it began, and so does a requeued Slurm job.
    """
    if is_on_store(run_id):
        run_id = fetch_run(run_id)
    run_id = run_id or begun_before(config)
    if not run_id:
        check_job(config)
        run_id = new_run_id(config.name)
        note_run(run_id, config)
        return run_id, ()
    run = mlflow_run.read_run(run_id)
    refuse_if_owned(run.folder)
    changes = resume.accepted(run.folder, config, begun_with=run.begun_with, force=force)
    for change in changes:
        logger.warning("resumed with %s", change)
    return run_id, changes


def begun_before(config: RunConfig) -> str:
    """Return the ID of the run that an earlier start of this flow run or Slurm job began; empty if there is none."""
    run_id = mlflow_run.run_begun_by(outermost_flow_run(), config) or run_before_requeue(config)
    if run_id:
        logger.info("this flow run was started again: resuming %s", run_id)
    return run_id


def new_run_id(name: str) -> str:
    """Claim a folder named NAME-YYYYMMDD-HHMMSS, with a number behind it if two runs start in the same second."""
    base = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for run_id in (base, *(f"{base}-{n}" for n in range(2, 1000))):
        try:
            run_folder(run_id).mkdir()
        except FileExistsError:
            continue
        return run_id
    raise RuntimeError(f"1000 runs named {base} in one second")


@stage("Tokenize the corpus")
def tokenize(config: RunConfig, run: TrackedRun) -> tuple[Path, TokenShards]:
    with timed(run, "tokenize"):
        nsight.check_here(config)  # a resume may ask for it
        check_tasks(config)
        check_beside(config)
        check_weights(config)
        check_store(config, run.run_id)
        with engine_of(config.data) as engine:
            folder, shards = corpus.prepare_corpus(
                config.data,
                tokens_home=home() / "tokens",
                objective=config.objective,
                store=config.store,
                engine=engine,
                continued=config.model.init == "pretrained",
            )
        check_tokenizer(config, folder / "tokenizer" / "tokenizer.json")
        if config.evaluation.prompts != "auto":
            check_prompts(folder / "tokenizer", shards.text_encoding, config.evaluation.prompts)
    return folder, shards


@contextmanager
def kept_on_store(config: RunConfig, run: TrackedRun, shards_dir: Path) -> Iterator[None]:
    """Copy shards, checkpoints and records to the store in the background; fetch a checkpoint if none is here."""
    if not config.store.url:
        yield
        return
    url = run_url(config.store, run.run_id)
    connect().set_tag(run.mlflow_run_id, ON_STORE, url)
    if not finished_checkpoints(run.folder):
        RunOnStore(url, run.folder).fetch()
    uploads = Uploads(config, run.folder, shards_dir)
    with uploads:
        yield
    if uploads.behind:
        connect().set_tag(run.mlflow_run_id, ON_STORE, f"{url} ({uploads.behind})")


@contextmanager
def warm_node(config: RunConfig, run: TrackedRun) -> Iterator[None]:
    """Fork the ranks of all stages on this machine from one process, which imports beside the stages before training.

    It opens no GPU.
    """
    ahead = None
    if config.launch.launcher == "local" and not config.trainer.given:
        cores, gpus = usable_cores(), gpus_here()
        ahead = imports_ahead(
            "training.train",
            config.launch,
            host=socket.gethostname(),
            threads=max(1, cores // (config.parallel.asked_ranks or machines.default_ranks(gpus, cores))),
            device_kind="cuda" if gpus else "cpu",
            mlflow_run_id=run.mlflow_run_id,
        )
    with kept_node(run.folder, ahead):
        yield


@contextmanager
def devices(config: RunConfig, run: TrackedRun) -> Iterator[None]:
    """Hold the GPUs that the run will use; while another run has them, a task in Prefect shows which run."""
    with gpu_queue.hold_gpus(config, run_id=run.run_id, wait=partial(wait_for_devices, run)):
        yield


@stage("Wait", run_name="Wait: {holder}")
def wait_for_devices(run: TrackedRun, look: gpu_queue.Look, holder: gpu_queue.Holder) -> None:
    with timed(run, "wait"):
        gpu_queue.wait_for_gpus(look, holder, run_id=run.run_id)


@stage("Check the hardware")
def hardware(config: RunConfig, run: TrackedRun | None = None) -> Inventory:
    """Check and measure this machine, or all hosts of the run. Without a run, Slurm nodes are held only meanwhile."""
    if run is None:
        with held_nodes(config.launch, run_dir=home() / "dry-run"):
            return _inventory(config, home() / "dry-run")
    with timed(run, "hardware"):
        inventory = _inventory(config, run.folder)
    wait_for_store()
    if (report := run.folder / check_hosts.NETWORK).exists():
        mlflow_run.log_files(run, report)
    show_table(hardware_rows(inventory), key="hardware", description="Devices, as measured")
    return inventory


def _inventory(config: RunConfig, folder: Path) -> Inventory:
    if config.launch.launcher != "local":
        folder.mkdir(exist_ok=True)
        with counted_by_hosts(config, run_dir=folder):
            return check_hosts.prepare_hosts(config, run_dir=folder)

    def before_measuring() -> None:
        with time_progress("importing torch; the hardware is measured afterwards"):
            wait_for_imports(folder)

    return machines.check_hardware(home=home(), ranks=config.parallel.asked_ranks, before_measuring=before_measuring)


@stage("Plan the run")
def plan(config: RunConfig, inventory: Inventory) -> RunPlan:
    """Plan without a run: nothing is written."""
    made = planning.plan_run(config, inventory=inventory, text=estimate_text(config) if config.data.given else None)
    check_weights(config)
    show_pairs(describe_plan(made), key="plan", description="The plan")
    return made


@stage("Plan the run")
def write_plan(
    config: RunConfig,
    inventory: Inventory,
    run: TrackedRun,
    *,
    shards: TokenShards,
    shards_dir: Path,
    changes: Sequence[Change] = (),
) -> RunPlan:
    """Write the plan; its config is in force from here on. `changes`: the changes of a resume, from `choose_run`."""
    with timed(run, "plan"):
        made = planning.write_plan(
            config, run=run, inventory=inventory, shards=shards, shards_dir=shards_dir, changes=changes
        )
        made = batch_size_trial.confirmed(made, run=run, inventory=inventory)
    if made.steps == made.steps_in_time < made.config.train.steps and (all_of_it := command_for_all_steps(made.config)):
        logger.info("for all %s steps: %s", f"{made.config.train.steps:,}", all_of_it)
    wait_for_store()
    mlflow_run.log_plan(made, inventory, shards)
    mlflow_run.log_resumptions(run, made.config, resume.read_resumptions(run.folder))
    show_pairs(describe_plan(made), key="plan", description="The plan")
    return made


@stage("Train")
def train(plan: RunPlan, run: TrackedRun) -> TrainResult:
    try:
        with timed(run, "train"), step_progress("training", total=plan.steps) as show, watched(plan, run) as watch:

            def on_row(row: dict[str, float]) -> None:
                watch.add(row)
                show(row)

            result = programs.train(plan, run_dir=run.folder, on_row=on_row)
    finally:  # logs are needed most for a run that failed or was stopped
        mlflow_run.offer_files(run, *sorted((run.folder / "profile").glob("*.json.gz")), folder="profile")
        mlflow_run.offer_files(run, run.folder / LEFT_OUT_STEPS)
        log_attempts(run)
    wait_for_store()
    mlflow_run.log_spikes(run, result)
    figures = {
        "train/samples_per_s": result.samples_per_s,
        "train/tokens_per_s": result.tokens_per_s,
        "train/mfu": result.mfu,
        "train/matmul_share": result.matmul_share,
        "train/device_utilisation": result.device_utilisation,
        "train/peak_memory_gib": result.peak_memory_gib,
        **{f"train/{what}": value for what, value in against_plan(plan, result).items()},
        **{f"train/memory/{what}": value for what, value in result.memory.items()},
    }
    known = {key: value for key, value in figures.items() if value is not None}
    mlflow_run.log_figures(run, known, step=result.step)
    return result


def watched(plan: RunPlan, run: TrackedRun) -> RunWatch:
    """Watch training; emit an event if no step comes for too long, or if the disk will be full before the end."""
    shardline, link = command("shardline"), prefect_page(outermost_flow_run())

    def on_stuck(why: str) -> None:
        logger.warning("training is stuck: %s", why)
        cure = (
            f"logs/ and stacks/ in {run.folder} show where its ranks are; a rank waits for another for at most "
            f"parallel.timeout_s = {plan.config.parallel.timeout_s:g} s; `{shardline} stop {run.run_id}` ends it"
        )
        emit(RUN_STUCK, f"{run.run_id} is stuck", why=why, cure=cure, about=run.run_id, run=run.run_id, link=link)

    def on_disk(why: str) -> None:
        logger.warning("the disk of %s will be full before training ends: %s", run.folder, why)
        title = f"the disk of {run.run_id} will be full before it ends"
        cure = f"make room in {home()}: `{shardline} prune --dry-run` lists old runs and shards"
        emit(DISK_FILLS, title, why=why, cure=cure, about=run.run_id, run=run.run_id, link=link)

    return RunWatch(plan, run.folder, on_stuck=on_stuck, on_disk=on_disk)


def log_attempts(run: TrackedRun) -> None:
    """Record each attempt of a run on Docker hosts: its hosts, its first step, and how it ended."""
    if attempts := attempts_of(run.folder):
        with suppress(OSError):  # a full disk may be the reason why the run ended; an error here must not hide that
            write_atomically(run.folder / "attempts.json", json.dumps(attempts, indent=2))
        mlflow_run.offer_files(run, run.folder / "attempts.json")


@contextmanager
def evaluated_beside(plan: RunPlan, run: TrackedRun) -> Iterator[None]:
    """Evaluate the checkpoints of the training in the block, if the config asks for it; log which were left out."""
    if plan.config.evaluation.checkpoints == "none":
        yield
        return
    sets = beside.held_out_sets(plan)

    def evaluate_one(folder: Path, on_poll: Callable[[], None]) -> None:
        evaluate_checkpoint(int(folder.name), run, partial(beside.measure, folder, plan, sets, on_poll=on_poll))

    work = kept_node(run.folder / beside.WORK)
    with work, beside.checkpoint_evaluator(run.folder, evaluate_one):
        yield
    trained = TrainResult.read(run.folder / "result.json")
    for each in beside.evaluations_of(run.folder):
        if each.own.checkpoint_sha256 == trained.checkpoint_sha256:
            each.own.write(run.folder / "eval.json")  # the next stage finds the last checkpoint measured
    wait_for_store()
    left_out = ", ".join(map(str, steps := beside.steps_left_out(run.folder)))
    mlflow_run.log_figures(run, {CHECKPOINTS_LEFT_OUT: len(steps)}, step=trained.step)
    connect().set_tag(run.mlflow_run_id, "shardline.checkpoints_left_out", left_out[:TAG_CHARS] or "none")
    if left_out:
        logger.warning("checkpoints without an evaluation: %s", left_out)


@stage("Evaluate a checkpoint", run_name="Evaluate checkpoint {step}")
def evaluate_checkpoint(step: int, run: TrackedRun, measure: Callable[[], beside.CheckpointEvaluation]) -> None:
    found = measure()
    wait_for_store()
    left_out = sum(other < step for other in beside.steps_left_out(run.folder))
    mlflow_run.log_figures(run, metrics_of_checkpoint(found) | {CHECKPOINTS_LEFT_OUT: left_out}, step=step)
    found.write(beside.result_path(run.folder, step))  # last, so that what MLflow lacks is measured again
    rows = table_of_checkpoints(beside.evaluations_of(run.folder))
    show_table(rows, key="checkpoints", description="Checkpoints, evaluated beside training")


@stage("Evaluate")
def evaluate(plan: RunPlan, run: TrackedRun) -> EvalReport:
    with timed(run, "evaluate"):
        report = programs.evaluate(plan, run_dir=run.folder)
    wait_for_store()
    mlflow_run.log_figures(run, metrics_of(report), step=report.step)
    mlflow_run.log_files(run, run.folder / "eval.json")
    show_table(table_of(report), key="evaluation", description="Held-out text, by source, and tasks")
    return report


@stage("Export")
def export(plan: RunPlan, run: TrackedRun) -> ExportedModel:
    with timed(run, "export"):
        exported = programs.export(plan, run_dir=run.folder)
    wait_for_store()
    mlflow_run.log_files(run, run.folder / "export" / "export.json")
    connect().set_tag(run.mlflow_run_id, LEFT_OUT, exported.left_out[:TAG_CHARS] or "nothing")
    if exported.skipped:
        show_pairs([*exported.skipped.items()], key="export-left-out", description="Left out of the export")
    latency = run.folder / "export" / "latency.json"
    report = LatencyReport.read(latency) if latency.is_file() else None
    if report:
        show_latency(run, report, exported.parity.precisions)
    if precisions := exported.parity.precisions:
        mlflow_run.log_figures(run, precision_figures(precisions, report), step=exported.step)
        rows = precision_rows(precisions, report)
        about = f"Size, quality and speed by precision. {describe_precisions(exported.parity)}"
        show_table(rows, key="export-precisions", description=about)
    return exported


def show_latency(run: TrackedRun, report: LatencyReport, precisions: Sequence[PrecisionQuality]) -> None:
    """Show the speed of the exported graphs and of torch: a table in Prefect, a chart in MLflow."""
    picture = run.folder / LATENCY
    draw_latency(picture, report, precisions)
    mlflow_run.log_files(run, run.folder / "export" / "latency.json", picture)
    show_table(latency_rows(report), key="export-latency", description=f"Speed of the export on {report.device}")


@stage("Measure the champion on the same text")
def measure_champion(plan: RunPlan, run: TrackedRun, shards: TokenShards) -> None:
    """Evaluate the champion on this run's data if it was registered with other data, as nightly training does."""
    wait_for_store()
    if champion := champion_evaluation.champion_to_measure(plan, shards, tracking_uri=tracking_uri()):
        with timed(run, "champion"):
            champion_evaluation.measure(champion, plan, EvalReport.read(run.folder / "eval.json"))


@stage("Register, and check the gates that need no server and no person")
def register(run: TrackedRun) -> RegisteredModel:
    """Register the model. If its gates need a server or a person, a promotion gives the verdict later."""
    wait_for_store()
    with timed(run, "register"), time_progress("registering the model"):
        model = register_model(run.folder, tracking_uri=tracking_uri())
    if is_refusal(model.verdict):
        report_refusal(model, run=run.run_id, flow_run_id=outermost_flow_run())
    return model


def show_verdict(model: RegisteredModel) -> RegisteredModel:
    """Show the model's verdict in Prefect; return the model. Without a verdict, its text says what it waits for."""
    text = model.verdict or f"waits for approval: `{command('shardline')} promote {model.name}`"
    verdict = f"**{model.name} version {model.version}**, alias `{model.alias or 'none'}`: {escape_markdown(text)}"
    show_markdown(verdict, key="gate", description="The gates' verdict")
    return model.model_copy(update={"verdict": text})


@stage("Generate from the registered model")
def generate(plan: RunPlan, run: TrackedRun, model: RegisteredModel) -> str:
    """Return text of the version, as `shardline generate` makes it.

    If no engine can open it on this machine, return the newest sample of its training; "" if there is none.
    """
    if plan.config.objective == "masked":
        return ""
    wanted = plan.config.evaluation
    with timed(run, "generate"), time_progress("generating from the registered model"):
        resolved = resolve(f"{model.name}/{model.version}", tracking_uri=tracking_uri(), cache_dir=home() / "models")
        prompt = example_prompt(resolved.records_dir)
        try:
            with closing(open_engine(resolved.export_dir)) as engine:
                return prompt + engine.generate(
                    prompt,
                    new_tokens=wanted.sample_tokens,
                    temperature=wanted.temperature,
                    seed=plan.config.train.seed,
                )
        except (ValueError, RuntimeError) as error:
            logger.warning("%s/%d is registered, but made no text here: %s", model.name, model.version, error)
    newest = next(reversed(read_rows(run.folder / SAMPLES)), {"prompt": "", "text": ""})
    return str(newest["prompt"] + newest["text"])
