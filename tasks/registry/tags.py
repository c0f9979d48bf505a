"""The names in the registry: aliases, and the tags of a version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.facts.formats import FORMATS, problem_of

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION, CHALLENGER = "champion", "challenger"
# Tags of a version. Its figures, which people filter by and compare, have no prefix, because MLflow's tables cut long
# names off. Losses are written with repr, so that they read back exactly.
TAG = "shardline."
GATE, REPLACES = f"{TAG}gate.", f"{TAG}replaces"
VERDICT, APPROVED = f"{TAG}verdict", f"{TAG}approved"
LOSS_ON = f"{TAG}loss_on."
FORMAT = f"{TAG}format"  # the number of the exports' format, for the tags of a version too
TERMS = f"{TAG}terms"  # gates and rollout, if a resume changed them after the registration
TAG_CHARS = 5000  # MLflow's limit for the value of a version's tag


def figures_of_tags(version: ModelVersion) -> dict[str, str]:
    """Return the version's tags without the prefix. Raises ValueError unless this version of Shardline wrote them."""
    tags = {key.removeprefix(TAG): text for key, text in version.tags.items()}
    what = f"{version.name}/{version.version}"
    skips = f"`shardline promote {version.name} --version {version.version} --force` skips the gates"
    if "val_loss" not in tags:
        raise ValueError(
            f"{what} was not registered by Shardline (no tag val_loss), so the gates have nothing to compare: {skips}"
        )
    if problem := problem_of("exports", int(tags.get("format", 0))):
        raise ValueError(f"{what} {problem}: {FORMATS['exports'].cure}, or {skips}")
    return tags


def note_evaluation(
    client: MlflowClient,
    name: str,
    number: int,
    *,
    dataset: str,
    loss: float,
    tokens: int,
    by_source: Mapping[str, float] | None = None,
) -> None:
    """Record the version's loss on other held-out tokens. The gates compare two versions if both have one."""
    text = json.dumps([loss, tokens, by_source or {}])
    if len(text) > TAG_CHARS:  # hundreds of sources: the gate then says that they were not measured
        text = json.dumps([loss, tokens, {}])
    client.set_model_version_tag(name, str(number), f"{LOSS_ON}{dataset}", text)
