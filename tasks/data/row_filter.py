"""Selects the rows of a table or of JSON lines by an expression over their columns (data.where)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta
from jinja2.sandbox import SandboxedEnvironment, SecurityError

ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined)


class RowFilter:
    """An expression in Jinja's syntax, such as `metadata.score > 0.6 and lang in ['en', 'de']`."""

    def __init__(self, where: str) -> None:
        """Raise ValueError if `where` is no expression."""
        self.where = where
        try:
            self._test = ENVIRONMENT.compile_expression(where, undefined_to_none=False)
            self.columns = sorted(meta.find_undeclared_variables(ENVIRONMENT.parse("{{ (" + where + ") }}")))
        except TemplateSyntaxError as error:
            raise ValueError(
                f"data.where={where} is not an expression ({error}): write one over the columns, such as "
                "`score > 0.6 and lang == 'en'`"
            ) from None

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether the expression is true for the row. Raises ValueError if it has no value for this row."""
        try:
            return bool(self._test(**row))
        except (UndefinedError, SecurityError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"data.where={self.where} has no value here: {error}") from None
