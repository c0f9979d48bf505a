"""Who may import whom: training and infra are leaves that never meet, tasks is the only room that knows both."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
CONTRACT = {
    "recipe",
    "prediction",
    "memory",
    "machines",
    "step_time",
    "choice",
    "communication",
    "credentials",
    "config",
    "data_config",
    "decode_plan",
    "train_config",
    "launch_config",
    "host_check",
    "inventory",
    "known_gpus",
    "stand_in",
    "trial_record",
    "parallel_config",
    "records",
    "results",
    "evaluation_config",
    "triton_config",
    "export_config",
    "promotion_config",
    "serving_config",
    "shape",
    "plan",
    "cost",
    "layout",
    "packing",
    "precision",
    "shards",
    "shares",
    "replicas",
    "metrics",
    "node_record",
    "schedule",
    "limits",
}
FORBIDDEN = {
    "flows": {"torch", "mlflow", "docker", "infra", "deepspeed"},
    "tasks": {"torch", "deepspeed", "flows"},
    "training": {"prefect", "docker", "flows", "tasks", "infra", "datasets"},
    "infra": {"flows", "tasks", "training", "prefect", "mlflow", "torch"},
}


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(room: str, path: Path) -> list[str]:
    found = []
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top in FORBIDDEN[room]:
            found.append(f"{path.name}: {name}")
        if room in {"flows", "tasks"} and top == "training" and rest and rest.split(".")[0] not in CONTRACT:
            found.append(f"{path.name}: {name} is not in the contract")
        if room == "training" and path.stem in CONTRACT and top == "training" and rest.split(".")[0] not in CONTRACT:
            found.append(f"{path.name}: the contract imports {name}")
    return found


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_import_only_what_they_may(room: str) -> None:
    files = list((REPO / room).rglob("*.py"))
    assert files
    assert [violation for path in files for violation in violations(room, path)] == []


def test_a_planted_violation_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "launch.py"
    planted.write_text("def run():\n    import torch\n    from training.train import main\n")
    assert len(violations("tasks", planted)) == 2


def test_the_contract_loads_neither_torch_nor_prefect_nor_mlflow() -> None:
    code = (
        "import sys, " + ", ".join(f"training.{name}" for name in sorted(CONTRACT)) + "\n"
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
