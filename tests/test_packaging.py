"""A built wheel: what it contains, and that it works without a checkout, beside a user's files of the same names."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.presets import presets
from infra import images
from tasks.tracking.code_version import STAMP
from tests.support.repository import REPO
from tests.support.user_folder import UserFolder

BESIDE_PACKAGES = (
    ".gitignore",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "constraints.txt",
    "prefect.yaml",
)
NOT_OURS = ("tasks.py", "training.py", "flows/__init__.py", "infra/__init__.py")
LONGEST_RESOLUTION_S = 240  # it takes a minute, most of it downloads; ten and more where versions do not fit
Command = Callable[..., str]


def committed(folder: Path) -> None:
    """Make a repository of the folder, in which all files are committed."""
    git = ["git", "-C", str(folder), "-c", "user.name=a user", "-c", "user.email=user@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--allow-empty", "--message", "a commit"]):
        subprocess.run([*git, *words], check=True)


def commit_of(wheel: Path) -> str:
    """The commit of the sources that the fixture built the wheel from."""
    command = ["git", "-C", str(wheel.parent / "source"), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    copied = [*BESIDE_PACKAGES, *images.PACKAGES]
    subprocess.run(["cp", "-r", *(str(REPO / name) for name in copied), str(source)], check=True)
    committed(source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment that has the wheel, inside another project's repository.

    Its dependencies come from this environment: a .pth file names its site-packages, whose own .pth files are not read,
    so that the checkout that is installed here is not seen there.
    """
    folder = tmp_path_factory.mktemp("repository") / ".venv"
    committed(folder.parent)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return folder / "bin"


@pytest.fixture
def user_folder(tmp_path: Path, begun_home: Path) -> UserFolder:
    """A user's folder, with modules of the user's that bear the names of our packages."""
    user_folder = UserFolder(tmp_path, begun=begun_home)
    for name in NOT_OURS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('{name} of the user was imported')\n")
    return user_folder


@pytest.fixture
def run(environment: Path, user_folder: UserFolder) -> Command:
    """Runs a program of the environment in the user's folder; returns what it prints."""

    def run(program: str, *arguments: str) -> str:
        ours = ("SHARDLINE_", "MLFLOW_", "PREFECT_", "PYTHON")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        command = [str(environment / program), *arguments]
        done = subprocess.run(command, cwd=user_folder.folder, env=kept, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def test_a_wheel_has_every_file_and_images_have_every_page(wheel: Path) -> None:
    ours = {str(path.relative_to(REPO)) for package in images.PACKAGES for path in (REPO / package).rglob("*.*")}
    ours = {name for name in ours if (REPO / name).is_file() and "__pycache__" not in name}
    pages = {name for name in ours if ".html" in name}
    assert {"tasks/serving/demo_page.html", "tasks/reports/run_report.html.j2"} <= pages
    assert {
        "flows/prefect.yaml",
        "infra/train.Dockerfile",
        "infra/compose.yaml",
        "infra/project/constraints.txt",
    } <= ours
    content = zipfile.ZipFile(wheel)
    assert ours - set(content.namelist()) == set()
    assert [name for name in content.namelist() if name.endswith("licenses/LICENSE")]
    assert json.loads(content.read(f"tasks/tracking/{STAMP}")) == [commit_of(wheel), False]
    for image in ("head", "serve"):
        allowed = (REPO / "infra" / f"{image}.Dockerfile.dockerignore").read_text().splitlines()
        needed = {"!tasks/**/*.html", "!tasks/**/*.j2", "!flows/prefect.yaml"}
        assert needed <= set(allowed), "Docker copies only what these files allow"
    assert {page.split("/")[0] for page in pages} == {"tasks"}


@pytest.mark.slow
def test_an_installed_wheel_has_its_presets_and_plans_beside_modules_of_the_same_names(
    environment: Path, run: Command
) -> None:
    assert "pretrain" in run("shardline", "--help")
    assert "ddp" in run("shardline", "plan", "quickstart")
    program = """
import json, sys, flows.presets, infra.images, tasks, training
found = {name: flows.presets.load_config(name).name for name in flows.presets.presets()}
print(json.dumps([found, [module.__file__ for module in (flows.presets, infra.images, tasks, training)]]))
"""
    names, files = json.loads(run("python", "-P", "-c", program))
    assert set(names) == set(presets())
    assert [file for file in files if not Path(file).is_relative_to(environment.parent)] == []


@pytest.mark.slow
def test_an_installed_wheel_builds_the_images_of_a_checkout(run: Command, tmp_path: Path) -> None:
    run("python", "-P", "-c", "import infra.images; infra.images.write_context(open('context.tar', 'wb'))")
    expected = io.BytesIO()
    images.write_context(expected)
    assert (tmp_path / "context.tar").read_bytes() == expected.getvalue()

    run("shardline", "stack", "init", "stack")
    settings = dict(line.split("=", 1) for line in (tmp_path / "stack" / ".env").read_text().splitlines())
    sources = tmp_path / "stack" / "sources"
    assert settings["COMPOSE_FILE"] == str(sources / "infra" / "compose.yaml")
    services = yaml.safe_load((sources / "infra" / "compose.yaml").read_text())["services"].values()
    for build in (service["build"] for service in services if "build" in service):
        dockerfile = sources / "infra" / build["context"] / build["dockerfile"]
        words = [line.split()[1:-1] for line in dockerfile.read_text().splitlines() if line.startswith("COPY ")]
        copied = [word for line in words if not line[0].startswith("--") for word in line]
        assert {"pyproject.toml", "constraints.txt", "prefect.yaml", "flows"} <= set(copied)
        assert [name for name in copied if not (sources / name).exists()] == []
    mounted = [volume["source"] for service in services for volume in service.get("volumes", [])]
    ours = [name for name in mounted if name.startswith("./")]
    assert len(ours) > 3
    assert [name for name in ours if not (sources / "infra" / name).exists()] == []


@pytest.mark.slow
def test_an_installed_wheel_trains_beside_modules_of_the_same_names(
    wheel: Path, run: Command, user_folder: UserFolder
) -> None:
    settings = ("train.steps=4", "checkpoint.every_steps=4", "evaluation.every_steps=4")
    outcome = json.loads(run("shardline", "pretrain", user_folder.config.name, *settings, "--json"))
    assert outcome["version"] == 1
    tags = user_folder.mlflow.get_run(outcome["mlflow_run_id"]).data.tags
    assert tags["mlflow.source.git.commit"] == commit_of(wheel)
    assert tags["shardline.version"] == tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pip", ["pip==23.2.1", "pip"])  # the one that Python 3.11 brings, and the newest
def test_pip_finds_versions_that_fit_each_other(pip: str, wheel: Path, tmp_path: Path) -> None:
    """Without constraints, after torch, as docs/installing.md has it; a pip that walks through old versions is stopped.

    Nothing is installed. This environment's torch is linked to, so that pip takes it for the one installed first.
    """
    installed, new = (Path(sysconfig.get_path("purelib", vars=vars)) for vars in (None, {"base": str(tmp_path)}))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    for path in (installed / "torch", *installed.glob("torch-*.dist-info")):
        (new / path.name).symlink_to(path)
    this_pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "bin" / "python")]
    had = subprocess.run([*this_pip, "install", "--quiet", "--no-deps", pip], capture_output=True, text=True)
    if "No matching distribution" in had.stderr:
        pytest.skip(f"no package index has {pip}")
    assert had.returncode == 0, had.stderr
    command = [str(tmp_path / "bin" / "python"), "-m", "pip", "install", "--dry-run", f"{wheel}[train,orchestrate]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_RESOLUTION_S)
    assert done.returncode == 0, done.stderr
    (would_install,) = (line for line in done.stdout.splitlines() if line.startswith("Would install "))
    assert "mlflow-3" in would_install
    assert "shardline-" in would_install
    assert " torch-" not in would_install
