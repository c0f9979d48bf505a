"""README and docs name only what exists: files, modules, definitions, fields of the config, commands."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from flows.cli.command import main
from tests.support.code_map import PICTURE
from tests.support.pictures import stale
from tests.support.repository import REPO
from tests.test_imports import rows
from training.config.run import RunConfig

PAGES = (*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md")))
FOLDERS = "flows|tasks|training|infra|benchmarks|tests|docs"
SUFFIXES = "py|md|sh|svg|png|yaml|ini|Dockerfile"
per_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@per_page
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    files = [link.partition("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    assert [link for link in files if not (page.parent / link).exists()] == []


@per_page
def test_paths_lead_to_files(page: Path) -> None:
    named = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w\.(?:{SUFFIXES})\b", page.read_text())
    named += [f"tests/flows/{name}" for name in re.findall(r"(?<=, )test_\w+\.py", page.read_text())]
    assert [path for path in named if not (REPO / path).exists()] == []


@per_page
def test_modules_exist(page: Path) -> None:
    modules = [name.replace(".", "/") for name in re.findall(rf"python -m ((?:{FOLDERS})[\w.]*)", page.read_text())]
    assert [name for name in modules if not (REPO / f"{name}.py").exists() and not (REPO / name).is_dir()] == []


@per_page
def test_fields_of_the_config_exist(page: Path) -> None:
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    named = re.findall(rf"`({'|'.join(sections)})\.(?!json|onnx|safetensors)([a-z]\w+)(?:=[^`]*)?`", page.read_text())
    wrong = []
    for section, field in named:
        part = sections[section]
        if isinstance(part, type) and issubclass(part, BaseModel) and field not in part.model_fields:
            wrong.append(f"{section}.{field}")
    assert wrong == []


@per_page
def test_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = set(re.findall(r"^ {4}([a-z]+)", capsys.readouterr().out, re.M))
    assert {"pretrain", "serve"} <= commands
    text = page.read_text().replace("\n", " ")
    assert set(re.findall(r"(?<![./-])\bshardline ([a-z]+)", text)) - commands == set()


def test_one_version_is_named_everywhere() -> None:
    version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## ([\d.]+)", (REPO / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == version
    named = {"docs/installing.md": r"shardline-([\d.]+)-py3", "infra/compose.yaml": r"image: shardline-\w+:(\S+)"}
    for name, pattern in named.items():
        assert set(re.findall(pattern, (REPO / name).read_text())) == {version}, name


def test_the_map_points_at_definitions() -> None:
    rows_of_files = re.findall(r"^\| .+? \| (\[.+?) \| (`.+`) \|$", (REPO / "docs" / "code-map.md").read_text(), re.M)
    assert len(rows_of_files) > 20
    missing = []
    for links, names in rows_of_files:
        paths = [REPO / "docs" / link for link in re.findall(r"\]\((.+?)\)", links)]
        files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        text = "\n".join(file.read_text() for file in files)
        missing += [
            f"{links}: {name}"
            for name in re.findall(r"`(\w+)`", names)
            if not re.search(rf"^ *(?:async )?(?:def|class) {name}\b", text, re.M)
        ]
    assert missing == []


def test_the_picture_has_every_package() -> None:
    """`make map` draws it again."""
    drawn = set(re.findall(r'class="name">(\w+)', PICTURE.read_text()))
    assert drawn == {package.split(".")[1] for package in rows()} | {"infra"}


def test_every_package_says_what_it_is_about() -> None:
    """The site's map of the code lists these docstrings."""
    folders = [REPO / package.replace(".", "/") for package in rows()]
    files = [folder / "__init__.py" for folder in folders if folder.is_dir()]
    assert [str(file) for file in files if not ast.get_docstring(ast.parse(file.read_text()))] == []


def test_pictures_of_pages_have_the_words_of_the_code() -> None:
    assert stale() == {}, "`make pictures` makes them anew"
