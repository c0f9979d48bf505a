"""Who may import whom: rooms, the packages in them, and the files in those, in one order without circles.

Each row of `PACKAGES` lists packages that may import those of the rows before theirs, and none of their own row or of
a later one. An import inside a function, or for type checking, counts like any other.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

# Per room: the other rooms that it may import, and libraries that it may not.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "infra": (set(), {"prefect", "mlflow", "torch"}),
    "training": (set(), {"prefect", "docker", "datasets"}),
    "tasks": ({"training", "infra"}, {"torch", "deepspeed"}),
    "flows": ({"training", "tasks"}, {"torch", "mlflow", "docker", "deepspeed"}),
}
TORCH_FREE = (
    "config",
    "records",
    "store",
    "shards",
    "tracking",
    "tokenizer",
    "facts",
    "planner",
    "node",
)  # what a head node imports of training
PACKAGES: dict[str, tuple[str, ...]] = {
    "training": (
        "facts",
        "config",
        "records store",
        "tokenizer",
        "shards tracking",
        "planner node",
        "data hardware runtime exports",
        "models",
        "strategies",
        "checkpoint monitoring",
        "inference",
        "evaluation trainer",
        "build_engine measure",
        "train evaluate blame export generate",
    ),
    "tasks": (
        "workspace display",
        "runs hardware",
        "tracking store",
        "planning registry",
        "launch data inference comparison",
        "evaluation serving",
        "promotion operations reports",
    ),
    "flows": (
        "presets",
        "servers",
        "prefect_ui",
        "stages",
        "promote",
        "pretrain",
        "compare nightly prune reconcile reproduce",
        "cli",
    ),
}
MOST_FILES = 20
Graph = Mapping[str, set[str]]


def modules(repo: Path) -> dict[str, Path]:
    """Dotted name -> file, of all rooms."""
    files = (path for room in ROOMS for path in (repo / room).rglob("*.py"))
    return {".".join(path.relative_to(repo).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names that a file imports anywhere."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def file_graph(repo: Path) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports."""
    known = modules(repo)

    def module_of(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    return {
        name: {found for found in map(module_of, imported(path)) if found not in {"", name, *ROOMS}}
        for name, path in known.items()
    }


def package_of(module: str) -> str:
    """`tasks.launch` of tasks.launch.local, `flows.compare` of the file of that name; infra is one package."""
    return "infra" if module.startswith("infra") else ".".join(module.split(".")[:2])


def package_graph(files: Graph) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {package_of(name): set() for name in files if name not in ROOMS}
    for name, others in files.items():
        for other in others:
            if package_of(other) != package_of(name):
                graph[package_of(name)].add(package_of(other))
    return graph


def circle(graph: Graph) -> list[str]:
    """One circle, from a node back to itself; empty if there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def rows() -> dict[str, int]:
    """`tasks.launch` -> its row in PACKAGES."""
    return {
        f"{room}.{name}": number
        for room, lines in PACKAGES.items()
        for number, names in enumerate(lines)
        for name in names.split()
    }


def violations(repo: Path) -> list[str]:
    """What the tables do not allow, one sentence each."""
    found = []
    files, row = file_graph(repo), rows()
    for name, path in modules(repo).items():
        room = name.split(".")[0]
        found += [f"{name} imports {library}" for library in imported(path) if library.split(".")[0] in ROOMS[room][1]]
        for other in files[name]:
            other_room, mine, theirs = other.split(".")[0], package_of(name), package_of(other)
            if other_room != room and other_room not in ROOMS[room][0]:
                found.append(f"{name} imports {other}: {room} may not import {other_room}")
            if (
                other_room == "training"
                and other.split(".")[1] not in TORCH_FREE
                and (room != "training" or name.split(".")[1] in TORCH_FREE)
            ):
                found.append(f"{name} imports {other}, which may load torch")
            if other_room == room and mine != theirs and row.get(theirs, 0) >= row.get(mine, 0):
                found.append(f"{name} imports {other}: {theirs} is not below {mine}")
    return found


def test_rooms_and_packages_import_only_what_is_below_them() -> None:
    assert violations(REPO) == []


def test_the_table_names_every_package() -> None:
    named = {package_of(name) for name in modules(REPO) if name not in ROOMS} - {"infra"}
    assert set(rows()) == named


def test_no_files_and_no_packages_import_each_other_in_a_circle() -> None:
    files = file_graph(REPO)
    assert circle(files) == []
    assert circle(package_graph(files)) == []


def test_no_package_is_a_hall() -> None:
    sizes = Counter(str(path.parent.relative_to(REPO)) for path in modules(REPO).values())
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


@pytest.mark.parametrize(
    ("where", "line", "sentence"),
    [
        ("tasks/runs/planted.py", "def run():\n    import torch", "tasks.runs.planted imports torch"),
        ("tasks/runs/planted.py", "import flows.presets", "tasks may not import flows"),
        ("infra/planted.py", "from training.config import run", "infra may not import training"),
        ("tasks/runs/planted.py", "from training.models import freezing", "which may load torch"),
        ("training/node/planted.py", "from training.runtime import mesh", "which may load torch"),
        (
            "tasks/runs/planted.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tasks.launch.local import run_program",
            "tasks.launch is not below tasks.runs",
        ),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, where: str, line: str, sentence: str) -> None:
    for name in (
        "flows/presets.py",
        "training/config/run.py",
        "training/models/freezing.py",
        "training/runtime/mesh.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tasks" / "launch").mkdir(parents=True)
    (tmp_path / "tasks" / "launch" / "local.py").touch()
    (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / where).write_text(line + "\n")
    assert [found for found in violations(tmp_path) if sentence in found]


def test_a_planted_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_half_without_torch_loads_neither_torch_nor_prefect_nor_mlflow() -> None:
    names = [name for name in modules(REPO) if name.startswith(tuple(f"training.{part}" for part in TORCH_FREE))]
    loaded = [name for name in names if not name.endswith("__main__")]
    assert len(loaded) > len(TORCH_FREE)
    code = (
        f"import sys, {', '.join(loaded)}\n"
        "print(sorted({'torch', 'prefect', 'mlflow', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "[]"


def test_help_answers_without_heavy_libraries() -> None:
    code = (
        "import sys, flows.cli.command\n"
        "try:\n    flows.cli.command.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'prefect', 'mlflow', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip().endswith("[]")
