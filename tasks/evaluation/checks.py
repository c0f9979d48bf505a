"""Checks `evaluation` before training: tasks and prompts that would fail after training are refused now."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tasks.data.sources import check_path
from tasks.hardware.machine import gpus_here
from tasks.workspace.paths import command
from training.config.run import RunConfig
from training.records.text_encoding import TextEncoding
from training.tokenizer.text_encoder import TextEncoder


def check_tasks(config: RunConfig) -> None:
    """Load the downstream tasks with their data. Raises ValueError, with the cure, if one cannot be loaded."""
    if not config.evaluation.has_tasks:
        return
    if config.objective == "masked":
        raise ValueError(
            "evaluation.tasks need the likelihood of a continuation, which a masked model cannot give: "
            "leave evaluation.tasks and evaluation.task_files empty, or train a causal model"
        )
    if config.launch.launcher in {"docker", "kubernetes"}:
        raise ValueError(
            "evaluation.tasks: the training image has no lm-evaluation-harness: leave them empty, and once the model "
            f"is registered run `{command('shardline')} evaluate {config.model_name}@champion --tasks NAME,…` here"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"evaluation.tasks need lm-evaluation-harness: `{command('pip')} install -c constraints.txt 'lm-eval'`"
        )
    program = [sys.executable, "-m", "training.evaluation.lm_eval_tasks", config.evaluation.model_dump_json()]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise (ValueError if done.returncode == 2 else RuntimeError)(lines[-1])


def check_beside(config: RunConfig) -> str:
    """Return the GPU that evaluates beside training, the one after training's; empty for CPUs: without GPUs, and where
    the ranks are not this machine's processes. Raises ValueError, with the cure, for what cannot work.
    """
    if config.evaluation.checkpoints == "none":
        return ""
    gpus = gpus_here() if config.launch.launcher == "local" else ()
    ranks = config.parallel.asked_ranks or len(gpus)
    if gpus and ranks >= len(gpus):
        raise ValueError(
            f"evaluation.checkpoints=beside needs a GPU that training leaves free, and training takes {ranks} of this "
            f"machine's {len(gpus)}: set parallel.ranks to fewer, or evaluation.checkpoints=none"
        )
    for path in config.evaluation.held_out_sets.values():
        check_path(path, field="evaluation.held_out_sets")
    return gpus[ranks].uuid if gpus else ""


def check_prompts(tokenizer: Path, encoding: TextEncoding, prompts: Iterable[str]) -> None:
    """Raise ValueError for a sample prompt that the tokenizer in this folder cannot encode."""
    encoder = TextEncoder(tokenizer, encoding.model_dump())
    for prompt in prompts:
        try:
            encoder.encode(prompt)
        except ValueError as error:
            raise ValueError(f"evaluation.prompts: {error}") from None
