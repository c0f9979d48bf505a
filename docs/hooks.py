"""What MkDocs does for the site beyond copying docs/: `mkdocs.yml` names this file.

- Makes the reference from the code: every field of the config, every command, every package,
  every kind of file that a corpus may hold or may not, every metric for Prometheus.
- Adds CONTRIBUTING, CHANGELOG and SECURITY of the repository's top.
- Links that lead out of docs/ lead to files of the repository: to `repo_url` where mkdocs.yml has one, else to nothing,
  and the file's path is shown in place of the link.
"""

from __future__ import annotations

import argparse
import ast
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from flows.cli.command import make_parser
from tasks.data.contents import CONTENTS, FORMATS
from tasks.data.decompression import COMPRESSIONS
from tasks.operations.run_metrics import RunMetrics
from training.config.run import RunConfig
from training.config.serving import ServeConfig

REPO = Path(__file__).parents[1]
FROM_THE_TOP = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
}
# The commands whose overrides are not those of a run: a field that a run has too is listed once.
CONFIGS: dict[str, type[BaseModel]] = {
    "A run: pretrain, plan, resume, compare": RunConfig,
    "A server: serve, generate": ServeConfig,
}
TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
TYPES |= {"array": "list", "object": "mapping", "null": "null"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {"reference/config.md": config_reference(), "reference/commands.md": command_reference()}
    pages |= {"reference/files.md": file_reference(), "reference/metrics.md": metric_reference()}
    pages |= {place: (REPO / name).read_text() for name, place in FROM_THE_TOP.items()}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "code-map.md":
        markdown += package_table()
    return site_links(markdown, place=page.file.src_uri, repo_url=config.repo_url or "")


def site_links(markdown: str, *, place: str, repo_url: str = "") -> str:
    """The page with links that MkDocs can follow; `place` is the page's path in docs/."""
    at_the_top = {place: name for name, place in FROM_THE_TOP.items()}
    folder = posixpath.dirname(at_the_top.get(place, f"docs/{place}"))

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link["text"], link["target"], link["anchor"] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in FROM_THE_TOP or path.startswith("docs/"):
            page_path = FROM_THE_TOP.get(path, path.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(page_path, posixpath.dirname(place) or '.')}{anchor})"
        if repo_url:
            return f"[{text}]({repo_url}/blob/main/{path}{anchor})"
        names_it = text.strip("`").replace("\\", "").rstrip("/") in (path, posixpath.basename(path))
        return f"`{path}`" if names_it else f"{text} (`{path}`)"

    return re.sub(r"(?<!!)\[(?P<text>[^]]+)\]\((?P<target>[^):#\s]+)(?P<anchor>#[^)\s]*)?\)", replaced, markdown)


def config_reference() -> str:
    lines = [
        "# Fields of the config",
        "A field is set in a YAML file or on the command line as `section.field=value`, and in the form of Prefect's "
        "pages. `shardline plan --fields` prints this list. Every field has a default.",
    ]
    seen: set[str] = set()
    for commands, config in CONFIGS.items():
        schema = config.model_json_schema()
        fields = [field for field in _fields(schema, schema.get("$defs", {})) if field[0] not in seen]
        seen |= {name for name, _, _ in fields}
        lines.append(f"## {commands}")
        section = ""
        for name, kind, field in fields:
            if name.rpartition(".")[0] != section:
                section = name.rpartition(".")[0]
                lines.append(f"### {section}")
            default = f"default `{_yaml(field['default'])}`" if "default" in field else "must be given"
            lines += [f"#### `{name}`", f"{kind}; {default}", field["description"]]
    return "\n\n".join(lines) + "\n"


def _fields(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(section.field, its type in words, its schema); sections after the fields beside them, entries of lists last."""
    below = []
    for name, field in schema.get("properties", {}).items():
        section, entry = _definition(field, definitions), _definition(field.get("items", {}), definitions)
        if "properties" in section:
            below.append((section, f"{prefix}{name}."))
            continue
        yield f"{prefix}{name}", _type_words(field, definitions), field
        if "properties" in entry:
            below.append((entry, f"{prefix}{name}[]."))
    for part, its_prefix in below:
        yield from _fields(part, definitions, its_prefix)


def _definition(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference names; the field's own where it names none."""
    name = field.get("$ref", "").rpartition("/")[2]
    return definitions[name] if name else field


def _type_words(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    field = _definition(field, definitions)
    if "anyOf" in field:
        words = [_type_words(part, definitions) for part in field["anyOf"]]
        return " or ".join(dict.fromkeys(words))
    choices = field.get("enum", [field["const"]] if "const" in field else [])
    return " or ".join(f"`{choice}`" for choice in choices) or TYPES[field["type"]]


def _yaml(value: Any) -> str:
    """A default as a person writes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" or not isinstance(value, str) else value


def file_reference() -> str:
    suffixes: dict[str, list[str]] = {}
    for suffix, kind in FORMATS.items():
        suffixes.setdefault(kind, []).append(f"`{suffix}`")
    read = _table(("read as", "names"), ((kind, " ".join(names)) for kind, names in suffixes.items()))
    refused = _table(("it is", "what to do"), ((content.what, str(content.cure)) for content in CONTENTS))
    return f"""# Files of a corpus

What a file is, its first bytes say; its name is asked where these cannot tell ([what is read](../data.md)).

{read}

Compressed: {" ".join(f"`{suffix}`" for suffix in COMPRESSIONS)}. Refused, or with `data.on_error=skip` left out:

{refused}
"""


def metric_reference() -> str:
    found = sorted(RunMetrics(REPO, keep_s=0).collect(), key=lambda metric: metric.name)
    names = [f"`{metric.name}{'_total' if metric.type == 'counter' else ''}`" for metric in found]
    table = _table(("metric", "what it is"), zip(names, (metric.documentation for metric in found), strict=True))
    about = "`shardline metrics` serves these for Prometheus ([alerts and metrics](../alerts.md))."
    return f"# Metrics of runs\n\n{about} Those of runs have the labels `run` and `strategy`.\n\n{table}\n"


def package_table() -> str:
    """Return a table of the packages, each with the first paragraph of its docstring."""
    files = [path for room in ("flows", "tasks", "training") for path in sorted((REPO / room).glob("*/__init__.py"))]
    about = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in files]
    first = [" ".join(text.partition("\n\n")[0].split()) for text in about]
    names = [f"`{path.parent.relative_to(REPO)}`" for path in files]
    return "\n" + _table(("package", "what it is about"), zip(names, first, strict=True)) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def command_reference() -> str:
    lines = [
        "# Commands",
        "`shardline COMMAND --help` prints the same. Results go to stdout, logs to stderr. Exit codes: 0 done, 2 bad "
        "input, 1 failed, 130 stopped. [Which command is for what](../commands.md)",
    ]
    for name, parser in _commands(make_parser()):
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        about = str(parser.description)
        lines += [f"## {name}", f"{about[:1].upper()}{about[1:]}.", f"`{usage}`"]
        rows = [
            (f"`{_spelling(action)}`", (action.help or "").replace("|", chr(92) + "|"))
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if rows:
            lines.append(_table(("argument", "meaning"), rows))
    return "\n\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that has none below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _commands(below)
            return
    yield parser.prog, parser


def _spelling(action: argparse.Action) -> str:
    place = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    options = ", ".join(action.option_strings)
    if action.nargs == 0:
        return options
    return f"{options} {place}" if options else place
