"""Selects the rows of a table or of JSON lines by an expression over their columns (data.where)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, nodes
from jinja2.environment import TemplateExpression
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

ROW = "row"  # the only name in a compiled expression: every column is an item of it
COLUMN = "column"  # a filter that names a column by a text: 'my score'|column


class _Rows(SandboxedEnvironment):
    """Finds the items of a row, and no method by a column's name."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        if not callable(found):
            return found
        keys = list(obj) if isinstance(obj, Mapping) else []
        only = f", only {', '.join(map(repr, keys))}" if keys else ""
        odd = next((key for key in map(str, keys) if not key.isidentifier()), None)
        cure = f"; {odd!r}|{COLUMN} is that column" if odd is not None else ""
        return self.undefined(f"there is no {argument!r}{only}{cure}")


ENVIRONMENT = _Rows(undefined=StrictUndefined)
ENVIRONMENT.globals.clear()
ENVIRONMENT.filters[COLUMN] = str  # is known to the parser; _Columns takes its place


class _Columns(NodeTransformer):
    """Makes each name, and each text with the filter `column`, an item of the row; the names of all are `found`."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        match node:
            case nodes.Name():
                return self._item(node.name)
            case nodes.Filter(name="column", node=nodes.Const(value=str(name))):
                return self._item(name)
            case nodes.Call(node=nodes.Getattr(attr=method)):
                self.generic_visit(node)
                assert isinstance(node.node, nodes.Getitem)
                node.node = nodes.Getattr(node.node.node, method, "load")
                return node
        self.generic_visit(node)
        return nodes.Getitem(node.node, nodes.Const(node.attr), "load") if isinstance(node, nodes.Getattr) else node

    def _item(self, name: str) -> nodes.Expr:
        self.found.add(name)
        return nodes.Getitem(nodes.Name(ROW, "load"), nodes.Const(name), "load")


class RowFilter:
    """An expression in Jinja's syntax, such as `metadata.score > 0.6 and lang in ['en', 'de']`."""

    def __init__(self, where: str) -> None:
        """Raise ValueError if `where` is no expression."""
        self.where, columns = where, _Columns()
        try:
            parser = Parser(ENVIRONMENT, where, state="variable")
            expression = parser.parse_expression()
            if not parser.stream.eos:
                raise TemplateSyntaxError("it goes on after its end", parser.stream.current.lineno)
            result = nodes.Assign(nodes.Name("result", "store"), columns.visit(expression), lineno=1)
            template = nodes.Template([result], lineno=1)
            template.set_environment(ENVIRONMENT)
            self._test = TemplateExpression(ENVIRONMENT.from_string(template), undefined_to_none=False)
            written = {word for _, kind, word in ENVIRONMENT.lex("{{" + where + "}}") if kind == "name"}
        except TemplateSyntaxError as error:
            raise ValueError(
                f"data.where={where} is not an expression ({error}): write one over the columns, such as "
                f"`score > 0.6 and lang == 'en'`; 'my score'|{COLUMN} is a column whose name is no plain word"
            ) from None
        self.columns = sorted(columns.found)
        self._constants = {word for word in written - columns.found if word.lower() in ("true", "false", "none")}

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError if a column's name is a constant in the expression."""
        if both := self._constants.intersection(names):
            name = min(both)
            raise ValueError(
                f"data.where={self.where} has {name}, which is a constant and a column here: write '{name}'|{COLUMN} "
                f"for the column, or {name.swapcase()[0]}{name[1:]} for the constant"
            )

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether the expression is true for the row. Raises ValueError if it has no value for this row."""
        self.check_names(row)
        try:
            return bool(self._test(**{ROW: row}))
        except (UndefinedError, SecurityError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"data.where={self.where} has no value here: {error}") from None
