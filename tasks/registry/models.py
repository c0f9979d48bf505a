"""Reads the MLflow registry: finds the version of a reference, fetches its files, and finds the run it came from."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.display.progress import time_progress
from tasks.registry.tags import CHAMPION, GATE, REPLACES, TAG
from tasks.store.model_folder import check_model_folder
from tasks.tracking.client import registry_client, run_or_none
from tasks.workspace.paths import local_path
from training.facts.placed import place
from training.records.model_state import check_export
from training.records.plan import RunPlan
from training.records.record import sha256_config, sha256_file
from training.records.results import EvalReport, ExportedModel
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedModel:
    """A model version whose files are on this machine."""

    name: str
    version: int
    aliases: tuple[str, ...]
    export_dir: Path
    records_dir: Path
    tags: dict[str, str]


def example_prompt(records_dir: Path) -> str:
    """Return a prompt of the kind of text that a version learned from: of its own samples, the first that has words.

    It is empty for records that cannot be read.
    """
    try:
        samples = EvalReport.read(records_dir / "eval.json").samples
    except (OSError, ValueError) as error:
        logger.warning("no example of a prompt: %s", error)
        return ""
    return next((sample.prompt for sample in samples if sample.prompt), "")


def parse_ref(ref: str) -> tuple[str, str | int]:
    """Split NAME@alias into (NAME, alias), NAME/3 into (NAME, 3), NAME into (NAME, "champion"). Raises ValueError."""
    word = "[A-Za-z0-9][A-Za-z0-9._-]*"
    found = re.fullmatch(f"({word})(?:@({word})|/([0-9]{{1,9}}))?", ref)
    if found is None:
        raise ValueError(f"{ref!r} is not the name of a model version: write NAME, NAME@champion or NAME/3")
    name, alias, version = found.groups()
    return name, int(version) if version else alias or CHAMPION


def find_version(client: MlflowClient, ref: str) -> ModelVersion:
    """Return the version that `ref` names now. Raises ValueError, with the existing ones, if there is none."""
    name, which = parse_ref(ref)
    with _naming_what_there_is(client, name, ref=ref):
        if isinstance(which, int):
            return client.get_model_version(name, str(which))
        return client.get_model_version_by_alias(name, which)


def require_model(client: MlflowClient, name: str) -> None:
    """Raise ValueError, with the existing models, if no model has that name."""
    with _naming_what_there_is(client, name, ref=name):
        client.get_registered_model(name)


@contextmanager
def _naming_what_there_is(client: MlflowClient, name: str, *, ref: str) -> Iterator[None]:
    """Turn MLflow's error for what does not exist into ValueError, with what does."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            raise
        raise ValueError(f"the registry has no {ref}: {_what_there_is(client, name)}") from error


def _what_there_is(client: MlflowClient, name: str) -> str:
    models = {model.name: model for model in client.search_registered_models()}
    if not models:
        return "it is empty; `shardline pretrain PRESET` registers a model"
    if name not in models:
        return f"it knows {', '.join(sorted(models))}"
    versions = sorted(int(version.version) for version in client.search_model_versions(f"name='{name}'"))
    aliases = [f"@{alias} -> {version}" for alias, version in sorted(aliases_of(client, name).items())]
    noun = "version" if len(versions) == 1 else "versions"
    return f"{name} has {noun} {', '.join(map(str, versions)) or 'none'}; its aliases: {', '.join(aliases) or 'none'}"


def aliases_of(client: MlflowClient, name: str) -> dict[str, int]:
    """Return alias -> version. MLflow's search returns versions without aliases, so the model is read."""
    return {alias: int(version) for alias, version in client.get_registered_model(name).aliases.items()}


def resolve(ref: str, *, tracking_uri: str, cache_dir: Path | None = None) -> ResolvedModel:
    """Return the version of NAME@alias, NAME/3 or NAME (its champion), with its export folder on this machine.

    Artifacts on a mounted path are used in place. Others are downloaded once, to `cache_dir` (default: a new
    temporary folder). Raises ValueError if there is no such version, if it has no exported model, or if a file differs
    from the registered one.
    """
    client = registry_client(tracking_uri)
    version = find_version(client, ref)
    folder = _cached_folder(version, tracking_uri=tracking_uri, cache_dir=cache_dir) / "artifacts"
    if not (folder / "export" / "export.json").is_file():
        raise ValueError(f"{ref} (version {version.version}) {_why_no_files(version, folder / 'export')}")
    check_model_folder(folder / "export")
    check_export(folder / "export", _check_files(folder / "export", ref))
    aliases = tuple(
        alias for alias, number in aliases_of(client, version.name).items() if number == int(version.version)
    )
    return ResolvedModel(
        name=version.name,
        version=int(version.version),
        aliases=aliases,
        export_dir=folder / "export",
        records_dir=folder / "records",
        tags=dict(version.tags),
    )


def _why_no_files(version: ModelVersion, export: Path) -> str:
    if not (run_id := version.tags.get(f"{TAG}run_id")):
        return f"was not registered by Shardline: it has no {export / 'export.json'}"
    return (
        f"has no files on this machine: {export} is missing. `mlflow gc` or somebody deleted them, or they lie on the "
        f"machine that registered it: copy that folder from there or from a backup, or train as run {run_id} did"
    )


def _check_files(folder: Path, ref: str) -> ExportedModel:
    """Return the export's record. Raises ValueError unless every file is the registered one; takes 1 s per 1-2 GB."""
    exported = ExportedModel.read(folder / "export.json")
    files = exported.files
    with time_progress(f"checking the files of {ref}") as progress:
        progress.begin(f"checking the files of {ref}", total=len(files), unit="files")
        for name, expected in files.items():
            path = folder / name
            if not path.is_file() or sha256_file(path) != expected:
                raise ValueError(
                    f"{ref}: {path} is missing, or not the file that was registered (its sha256 differs from "
                    "export.json's): restore it from a backup, or register the run again"
                )
            progress.advance()
    return exported


def local_folder(version: ModelVersion, *, tracking_uri: str, part: str = "", scratch: Path | None = None) -> Path:
    """Return the version's folder, or `part` of it: in place if it is mounted, otherwise downloaded to `scratch`."""
    from mlflow.artifacts import download_artifacts

    assert version.source, "MLflow has no version without a source"
    if folder := local_path(version.source):
        return folder / part
    uri = f"{version.source}/{part}" if part else version.source
    target = str(scratch) if scratch else None
    with time_progress(f"downloading {version.name} version {version.version}"):
        return Path(download_artifacts(artifact_uri=uri, dst_path=target, tracking_uri=tracking_uri))


def _cached_folder(version: ModelVersion, *, tracking_uri: str, cache_dir: Path | None) -> Path:
    """Return the folder of the whole version; it is downloaded once unless it is mounted."""
    assert version.source, "MLflow has no version without a source"
    if cache_dir is None or local_path(version.source):
        return local_folder(version, tracking_uri=tracking_uri)
    # The source's hash keeps versions of different registries apart.
    source = hashlib.sha256(version.source.encode()).hexdigest()
    (target,) = place(cache_dir, [f"{version.name}-{version.version}-{source[:12]}"], source=tracking_uri)
    if not target.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            local_folder(version, tracking_uri=tracking_uri, scratch=Path(scratch)).rename(target)
    return target


def replaced_by(client: MlflowClient, name: str, version: int) -> int | None:
    """Return the version that `version` replaced as champion, by the record of its promotion; None if there is none."""
    from mlflow.exceptions import MlflowException

    before = client.get_model_version(name, str(version)).tags.get(REPLACES, "")
    try:
        return int(client.get_model_version(name, before).version) if before else None
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None  # it was deleted meanwhile


def lineage(ref: str, *, tracking_uri: str, cache_dir: Path | None = None) -> dict[str, Any]:
    """Return run, config, code, data, tokenizer and checkpoint of a version, as plain JSON values.

    Everything comes from the registry, so it works without the run's folder.
    """
    model = resolve(ref, tracking_uri=tracking_uri, cache_dir=cache_dir)
    records, tags = model.records_dir, model.tags
    plan, result = RunPlan.read(records / "plan.json"), TrainResult.read(records / "result.json")
    shards = TokenShards.read(records / "manifest.json")
    evaluation = EvalReport.read(records / "eval.json")
    exported = ExportedModel.read(model.export_dir / "export.json")
    run = run_or_none(registry_client(tracking_uri), plan.mlflow_run_id)
    commit = run.data.tags.get("mlflow.source.git.commit", "unknown") if run else "unknown"
    status = run.info.status if run else "unknown: MLflow no longer has its run"
    return {
        "model": {"name": model.name, "version": model.version, "aliases": list(model.aliases)},
        "verdict": tags.get(f"{TAG}verdict", ""),
        "run": {"run_id": plan.run_id, "mlflow_run_id": plan.mlflow_run_id, "status": status},
        "git_commit": commit,
        "config_sha256": sha256_config(plan.config),
        "config": plan.config.model_dump(mode="json"),
        "dataset": {
            "path": plan.config.data.described,
            "fingerprint": shards.fingerprint,
            "sources": len(shards.sources),
            "train_tokens": shards.tokens("train"),
            "validation_tokens": shards.tokens("validation"),
            "split_rule": shards.split_rule,
        },
        "tokenizer": {
            "kind": shards.tokenizer,
            "sha256": shards.tokenizer_sha256,
            "vocab_size": shards.vocab_size,
        },
        "checkpoint": {"path": result.checkpoint, "sha256": result.checkpoint_sha256, "step": result.step},
        "evaluation": json.loads(evaluation.model_dump_json(exclude={"samples"})),
        "parity": json.loads(exported.parity.model_dump_json()),
        "gates": {key.removeprefix(GATE): text for key, text in tags.items() if key.startswith(GATE)},
        "replaces": tags.get(REPLACES, ""),
        "licence": plan.config.registry.licence,
        "notes": plan.config.registry.notes,
        "reproduce": f"shardline reproduce {plan.run_id}",
    }
