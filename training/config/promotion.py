"""Registry, gates and rollout: the sections of the config that say how a trained model comes to be served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.config.section import Section


class RegistryConfig(Section):
    model_name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$",
        description="Name in the MLflow registry; empty: the run's name.",
    )
    licence: str = Field("", description="Licence of the weights, as recorded with the version.")
    notes: str = Field("", max_length=5000, description="What others should know of the model.")


class TaskFloor(Section):
    """A score that a downstream task must reach."""

    task: str = Field("", description="Name of a task in the evaluation.")
    metric: str = Field("acc", description="One of the task's figures.")
    at_least: float = Field(0.0, description="The lowest value that passes.")


class GatesConfig(Section):
    """What a version must hold before it may be champion; recorded with it when it is registered."""

    min_improvement: float = Field(
        0.0,
        description="Nats per token by which the validation loss must be below the champion's, on the same data; "
        "negative: it may be so much worse.",
    )
    tasks: tuple[TaskFloor, ...] = Field((), description="Downstream scores that it must reach.")
    max_p95_ms: float = Field(
        0.0, ge=0, description="Latency budget: p95 of the smoke test's requests in a fresh server; 0: none."
    )
    approval: Literal["none", "prefect", "tag"] = Field(
        "none",
        description="Who must agree. prefect: a person resumes the paused flow run. tag: somebody sets "
        "`shardline.approved` on the version, to their name.",
    )
    approval_timeout_s: float = Field(86_400, gt=0, description="Not approved in this time: not promoted.")


class RolloutConfig(Section):
    """How a version that passed its gates takes over, and what takes it back."""

    smoke_requests: int = Field(20, ge=1, le=10_000, description="Requests that a fresh server must answer first.")
    smoke_timeout_s: float = Field(300, gt=0, description="For the fresh server to start and to answer them all.")
    servers: tuple[str, ...] = Field(
        (), description="URLs of the servers that follow the alias; those of this machine are found by themselves."
    )
    switch_timeout_s: float = Field(300, gt=0, description="For all servers to serve the new version.")
    watch_minutes: float = Field(5, ge=0, le=10_000, description="Watched so long after the switch; 0: not.")
    max_error_rate: float = Field(0.01, ge=0, le=1, description="Failed share of requests that takes it back.")
    max_p95_ms: float = Field(0.0, ge=0, description="p95 of requests that takes it back; 0: none.")
    min_requests: int = Field(20, ge=1, description="Before so many were counted nothing is taken back for them.")
