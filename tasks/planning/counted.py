"""Counts the parameters of the model at model.path, on this machine or on a host, and keeps the count.

A process with torch builds the class on the meta device, which takes it some 4 s, most of that to import. A head
without torch leaves the config.json in the run's folder, where the hosts' check finds it (training/node/host_check.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

import training
from tasks.planning.pretrained import config_file
from tasks.workspace.paths import home
from training.config.run import RunConfig
from training.node.host_check import count, counted_name, request_name
from training.planner.model_shape import check_kind
from training.records.plan import ModelShape
from training.records.record import read_fields

logger = logging.getLogger(__name__)

FOLDER = "model-sizes"  # in SHARDLINE_HOME
COUNTED_BY = (
    "models/sizes.py",
    "models/family.py",
    "models/hidden_matrices.py",
    "models/split_outputs.py",
    "models/hugging_face.py",
    "models/pretrained.py",
    "facts/model_config.py",
    "planner/model_shape.py",
    "facts/families.py",
)


def counted_shape(config: RunConfig) -> ModelShape | None:
    """Return the shape of model.path with its parameters; None if the run has no such model, or nobody could count it.

    Raises ValueError for a class that cannot be built or planned.
    """
    if not config.model.path:
        return None
    file = config_file(config.model)
    check_kind(config.model, str(read_fields(file).get("model_type", "unknown")))
    shape = _kept(config, file)
    if shape is None and importlib.util.find_spec("torch") is not None:
        shape = _keep(ModelShape.model_validate_json(count(file, config.objective)), _kept_at(config, file))
    return shape


@contextmanager
def counted_by_hosts(config: RunConfig, *, run_dir: Path) -> Iterator[None]:
    """Let the hosts that are checked meanwhile count the parameters of model.path, if this machine cannot."""
    if not config.model.path or importlib.util.find_spec("torch") is not None:
        yield
        return
    file = config_file(config.model)
    if _kept(config, file) is not None:
        yield
        return
    request, answer = run_dir / request_name(config.objective), run_dir / counted_name(config.objective)
    request.write_bytes(file.read_bytes())
    try:
        yield
        if answer.exists():
            shape = _keep(ModelShape.model_validate_json(answer.read_bytes()), _kept_at(config, file))
            logger.info("model.path: %s parameters, %s", f"{shape.parameters:,}", shape.sizes.counted)
    finally:
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


# The counts that are kept


def _kept_at(config: RunConfig, file: Path) -> Path:
    """Return where the count of a config.json is kept: under what it depends on."""
    digest = hashlib.sha256(config.objective.encode() + file.read_bytes())
    for source in COUNTED_BY:
        digest.update((Path(training.__path__[0]) / source).read_bytes())
    digest.update("".join(each.version for each in distributions(name="transformers")).encode())
    return home() / FOLDER / f"{digest.hexdigest()[:16]}.json"


def _kept(config: RunConfig, file: Path) -> ModelShape | None:
    return ModelShape.read_or_none(_kept_at(config, file), otherwise="counting again")


def _keep(shape: ModelShape, path: Path) -> ModelShape:
    shape.write(path)
    return shape
