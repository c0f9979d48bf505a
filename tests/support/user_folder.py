"""A user's folder, and the real command in it: what the tests of the whole pipeline share."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient

from tests.support.forked import run_program
from tests.support.ranks import losses

DEADLINE_S = 120
CONFIG = {
    "name": "verses",
    "data": {"tokenizer": {"kind": "bpe", "vocab_size": 300}, "split": "documents", "validation_fraction": 0.2},
    "model": {"layers": 2, "width": 64, "heads": 4, "dropout": 0.1},
    "train": {"steps": 60, "context": 32, "global_batch": 8, "learning_rate": 0.003, "warmup_steps": 5},
    "parallel": {"strategy": "ddp", "precision": "fp32"},
    "checkpoint": {"every_steps": 20},
    "evaluation": {"every_steps": 30, "prompts": ["the "], "sample_tokens": 16},
    "export": {"latency_seconds": 0.2},
}

# The export is done in 1 s and not in 9, and nothing is generated: for runs of which only the end matters.
AS_FILES = ("model.architecture=bert", "export.onnx_up_to_gib=0")


class UserFolder:
    """A user's folder: a corpus, a config, a SHARDLINE_HOME of its own.

    `begun`: a home to begin with, which is copied; without one the first run measures this machine and makes tables.
    """

    def __init__(self, folder: Path, *, begun: Path | None = None) -> None:
        self.folder, self.home = folder, folder / "runs"
        self.environment: dict[str, str] = {}  # of each command
        if begun is not None:
            shutil.copytree(begun, self.home)
        self.corpus = folder / "texts"
        self.corpus.mkdir()
        words = ["the", "sea", "sky", "a", "ship", "sails", "under", "stars", "and", "winds", "carry", "songs"]
        rng = random.Random(5)
        for number in range(40):
            lines = [" ".join(rng.choices(words, k=8)) for _ in range(12)]
            (self.corpus / f"{number:02d}.txt").write_text("\n".join(lines) + "\n")
        self.config = folder / "verses.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG | {"data": CONFIG["data"] | {"path": str(self.corpus)}}))

    def _command(self, arguments: tuple[str, ...], environment: dict[str, str]) -> dict[str, Any]:
        """On servers of its own, unless `environment` names others."""
        unset = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME")
        env = {key: value for key, value in os.environ.items() if key not in unset}
        env |= {"SHARDLINE_HOME": str(self.home)} | self.environment | environment
        return {"args": [sys.executable, "-m", "flows.cli", *arguments], "env": env}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """A command that the test watches, signals or kills."""
        return subprocess.Popen(
            **self._command(arguments, environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, expect: int = 0, **environment: str) -> tuple[str, str]:
        """A command to its end: stdout and stderr."""
        done = run_program(**self._command(arguments, environment), timeout=600)
        assert done.returncode == expect, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    def run_dirs(self) -> list[Path]:
        return sorted(path.parent for path in self.home.glob("*/run.json"))

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.home}/mlflow.db")

    def mlflow_run(self, run_dir: Path) -> Any:
        return self.mlflow.get_run(json.loads((run_dir / "run.json").read_text())["mlflow_run_id"])

    def prefect_states(self) -> dict[str, str]:
        """Flow run ID -> state type, as Prefect's own database has them."""
        with closing(sqlite3.connect(self.home / "prefect" / "prefect.db")) as db:
            return dict(db.execute("select id, state_type from flow_run").fetchall())


def wait_for_step(user_folder: UserFolder, process: subprocess.Popen[str], known: list[Path], step: int) -> Path:
    """The new run's folder, once it has logged `step`."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        for run_dir in user_folder.run_dirs():
            started = run_dir not in known and (run_dir / "metrics.jsonl").exists()
            if started and max(losses(run_dir / "plan.json"), default=0) >= step:
                return run_dir
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not logged within {DEADLINE_S} s")
