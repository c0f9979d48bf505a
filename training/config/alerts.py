"""The alerts section of the config: when a run counts as stuck."""

from __future__ import annotations

from pydantic import Field

from training.config.section import Section


class AlertsConfig(Section):
    """The limit after which a run counts as stuck and an alert is sent. SHARDLINE_HOME/alerts.yaml says to whom."""

    stuck_after: float = Field(
        20.0,
        ge=2,
        description="A run counts as stuck if no step has ended for this many times the usual time of a step, "
        "which is the median of its newest rows of metrics.",
    )
    stuck_at_least_s: float = Field(
        120.0,
        ge=1,
        description="A run never counts as stuck before this many seconds without a step, so that validations "
        "and checkpoints of runs with short steps raise no alarm.",
    )
