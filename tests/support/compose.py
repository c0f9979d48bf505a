"""infra/compose.yaml as Docker Compose reads it: variables of .env filled in, anchors merged, override files on top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.repository import REPO

COMPOSE = REPO / "infra" / "compose.yaml"
WITH_DOCKER = REPO / "infra" / "compose.docker.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def read_compose(path: Path, settings: Mapping[str, str]) -> dict[str, Any]:
    """Raises KeyError for a `${NAME:?…}` that `settings` lacks, as Compose refuses it.

    A variable of a service that has no value gets that of `settings`; it is unset where they have none.
    """

    def value(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        return settings.get(name) or default if kind == "-" else settings[name]

    content: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, path.read_text()))
    for service in content["services"].values():
        named = service.get("environment", {})
        known = {name: settings.get(name) if value is None else value for name, value in named.items()}
        service["environment"] = {name: value for name, value in known.items() if value is not None}
    return content


def read_settings(folder: Path) -> dict[str, str]:
    """.env of a stack's folder."""
    return dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())


def read_secrets(folder: Path) -> dict[str, str]:
    """Passwords and tokens of a stack's folder; prefect_auth's without the user's name."""
    found = {path.name: path.read_text().strip() for path in (folder / "secrets").iterdir()}
    return {name: text.partition(":")[2] or text for name, text in found.items() if text}
