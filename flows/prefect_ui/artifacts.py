"""Artifacts on Prefect's page of a run. If the server does not answer, the artifact is lost and the run goes on."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.runtime import flow_run

logger = logging.getLogger(__name__)


def show_pairs(rows: Sequence[tuple[str, str]], *, key: str, description: str) -> None:
    show_table([{"what": what, "value": value} for what, value in rows], key=key, description=description)


def show_table(rows: Sequence[Mapping[str, Any]], *, key: str, description: str) -> None:
    _create_or_warn(create_table_artifact, [dict(row) for row in rows], key=key, description=description)


def show_markdown(text: str, *, key: str, description: str, flow_run_id: str = "") -> None:
    """Show Markdown on the page of a flow run, by default of this one."""
    create = partial(_create_for, flow_run_id) if flow_run_id else create_markdown_artifact
    _create_or_warn(create, text, key=key, description=description)


def _create_for(flow_run_id: str, text: str, *, key: str, description: str) -> None:
    made = ArtifactCreate(type="markdown", data=text, key=key, description=description, flow_run_id=UUID(flow_run_id))
    with get_client(sync_client=True) as client:
        client.create_artifact(made)


def as_picture(path: Path, *, alt: str) -> str:
    """Return Markdown that contains the PNG: a browser elsewhere cannot read a path of this machine."""
    return f"![{alt}](data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()})"


def _create_or_warn(create: Callable[..., Any], content: Any, *, key: str, description: str) -> None:
    try:
        create(content, key=key, description=description)
    except Exception as error:
        logger.warning("Prefect did not accept the artifact %r (%s)", key, error)


def name_flow_run(name: str) -> None:
    """Rename the flow run. Prefect names it before the flow's first line, when the run has no ID yet."""
    if not flow_run.id:
        return
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(str(flow_run.id)), name=name)
    except Exception as error:
        logger.warning("Prefect did not accept the run's name, %s (%s)", name, error)
