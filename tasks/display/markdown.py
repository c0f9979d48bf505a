"""Text in Markdown that Prefect and MLflow show: what comes from configs, paths and errors must not become markup."""

from __future__ import annotations

import re

MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")


def escape_markdown(text: str) -> str:
    return MARKUP.sub(r"\\\1", text)
