"""A Prefect pool whose runs are containers like the worker's own: `shardline stack init DIR --pool docker`.

A run keeps its container when the worker is replaced, and each run has its own limits. A user who starts a run cannot
choose another image, mount or user, because the template has no variables.
"""

from __future__ import annotations

from typing import Any

from infra.this_container import like_this_one, remove_ended

FIELDS = ("image", "networks", "volumes", "mem_limit")  # prefect-docker sets these itself; it passes on all others
KEPT_HOURS = 7 * 24
RUN_LABEL = "io.prefect.flow-run-id"
OF_THE_WORKER_ALONE = ("MLFLOW_SERVING_PASSWORD", "SLACK_WEBHOOK_URL", "SMTP_PASSWORD", "ALERT_WEBHOOK_URL")


def job_template() -> dict[str, Any]:
    """Return the job template for `prefect work-pool create --base-job-template`."""
    settings = like_this_one()
    environment = settings.pop("environment")
    for name in OF_THE_WORKER_ALONE:
        environment.pop(f"{name}_FILE", None)
    job = {
        "command": "prefect flow-run execute",
        # Otherwise the worker writes its password here, and `docker inspect` shows it. Each run reads it from its file.
        "env": environment | {"PREFECT_API_AUTH_STRING": None},
        "image_pull_policy": "Never",
        "auto_remove": False,  # keep the container: it shows why it was killed
        "stream_output": False,  # the container and Prefect have the log
        **{name: settings.pop(name) for name in FIELDS},
        "container_create_kwargs": settings,
    }
    return {"job_configuration": job, "variables": {"type": "object", "properties": {}}}


def remove_old_containers() -> None:
    remove_ended(RUN_LABEL, older_than_hours=KEPT_HOURS)
