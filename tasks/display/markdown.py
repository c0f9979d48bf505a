"""Markdown for Prefect and MLflow: text from configs, paths and errors is escaped, so that it is not markup."""

from __future__ import annotations

import re

MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")


def escape_markdown(text: str) -> str:
    return MARKUP.sub(r"\\\1", text)
