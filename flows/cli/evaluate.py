"""`shardline evaluate`: figures, tasks and samples of any checkpoint, registered version or Hugging Face folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from flows.cli.tables import print_table


def add_evaluate_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    about = "exact figures by source, and tasks, of any checkpoint, registered version or Hugging Face folder"
    evaluate = command("evaluate", _evaluate, about)
    evaluate.add_argument(
        "what", metavar="WHAT", help="RUN, runs/RUN/checkpoints/STEP, MODEL@alias, MODEL/3, or a folder"
    )
    about = "for example inference.parallel=tensor inference.degree=2 evaluation.few_shot=5 data.text_unit=line"
    evaluate.add_argument("overrides", metavar="section.field=value", nargs="*", default=[], help=about)
    evaluate.add_argument("--data", metavar="PATH", help="text to evaluate on (default: the run's own held-out text)")
    evaluate.add_argument(
        "--tasks", metavar="TASK,…", help="names of lm-evaluation-harness, or paths of YAML files or folders"
    )
    evaluate.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _evaluate(options: argparse.Namespace) -> None:
    from flows.presets import evaluate_config
    from tasks.evaluation.evaluate import evaluate, find_subject
    from tasks.evaluation.report import log_to_mlflow, table_of

    subject = find_subject(options.what)
    evaluation = subject.plan.config.evaluation.model_dump() if subject.plan else {"prompts": ()}
    if options.tasks is not None:
        given = [name for name in options.tasks.split(",") if name]
        files = [name for name in given if "/" in name or name.endswith((".yaml", ".yml"))]
        evaluation |= {"tasks": [name for name in given if name not in files], "task_files": files}
    data = {"path": options.data} if options.data else {}
    config = evaluate_config({"evaluation": evaluation, "data": data}, options.overrides)
    report = evaluate(subject, data=config.data, evaluation=config.evaluation, inference=config.inference)
    mlflow_run_id = log_to_mlflow(report, subject, text=config.data.path)
    if options.json:
        told = {"what": options.what, "model": str(subject.folder), "mlflow_run_id": mlflow_run_id}
        print(json.dumps(told | report.model_dump(mode="json")))
        return
    rows = table_of(report)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    for sample in report.samples:
        print(f"\n{sample.prompt}{sample.text}")
