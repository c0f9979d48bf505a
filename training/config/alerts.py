"""The alerts section of the config: when a run counts as stuck."""

from __future__ import annotations

from pydantic import Field

from training.config.section import Section


class AlertsConfig(Section):
    """When somebody is told that training is stuck; whom, SHARDLINE_HOME/alerts.yaml says."""

    stuck_after: float = Field(
        20.0,
        ge=2,
        description="A run counts as stuck once no step was made for this many times the usual time of a step, the "
        "median of its newest rows of metrics.",
    )
    stuck_at_least_s: float = Field(
        120.0,
        ge=1,
        description="Seconds without a step below which a run never counts as stuck, so that validations and "
        "checkpoints of runs with short steps raise no alarm.",
    )
