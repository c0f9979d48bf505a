"""Evaluate any checkpoint, any registered version, any Hugging Face folder; on any text, over any number of ranks.

A folder of its own under SHARDLINE_HOME/evaluations holds the plan, the log and eval.json of each evaluation.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tasks.data.corpus import prepare_corpus
from tasks.hardware.machine import device_kind_of, usable_cores
from tasks.inference.onnx_generator import encode_prompt
from tasks.launch import local
from tasks.registry.models import ResolvedModel, resolve
from tasks.workspace.paths import command, home, tracking_uri
from training.config.data import DataConfig, TokenizerConfig
from training.config.evaluation import EvaluationConfig
from training.config.launch import LaunchConfig
from training.config.model import ModelConfig
from training.config.run import ProfileConfig, RunConfig
from training.config.serving import InferenceConfig
from training.planner.inference import check_inference
from training.planner.model_shape import MASKED_TYPES, shape_of_hf
from training.records.plan import Prediction, RunPlan
from training.records.record import sha256_file
from training.records.results import EvalReport, EvaluationJob
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult

logger = logging.getLogger(__name__)

NOTHING = Prediction(
    memory_gib={},
    step_s={},
    exposed_communication_s=0,
    flops_per_token=0,
    peak_tflops=0,
    mfu=None,
    tokens_per_s=0,
    train_s=0,
    checkpoint_gib=0,
)
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
CONTEXT = 1024  # tokens in a sequence of a model that no run of ours trained, unless it has fewer positions
MICRO_BATCH = 4


@dataclass(frozen=True)
class Subject:
    """What is evaluated. `folder`: Hugging Face layout; `tokenizer`: a folder; `plan`: of the run that made it."""

    what: str
    folder: Path
    tokenizer: Path
    step: int
    sha256: str
    plan: RunPlan | None
    version: ResolvedModel | None = None


def find_subject(what: str) -> Subject:
    """A run's last checkpoint (ID, runs/ID), one by its path (runs/ID/checkpoints/STEP), a registered version
    (NAME@alias, NAME/3), or a folder with a config.json. Raises ValueError, with the cure.
    """
    path = Path(what).expanduser()
    run_dir = next((d for d in (path, home() / what) if (d / "plan.json").exists()), None)
    if run_dir is not None:
        return _last_checkpoint(what, run_dir.resolve())
    if (path / "config.json").exists():
        path = path.resolve()
        run_dir = path.parent.parent
        if (path / "manifest.json").exists() and (run_dir / "plan.json").exists():
            return _checkpoint(what, path, run_dir)
        return Subject(what, path, path, step=0, sha256=_hash_of_weights(path), plan=None)
    if path.exists():
        raise ValueError(
            f"{what} has neither a plan.json (a run) nor a config.json (a checkpoint or Hugging Face folder): give "
            "one of them, or a registered version as NAME@alias or NAME/3"
        )
    version = resolve(what, tracking_uri=tracking_uri(), cache_dir=home() / "models")
    records = version.records_dir
    result = TrainResult.read(records / "result.json")
    return Subject(
        what,
        version.export_dir,
        version.export_dir,
        step=result.step,
        sha256=result.checkpoint_sha256,
        plan=RunPlan.read(records / "plan.json"),
        version=version,
    )


def _last_checkpoint(what: str, run_dir: Path) -> Subject:
    if not (run_dir / "result.json").exists():
        found = ", ".join(sorted(path.name for path in (run_dir / "checkpoints").glob("[0-9]*"))) or "none yet"
        raise ValueError(f"{what} is not trained to its end: name a checkpoint, {run_dir}/checkpoints/STEP ({found})")
    return _checkpoint(what, run_dir / TrainResult.read(run_dir / "result.json").checkpoint, run_dir)


def _checkpoint(what: str, folder: Path, run_dir: Path) -> Subject:
    plan, manifest = RunPlan.read(run_dir / "plan.json"), folder / "manifest.json"
    step = int(json.loads(manifest.read_bytes())["step"])
    tokenizer = Path(plan.shards_dir) / "tokenizer"
    return Subject(what, folder, tokenizer, step=step, sha256=sha256_file(manifest), plan=plan)


def _hash_of_weights(folder: Path) -> str:
    """1 s per 1-2 GB."""
    files = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise ValueError(f"{folder} has no weights (looked for {', '.join(WEIGHTS)}): give a model's whole folder")
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()


def evaluate(
    subject: Subject,
    *,
    data: DataConfig,
    evaluation: EvaluationConfig,
    inference: InferenceConfig,
    held_out_of: RunPlan | None = None,
) -> EvalReport:
    """Exact figures, by source, on `data`, tasks and samples.

    Where `data` has no path: on the held-out split of the run `held_out_of`, by default the run that made the model.

    Raises ValueError for what cannot be had, RuntimeError with the log's last lines if a rank fails.
    """
    if inference.engine not in {"auto", "torch"}:
        raise ValueError(f"inference.engine = {inference.engine}: evaluation runs torch, leave it out")
    check_inference(subject.folder, inference)
    shards_dir, shards = _tokens(subject, data, held_out_of=held_out_of or subject.plan)
    plan = _plan(subject, shards_dir, shards, evaluation=evaluation, inference=inference)
    check_tasks(plan.config)
    folder = _new_folder(subject.what)
    plan = plan.model_copy(update={"run_id": folder.name})
    plan.write(folder / "plan.json")
    job = EvaluationJob(model=str(subject.folder), step=subject.step, checkpoint_sha256=subject.sha256)
    job.write(folder / "evaluate.json")
    logger.info("evaluating %s on %d ranks, in %s", subject.what, inference.degree, folder)
    local.run_program("training.evaluate", plan=plan, run_dir=folder)
    return EvalReport.read(folder / "eval.json")


def _new_folder(what: str) -> Path:
    name = re.sub(r"[^\w.-]+", "-", what).strip("-")[-40:]
    folder = home() / "evaluations" / f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}-{name}"
    folder.mkdir(parents=True)
    return folder


def _tokens(subject: Subject, data: DataConfig, *, held_out_of: RunPlan | None) -> tuple[Path, TokenShards]:
    """A run's own shards, or `data` as the model's own tokenizer has it, all of it held out."""
    if data.path:
        tokenizer = TokenizerConfig(kind="pretrained", path=str(subject.tokenizer))
        text = data.model_copy(update={"tokenizer": tokenizer, "split": "all"})
        objective = _objective(subject)
        return prepare_corpus(text, tokens_home=home() / "tokens", objective=objective)
    if held_out_of is None:
        raise ValueError(f"{subject.what} is of no run, so there is no held-out text of its own: give --data PATH")
    folder = Path(held_out_of.shards_dir)
    if not (folder / "manifest.json").exists():
        raise ValueError(f"the run's tokens are not on this machine (looked for {folder}): give --data PATH")
    return folder, TokenShards.read(folder / "manifest.json")


def _objective(subject: Subject) -> Any:
    if subject.plan is not None:
        return subject.plan.config.objective
    return "masked" if _settings(subject)["model_type"] in MASKED_TYPES else "causal"


def _settings(subject: Subject) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((subject.folder / "config.json").read_bytes())
    return settings


def _plan(
    subject: Subject,
    shards_dir: Path,
    shards: TokenShards,
    *,
    evaluation: EvaluationConfig,
    inference: InferenceConfig,
) -> RunPlan:
    """The run's plan, or one for a model of no run; on these ranks, with these tokens."""
    device_kind, degree = device_kind_of(inference.degree), inference.degree
    plan = subject.plan or _plan_of_a_stranger(subject, shards, device_kind=device_kind)
    axis = {"data": "dp", "tensor": "tp", "pipeline": "pp", "none": "dp"}[inference.parallel]
    mesh = {name: degree if name == axis else 1 for name in ("pp", "dp", "tp")}
    parallel = plan.config.parallel.model_copy(update={"pp_stages_per_rank": 1})
    config = plan.config.model_copy(
        update={"evaluation": evaluation, "parallel": parallel, "launch": LaunchConfig(), "profile": ProfileConfig()}
    )
    return plan.model_copy(
        update={
            "config": config,
            "shards_dir": str(shards_dir),
            "shards_fingerprint": shards.fingerprint,
            "end_id": shards.end_id,
            "mask_id": shards.mask_id,
            "device_kind": device_kind,
            "strategy": "single",
            "mesh": mesh,
            "hosts": (),
            "ranks_per_host": (degree,),
            "threads_per_rank": max(1, usable_cores() // degree),
            "micro_batches": (min(plan.micro_batches),) * mesh["dp"],
            "precision": plan.precision if inference.precision == "auto" else inference.precision,
        }
    )


def _plan_of_a_stranger(subject: Subject, shards: TokenShards, *, device_kind: str) -> RunPlan:
    settings = _settings(subject)
    words = int(settings["vocab_size"])
    if shards.vocab_size > words:
        raise ValueError(
            f"{subject.what}: its tokenizer has {shards.vocab_size} tokens, the model {words}: they do not belong "
            "together"
        )
    shape = shape_of_hf(settings, vocab_size=words, context=0)
    masked = _objective(subject) == "masked"
    model = ModelConfig(architecture="bert" if masked else "path", path=str(subject.folder), init="pretrained")
    config = RunConfig(name="evaluation", model=model)
    context = min(CONTEXT, shape.context or CONTEXT)
    train = config.train.model_copy(update={"context": context, "global_batch": MICRO_BATCH})
    return RunPlan(
        run_id="",
        config=config.model_copy(update={"train": train}),
        shards_dir="",
        shards_fingerprint="",
        vocab_size=words,
        end_id=shards.end_id,
        mask_id=shards.mask_id,
        shape=shape,
        device_kind="cuda" if device_kind == "cuda" else "cpu",
        strategy="single",
        offload="none",
        activation_checkpointing="none",
        mesh={"pp": 1, "dp": 1, "tp": 1},
        ranks_per_host=(1,),
        threads_per_rank=1,
        micro_batches=(MICRO_BATCH,),
        largest_micro_batches=(MICRO_BATCH,),
        accumulation=1,
        rebalance=False,
        precision="bf16" if device_kind == "cuda" else "fp32",
        steps=1,
        sequences=1,
        predicted=NOTHING,
        ranking=(),
        reasons=(),
    )


def check_tasks(config: RunConfig) -> None:
    """Load the downstream tasks with their data now, as nobody wants to hear after training that there is no such task.

    Raises ValueError, with the cure.
    """
    if not config.evaluation.has_tasks:
        return
    if config.objective == "masked":
        raise ValueError(
            "evaluation.tasks ask for the likelihood of a continuation, which a masked model has none of: "
            "leave evaluation.tasks and evaluation.task_files empty, or train a causal model"
        )
    if config.launch.launcher == "docker":
        raise ValueError(
            "evaluation.tasks: the training image has no lm-evaluation-harness: leave them empty, and once the model "
            f"is registered run `{command('shardline')} evaluate {config.model_name}@champion --tasks NAME,…` here"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"evaluation.tasks need lm-evaluation-harness: `{command('pip')} install -c constraints.txt 'lm-eval'`"
        )
    program = [sys.executable, "-m", "training.evaluation.lm_eval_tasks", config.evaluation.model_dump_json()]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise (ValueError if done.returncode == 2 else RuntimeError)(lines[-1])


def check_prompts(shards_dir: Path, prompts: Iterable[str]) -> None:
    """Raises ValueError now for a sample prompt that would fail after the training."""
    tokenizer = Tokenizer.from_file(str(shards_dir / "tokenizer" / "tokenizer.json"))
    for prompt in prompts:
        try:
            encode_prompt(tokenizer, prompt)
        except ValueError as error:
            raise ValueError(f"evaluation.prompts: {error}") from None
