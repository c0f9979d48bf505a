"""`shardline lineage|evaluate|generate|serve|triton`: the commands that use a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_json, add_overrides
from flows.cli.tables import print_pairs, print_table

ROWS_AT_A_TIME = 16  # prompts that ONNX Runtime completes at the same time; the torch engine has its own number


def add_model_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands above. `command` adds one to the parser, as in flows/cli/command.py."""
    _add_evaluate_command(command)
    lineage = command(
        "lineage", _lineage, "show the run, code, data and checkpoint that a model version was made from", "MODEL@ALIAS"
    )
    add_json(lineage)
    about = "print text from a registered model, or complete a file of prompts (--prompts, --out)"
    generate = command("generate", _generate, about, "MODEL@ALIAS")
    generate.add_argument("prompt", metavar="PROMPT", nargs="?", default="")
    generate.add_argument("--prompts", metavar="FILE.jsonl", type=Path, help='JSON lines, each with a "prompt"')
    generate.add_argument("--out", metavar="FILE.jsonl", type=Path, help="file for the completions, in the same order")
    generate.add_argument("--tokens", type=int, default=100)
    generate.add_argument("--temperature", type=float, default=0.8)
    generate.add_argument("--top-k", type=int, default=50)
    generate.add_argument("--seed", type=int, default=1337)
    serve = command(
        "serve",
        _serve,
        "serve a registered model over HTTP; switch when its alias moves to another version",
        "MODEL@ALIAS",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    about = "let everybody who reaches --host use the model, without serving.token_file"
    serve.add_argument("--without-tokens", action="store_true", help=about)
    serve.add_argument("--port", type=int, default=8000)
    about = "server processes behind the port, rolled one after another (default: 1)"
    serve.add_argument("--replicas", type=int, default=1, metavar="N", help=about)
    serve.add_argument("--stop-with-parent", action="store_true", help="stop when the process that started it ends")
    for added in (generate, serve):
        help = "inference.field=value" + (", serving.field=value" if added is serve else "")
        added.add_argument("overrides", nargs="*", metavar="section.field=value", help=help)

    about = "write a Triton model repository from a registered model or an export folder"
    command("triton", _triton, about, "MODEL@ALIAS", "DIR")


def _add_evaluate_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    about = "measure any checkpoint, registered version or Hugging Face folder: loss on each source, scores of tasks"
    evaluate = command("evaluate", _evaluate, about)
    evaluate.add_argument(
        "what", metavar="WHAT", help="RUN, runs/RUN/checkpoints/STEP, MODEL@alias, MODEL/3, or a folder"
    )
    add_overrides(
        evaluate, "for example inference.parallel=tensor inference.degree=2 evaluation.few_shot=5 data.text_unit=line"
    )
    evaluate.add_argument("--data", metavar="PATH", help="text to evaluate on (default: the run's own held-out text)")
    evaluate.add_argument(
        "--tasks", metavar="TASK,…", help="names of lm-evaluation-harness, or paths of YAML files or folders"
    )
    add_json(evaluate)


def _lineage(options: argparse.Namespace) -> None:
    from tasks.registry.models import lineage
    from tasks.workspace.paths import home, tracking_uri

    found = lineage(options.model, tracking_uri=tracking_uri(), cache_dir=home() / "models")
    if options.json:
        print(json.dumps(found))
        return
    from tasks.runs.folder import flattened

    print_pairs(f"where {options.model} comes from", [(key, str(value)) for key, value in flattened(found)])


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
    mlflow_run_id = log_to_mlflow(report, subject, text=config.data.described)
    if options.json:
        heading = {"what": options.what, "model": str(subject.folder), "mlflow_run_id": mlflow_run_id}
        print(json.dumps(heading | report.model_dump(mode="json")))
        return
    rows = table_of(report)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    for sample in report.samples:
        print(f"\n{sample.prompt}{sample.text}")


def _generate(options: argparse.Namespace) -> int:
    from flows.presets import serve_config
    from tasks.inference.open_engine import open_engine
    from tasks.registry.models import resolve
    from tasks.workspace.paths import home, tracking_uri

    if options.prompts is not None and options.prompt:  # argparse puts the first override into `prompt`
        options.overrides.insert(0, options.prompt)
    inference = serve_config(options.overrides).inference
    model = resolve(options.model, tracking_uri=tracking_uri(), cache_dir=home() / "models")
    sampling = {
        "new_tokens": options.tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "seed": options.seed,
    }
    if options.prompts is not None:
        opened = partial(open_engine, model.export_dir, inference, rows=ROWS_AT_A_TIME)
        return _generate_file(options, opened, model, sampling)
    engine = open_engine(model.export_dir, inference)
    try:
        print(options.prompt, end="", flush=True)
        for piece in engine.stream(options.prompt, **sampling):
            print(piece, end="", flush=True)
        print()
    finally:
        engine.close()
    return 0


def _generate_file(options: argparse.Namespace, opened: Any, model: Any, sampling: dict[str, Any]) -> int:
    """Complete a file of prompts. The exit code is 1 if a row has an error, which its row in the output gives."""
    from tasks.display.progress import row_progress
    from tasks.inference.prompts_file import generate_file
    from training.records.words import counted, format_duration

    if options.out is None:
        raise ValueError("--prompts needs --out FILE.jsonl, where the completions go")
    name = f"{model.name} version {model.version}"
    with row_progress(f"completing {options.prompts.name}") as show:
        made = generate_file(opened, options.prompts, options.out, sampling=sampling, model=name, show=show)
    print(
        f"{options.out}: {counted(made.rows, 'completion')} by {name}, {made.failed:,} with an error; {made.made:,} "
        f"made now, {counted(made.tokens, 'token')} in {format_duration(made.seconds)} "
        f"({made.tokens_per_s:,.0f} tokens/s)"
    )
    return 1 if made.failed else 0


def _serve(options: argparse.Namespace) -> None:
    from tasks.workspace.processes import stop_with_parent

    if options.stop_with_parent:  # first: the imports below take seconds, and the parent may be killed meanwhile
        stop_with_parent()
    from flows.presets import serve_config
    from tasks.serving.listener import is_loopback
    from tasks.workspace.paths import home, tracking_uri

    config = serve_config(options.overrides)
    asked: dict[str, Any] = {
        "host": options.host,
        "port": options.port,
        "tracking_uri": tracking_uri(),
        "cache_dir": home() / "models",
        "servers_dir": home() / "servers",
        "config": config,
    }
    if options.replicas < 1:
        raise ValueError(f"--replicas {options.replicas}: at least one process must serve")
    if not (is_loopback(options.host) or config.serving.token_file or options.without_tokens):
        raise ValueError(
            f"--host {options.host}: everybody who reaches this machine could use the model: name the accepted tokens "
            "(serving.token_file=FILE), or say --without-tokens"
        )
    if options.replicas > 1:
        from tasks.serving.replicas import serve_by_replicas

        serve_by_replicas(options.model, replicas=options.replicas, **asked)
    else:
        from tasks.serving.server import serve

        serve(options.model, **asked)


def _triton(options: argparse.Namespace) -> None:
    from tasks.registry.models import resolve
    from tasks.serving.triton import write_repository
    from tasks.workspace.paths import home, tracking_uri

    export_dir, name, version = Path(options.model), Path(options.model).resolve().parent.name, 1
    if not export_dir.is_dir():
        model = resolve(options.model, tracking_uri=tracking_uri(), cache_dir=home() / "models")
        export_dir, name, version = model.export_dir, model.name, model.version
    for folder in write_repository(export_dir, Path(options.dir), name=name, version=version):
        print(folder)
