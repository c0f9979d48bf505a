"""A program that tests fork says, and does at its end, what it does when it is started anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.forked import Forked, run_program, set_by_imports

pytestmark = pytest.mark.slow

SPEAKING = "tests.programs.speaking"


def test_a_forked_program_says_and_returns_what_a_started_one_does() -> None:
    command, environment = [sys.executable, "-m", SPEAKING, "one", "two words"], os.environ | {"TO": "both"}
    started = subprocess.run(
        command, env=environment | set_by_imports, capture_output=True, text=True, start_new_session=True
    )
    forked = run_program(command, env=environment)
    assert started.returncode == 3
    assert started.stdout.splitlines()[1:] == ["from a thread", "at its end"]
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, started.stdout, started.stderr)


def test_one_that_is_watched_ends_with_its_code_or_its_signal() -> None:
    spoken, _ = Forked(SPEAKING, "one").communicate(timeout=60)
    assert "at its end" in spoken
    waiting = Forked(SPEAKING, "wait")
    assert "['wait']" in waiting.stdout.readline()
    waiting.send_signal(signal.SIGKILL)
    waiting.wait(60)
    assert waiting.returncode == -signal.SIGKILL
