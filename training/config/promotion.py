"""The registry, gates and rollout sections of the config: how a trained model comes to be served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.config.section import Section


class RegistryConfig(Section):
    """Name and description of the model in the registry."""

    model_name: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    """Name of the model in the MLflow registry; empty means the name of the run."""
    licence: str = ""
    """Licence of the weights, recorded with each model version."""
    notes: str = Field("", max_length=5000)
    """Free text for the users of the model, recorded with each model version."""


class GatesConfig(Section):
    """Conditions that a version must meet before it can become champion; they are recorded with the version."""

    min_improvement: float = 0.0
    """Minimum improvement of the validation loss over the champion's on the same data, in nats per token. Negative: the
    new model may be worse by this much.
    """
    max_regression: float | None = None
    """How far the loss on any single source of the held-out text may lie above the champion's, in nats per token. Empty
    means that only the loss on the whole text counts.
    """
    tasks: dict[str, float] = Field({})
    """Minimum scores in downstream tasks of the evaluation, by task and metric: {arc_easy/acc: 0.6}. A name without a
    metric means its accuracy, `acc`.
    """
    max_p95_ms: float = Field(0.0, ge=0)
    """Maximum 95th-percentile latency, in milliseconds, of the smoke test's requests to a fresh server; 0 means no
    limit.
    """
    approval: Literal["none", "prefect", "tag"] = "none"
    """Who must approve a promotion. none: nobody. prefect: a person, by resuming the paused flow run. tag: a person, by
    setting the tag `shardline.approved` of the version to their name.
    """
    approval_timeout_s: float = Field(86_400, gt=0)
    """Seconds to wait for an approval. Without one the version is not promoted."""


class RolloutConfig(Section):
    """The switch to a version that passed its gates, and the bounds that trigger a rollback."""

    servers: tuple[str, ...] = ()
    """URLs of servers that follow the alias. Servers on this machine are found without being listed."""
    switch_timeout_s: float = Field(300, gt=0)
    """Seconds to wait until a fresh server has started and answered the smoke test, and then until every server serves
    the new version.
    """
    watch_minutes: float = Field(5, ge=0, le=10_000)
    """Minutes to watch the new version after the switch; 0 means not at all."""
    max_error_rate: float = Field(0.01, ge=0, le=1)
    """Roll back if more than this fraction of requests fails."""
    max_p95_ms: float = Field(0.0, ge=0)
    """Roll back if the 95th-percentile latency of texts, up to their 64th token, exceeds this many milliseconds; 0
    means never.
    """
    min_requests: int = Field(20, ge=1)
    """Minimum number of requests before error rate or latency can trigger a rollback."""
