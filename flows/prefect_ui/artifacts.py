"""Artifacts on Prefect's page of a run. If the server does not answer, the artifact is lost and the run goes on."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.runtime import flow_run

from flows.prefect_ui.tell import tell_prefect
from tasks.display.markdown import escape_markdown


def show_pairs(rows: Sequence[tuple[str, str]], *, key: str, description: str) -> None:
    """Show the rows as Markdown, whose lines wrap; those of Prefect's tables do not."""
    lines = [f"| {escape_markdown(what)} | {escape_markdown(' '.join(value.split()))} |" for what, value in rows]
    show_markdown("\n".join(["| | |", "| --- | --- |", *lines]), key=key, description=description)


def show_table(rows: Sequence[Mapping[str, Any]], *, key: str, description: str) -> None:
    _create(create_table_artifact, [dict(row) for row in rows], key=key, description=description)


def show_markdown(text: str, *, key: str, description: str, flow_run_id: str = "") -> None:
    """Show Markdown on the page of a flow run, by default of this one."""
    create = partial(_create_for, flow_run_id) if flow_run_id else create_markdown_artifact
    _create(create, text, key=key, description=description)


def _create_for(flow_run_id: str, text: str, *, key: str, description: str) -> None:
    made = ArtifactCreate(type="markdown", data=text, key=key, description=description, flow_run_id=UUID(flow_run_id))
    with get_client(sync_client=True) as client:
        client.create_artifact(made)


def as_picture(path: Path, *, alt: str) -> str:
    """Return Markdown that contains the PNG: a browser elsewhere cannot read a path of this machine."""
    return f"![{alt}](data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()})"


def _create(create: Callable[..., Any], content: Any, *, key: str, description: str) -> None:
    tell_prefect(f"the artifact {key!r}", partial(create, content, key=key, description=description))


def name_flow_run(name: str) -> None:
    """Rename the flow run. Prefect names it before the flow's first line, when the run has no ID yet."""

    def rename() -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(str(flow_run.id)), name=name)

    if flow_run.id:
        tell_prefect(f"the run's name, {name}", rename)
