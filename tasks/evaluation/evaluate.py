"""Evaluates any checkpoint, registered version or Hugging Face folder, on any text, with any number of ranks.

Each evaluation has a folder under SHARDLINE_HOME/evaluations with its plan, its log and eval.json.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.data.corpus import prepare_corpus
from tasks.evaluation.checks import check_tasks
from tasks.hardware.machine import device_kind_of, usable_cores
from tasks.launch import recovery
from tasks.launch.local import LocalLauncher
from tasks.planning.pretrained import generation
from tasks.registry.models import ResolvedModel, resolve
from tasks.store.model_folder import check_model_folder
from tasks.workspace.paths import home, present, tracking_uri
from training.config.data import DataConfig, TokenizerConfig
from training.config.evaluation import EvaluationConfig
from training.config.launch import LaunchConfig
from training.config.model import ModelConfig
from training.config.parallel import Precision
from training.config.run import ProfileConfig, RunConfig
from training.config.serving import InferenceConfig
from training.facts.cures import Cure
from training.facts.families import masked_types
from training.planner.model_shape import shape_of_hf
from training.planner.reasons.checks import check_inference
from training.records.checkpoint import CheckpointManifest
from training.records.evaluation_plan import EvaluationPlan
from training.records.plan import ModelShape, RunPlan
from training.records.record import read_fields, sha256_file
from training.records.results import QUANTIZED, EvalReport
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult

logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
CONTEXT = 1024  # tokens in a sequence for models from elsewhere, unless they have fewer positions
MICRO_BATCH = 4


@dataclass(frozen=True)
class Subject:
    """The model to evaluate. `folder`: in Hugging Face layout; `tokenizer`: a folder; `plan`: the plan of its run."""

    what: str
    folder: Path
    tokenizer: Path
    step: int
    sha256: str
    plan: RunPlan | None
    version: ResolvedModel | None = None


def find_subject(what: str) -> Subject:
    """Return the model that `what` names. Raises ValueError, with the cure, if there is none.

    `what`: a run's last checkpoint (ID, runs/ID), a checkpoint (runs/ID/checkpoints/STEP), a registered version
    (NAME@alias, NAME/3), or a folder with a config.json.
    """
    path = Path(what).expanduser()
    run_dir = next((d for d in (path, home() / what) if (d / "plan.json").exists()), None)
    if run_dir is not None:
        return _last_checkpoint(what, run_dir.resolve())
    if (path / "config.json").exists():
        path = path.resolve()
        check_model_folder(path)
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
        raise ValueError(f"{what} has not finished training: name a checkpoint, {run_dir}/checkpoints/STEP ({found})")
    return _checkpoint(what, run_dir / TrainResult.read(run_dir / "result.json").checkpoint, run_dir)


def _checkpoint(what: str, folder: Path, run_dir: Path) -> Subject:
    plan, manifest = RunPlan.read(run_dir / "plan.json"), folder / "manifest.json"
    step = CheckpointManifest.read(manifest).step
    tokenizer = present(Path(plan.shards_dir)) / "tokenizer"
    return Subject(what, folder, tokenizer, step=step, sha256=sha256_file(manifest), plan=plan)


def _hash_of_weights(folder: Path) -> str:
    """Return a hash of all weight files; takes 1 s per 1-2 GB."""
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
    """Measure the exact loss on `data` and on each of its sources, the scores of tasks, and samples.

    Without `data.path` the text is the held-out split of the run `held_out_of`, by default of the run that trained the
    model. Raises ValueError for settings that cannot work, RuntimeError with the log's last lines if a rank fails.
    """
    if inference.engine not in {"auto", "torch"}:
        raise ValueError(f"inference.engine = {inference.engine}: evaluation runs torch, leave it out")
    check_inference(subject.folder, inference)
    shards_dir, shards = tokens_of(subject, data, held_out_of=held_out_of or subject.plan)
    plan = planned(subject, shards_dir, shards, evaluation=evaluation, inference=inference)
    check_tasks(plan.config)
    folder = home() / "evaluations" / plan.run_id
    logger.info("evaluating %s on %d ranks, in %s", subject.what, inference.degree, folder)
    return measured(plan, LocalLauncher(plan, run_dir=folder, log="evaluate"))


def measured(
    plan: EvaluationPlan, launcher: LocalLauncher, *, on_poll: Callable[[], object] = lambda: None
) -> EvalReport:
    """Run the evaluation program in the launcher's folder; an error of `on_poll` ends it."""
    folder = launcher.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    plan.write(folder / "plan.json")
    recovery.run_program("training.evaluate", plan=plan, run_dir=folder, launcher=launcher, on_poll=on_poll)
    return EvalReport.read(folder / "eval.json")


def tokens_of(subject: Subject, data: DataConfig, *, held_out_of: RunPlan | None) -> tuple[Path, TokenShards]:
    """Return the run's own shards, or `data`, all of it held out, tokenized by the model's own tokenizer and rule."""
    if data.given:
        text = data.model_copy(update={"tokenizer": _own_tokenizer(subject), "split": "all"})
        objective = _objective(subject)
        return prepare_corpus(text, tokens_home=home() / "tokens", objective=objective, continued=True)
    if held_out_of is None:
        raise ValueError(
            f"{subject.what} was not trained by a run, so it has no held-out text of its own: give --data PATH"
        )
    folder = present(Path(held_out_of.shards_dir))
    if not (folder / "manifest.json").exists():
        raise ValueError(f"the run's tokens are not on this machine (looked for {folder}): give --data PATH")
    shards = TokenShards.read(folder / "manifest.json")
    rule = subject.plan.text_encoding if subject.plan else None
    if rule is None or shards.made_by(rule):
        return folder, shards
    logger.info(
        "%s was trained by another rule for special tokens (%s) than %s: tokenizing this run's text by its own",
        subject.what,
        rule.in_words,
        held_out_of.run_id,
    )
    text = held_out_of.config.data.model_copy(update={"tokenizer": _own_tokenizer(subject)})
    return prepare_corpus(text, tokens_home=home() / "tokens", objective=_objective(subject), continued=True)


def _own_tokenizer(subject: Subject) -> TokenizerConfig:
    """Return the model's tokenizer with the rule by which the text of its training became tokens."""
    rule = subject.plan.text_encoding.settings if subject.plan else {}
    return TokenizerConfig.model_validate({"kind": "pretrained", "path": str(subject.tokenizer), **rule})


def _objective(subject: Subject) -> Any:
    if subject.plan is not None:
        return subject.plan.config.objective
    return "masked" if _settings(subject)["model_type"] in masked_types() else "causal"


def _settings(subject: Subject) -> dict[str, Any]:
    return read_fields(subject.folder / "config.json")


def planned(
    subject: Subject,
    shards_dir: Path,
    shards: TokenShards,
    *,
    evaluation: EvaluationConfig,
    inference: InferenceConfig,
) -> EvaluationPlan:
    """Plan the evaluation of the subject on these tokens, by the ranks that `inference` asks for."""
    if inference.precision in QUANTIZED:
        raise ValueError(
            f"inference.precision = {inference.precision}: evaluation runs on torch, which has fp32, bf16 and fp16. "
            "The perplexity of quantized graphs is measured by the export stage (export.json, parity.precisions)"
        )
    device_kind, degree = device_kind_of(inference.degree), inference.degree
    if subject.plan is not None:
        model = TrainedModel.of_run(subject.plan)
    else:
        model = _stranger(subject, shards, device_kind=device_kind)
    axis = {"data": "dp", "tensor": "tp", "pipeline": "pp", "none": "dp"}[inference.parallel]
    mesh = {name: degree if name == axis else 1 for name in ("pp", "dp", "tp")}
    return EvaluationPlan(
        run_id=_name(subject.what),
        model=str(subject.folder),
        step=subject.step,
        checkpoint_sha256=subject.sha256,
        config=_config(model.config, evaluation),
        shards_dir=str(shards_dir),
        shards_fingerprint=shards.fingerprint,
        vocab_size=model.vocab_size,
        end_id=shards.end_id,
        mask_id=shards.mask_id,
        text_encoding=subject.plan.text_encoding if subject.plan else shards.text_encoding,
        more_ends=subject.plan.more_ends
        if subject.plan
        else generation(model.config.model, shards.end_id)["more_ends"],
        shape=model.shape,
        device_kind=device_kind,
        mesh=mesh,
        ranks_per_host=(degree,),
        threads_per_rank=max(1, usable_cores() // degree),
        micro_batches=(model.micro_batch,) * mesh["dp"],
        precision=model.precision if inference.precision == "auto" else inference.precision,
    )


def _name(what: str) -> str:
    name = re.sub(r"[^\w.-]+", "-", what).strip("-")[-40:]
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}-{name}"


def _config(config: RunConfig, evaluation: EvaluationConfig) -> RunConfig:
    """Return the config of the model's training for this machine, without the settings that only training uses."""
    changes: dict[str, Any] = {
        "evaluation": evaluation,
        "parallel": config.parallel.model_copy(update={"pp_stages_per_rank": 1}),
        "train": config.train.model_copy(update={"compile": False}),
        "launch": LaunchConfig(),
        "profile": ProfileConfig(),
    }
    return config.model_copy(update=changes)


@dataclass(frozen=True)
class TrainedModel:
    """The settings and data that an evaluation takes over from the model's training."""

    config: RunConfig
    shape: ModelShape
    vocab_size: int
    micro_batch: int
    precision: Precision

    @classmethod
    def of_run(cls, plan: RunPlan) -> TrainedModel:
        return cls(plan.config, plan.shape, plan.vocab_size, min(plan.micro_batches), plan.precision)


def _stranger(subject: Subject, shards: TokenShards, *, device_kind: str) -> TrainedModel:
    """Describe a model from elsewhere by its config.json and defaults. Raises ValueError if its tokenizer has more
    tokens than its vocabulary.
    """
    settings = _settings(subject)
    vocab_size = int(settings["vocab_size"])
    if shards.vocab_size > vocab_size:
        raise ValueError(
            f"{subject.what}: its tokenizer has {shards.vocab_size:,} tokens, the embedding of the model "
            f"{vocab_size:,} rows: {Cure.ROWS(tokens=shards.vocab_size)}"
        )
    shape = shape_of_hf(settings, vocab_size=vocab_size)
    masked = _objective(subject) == "masked"
    model = ModelConfig(architecture="bert" if masked else "path", path=str(subject.folder), init="pretrained")
    config = RunConfig(name="evaluation", model=model)
    train = config.train.model_copy(update={"context": min(CONTEXT, shape.context or CONTEXT)})
    return TrainedModel(
        config=config.model_copy(update={"train": train}),
        shape=shape,
        vocab_size=vocab_size,
        micro_batch=MICRO_BATCH,
        precision="bf16" if device_kind == "cuda" else "fp32",
    )
