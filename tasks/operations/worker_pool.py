"""A Prefect pool whose runs are containers like the worker's own: `shardline stack init DIR --pool docker`.

A run keeps its container when the worker is replaced, and its limits are its own. Whoever starts one cannot choose
another image, mount or user: the template has no variables.
"""

from __future__ import annotations

from typing import Any

from infra.this_container import like_this_one, remove_ended

FIELDS = ("image", "networks", "volumes", "mem_limit")  # prefect-docker's own; it passes on the others as they are
KEPT_HOURS = 7 * 24
RUN_LABEL = "io.prefect.flow-run-id"
OF_THE_WORKER_ALONE = ("MLFLOW_SERVING_PASSWORD", "SLACK_WEBHOOK_URL", "SMTP_PASSWORD", "ALERT_WEBHOOK_URL")


def job_template() -> dict[str, Any]:
    """The job template that `prefect work-pool create --base-job-template` takes."""
    settings = like_this_one()
    environment = settings.pop("environment")
    for name in OF_THE_WORKER_ALONE:
        environment.pop(f"{name}_FILE", None)
    job = {
        "command": "prefect flow-run execute",
        # The worker would write its password here, for `docker inspect` to show: each reads it from its file.
        "env": environment | {"PREFECT_API_AUTH_STRING": None},
        "image_pull_policy": "Never",
        "auto_remove": False,  # why a container was killed is known as long as it is there
        "stream_output": False,  # its log is its own, and Prefect's
        **{name: settings.pop(name) for name in FIELDS},
        "container_create_kwargs": settings,
    }
    return {"job_configuration": job, "variables": {"type": "object", "properties": {}}}


def remove_old_containers() -> None:
    remove_ended(RUN_LABEL, older_than_hours=KEPT_HOURS)
