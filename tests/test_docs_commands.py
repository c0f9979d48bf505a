"""Every shell command of README and docs is run, or parsed where it needs what is not here (docs_commands.py)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.cli.command import main, parse_command
from flows.presets import evaluate_config, load_config, presets, serve_config, with_overrides
from tests.support.docs_commands import SHELL, Fence, commands_of, fences
from tests.support.local_servers import lasting_ports
from tests.support.repository import REPO
from training.config.run import RunConfig

SHELL_FENCES = [fence for fence in fences() if fence.language in SHELL]
QUICK = [fence for fence in SHELL_FENCES if fence.mark == "run" and fence.why != "slow"]
SLOW = [fence for fence in SHELL_FENCES if fence.mark == "run" and fence.why == "slow"]
KNOWN = {"shardline", "make", "cd", "export"}  # programs of which `parsed` fences may be made; `python -m` too


def test_every_fence_has_a_language_and_every_shell_fence_says_what_is_done_with_it() -> None:
    assert [fence.place for fence in fences() if not fence.language] == []
    assert [fence.place for fence in SHELL_FENCES if not fence.mark] == []
    assert [fence.place for fence in SHELL_FENCES if fence.mark != "run" and not fence.why] == []
    unread = [
        f"{fence.place}: {words[0]}"
        for fence in SHELL_FENCES
        if fence.mark == "parsed"
        for words in fence.commands
        if Path(words[0]).name not in KNOWN and words[1:2] != ["-m"]
    ]
    assert unread == [], "not known here: mark the fence `not run`"


@pytest.mark.parametrize("fence", SHELL_FENCES, ids=lambda fence: fence.place)
def test_our_commands_their_options_and_fields_exist(fence: Fence, capsys: pytest.CaptureFixture[str]) -> None:
    targets = {line.partition(":")[0] for line in (REPO / "Makefile").read_text().splitlines() if ": " in line}
    for words in fence.commands:
        program = Path(words[0]).name
        if program == "make":
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= targets, f"{fence.place}: {words}"
        elif program == "shardline" and words[1:] != ["--help"]:
            try:
                check_command(words[1:], exit_code=fence.why.removeprefix("exit "))
            except (SystemExit, ValueError) as error:
                raise AssertionError(f"{fence.place}: {words}: {error}\n{capsys.readouterr().err}") from error


def check_command(words: list[str], *, exit_code: str) -> None:
    options = parse_command(words)
    overrides = [text.replace("…", "X") for text in getattr(options, "overrides", [])]
    command = words[0]
    if command in ("pretrain", "plan", "quote", "compare") and options.preset in presets():
        load_config(options.preset, overrides)
    elif command in ("pretrain", "plan", "quote", "compare", "promote", "resume"):  # of a file, a version, a run
        with_overrides({}, overrides)
    elif command in ("serve", "generate"):
        serve_config([text for text in overrides if "=" in text])
    elif command == "evaluate":
        evaluate_config({}, overrides)


@pytest.mark.parametrize(
    "fence", [fence for fence in fences() if fence.language == "yaml"], ids=lambda fence: fence.place
)
def test_configs_are_accepted(fence: Fence) -> None:
    """Of YAML, what has sections of the config alone."""
    content = yaml.safe_load(fence.text)
    if isinstance(content, dict) and {*content} <= {*RunConfig.model_fields}:
        with_overrides(content, [])


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands find the repository's folders, and which keeps what they make."""
    for name in ("docs", "training"):
        (tmp_path / name).symlink_to(REPO / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "runs"))
    return tmp_path


@pytest.mark.parametrize("page", sorted({fence.page for fence in QUICK}), ids=lambda page: page.name)
def test_commands_run(page: Path, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours in this process, which has imported what they need."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    for fence in (fence for fence in QUICK if fence.page == page):
        codes = []
        for line in fence.lines:
            program, *words = next(commands_of(line))
            codes.append(main(words) if program == "shardline" else subprocess.run(["bash", "-c", line]).returncode)
        expected = int(fence.why.removeprefix("exit ") or 0)
        assert codes == [0] * (len(codes) - 1) + [expected], f"{fence.place}: {capsys.readouterr().err}"
    signal.signal(signal.SIGTERM, on_sigterm)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", sorted({fence.page for fence in SLOW}), ids=lambda page: page.name)
def test_a_tutorial_runs_from_top_to_bottom(page: Path, checkout: Path, measured_hardware: Path) -> None:
    (checkout / "runs").mkdir()
    shutil.copy(measured_hardware, checkout / "runs" / "hardware.json")
    program = checkout / "bin" / "shardline"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m flows.cli "$@"\n')
    program.chmod(0o755)
    (port,) = lasting_ports(1)
    script = "\n".join(fence.script for fence in SLOW if fence.page == page)
    unset = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"PATH": f"{program.parent}:{env['PATH']}", "PYTHONPATH": str(REPO)}
    ran = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script.replace("8000", str(port))], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-8000:]}"
    assert "champion" in ran.stdout
    assert '"text"' in ran.stdout, "the server answered"
