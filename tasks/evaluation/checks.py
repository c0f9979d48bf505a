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
from training.records.words import counted
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


def gpus_beside(config: RunConfig) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that evaluate checkpoints beside training; none if that is on CPUs.

    They are those after training's. Of a run whose ranks are not this machine's processes, none is known to be free.
    Raises ValueError, with the numbers, if training leaves too few.
    """
    wanted, gpus = config.evaluation.devices_beside, gpus_here() if config.launch.launcher == "local" else ()
    ranks = 1 if config.parallel.strategy == "single" else config.parallel.ranks or len(gpus)
    if gpus and wanted and ranks + wanted > len(gpus):
        raise ValueError(
            f"evaluation.checkpoints=beside needs {counted(wanted, 'GPU')} that training leaves free "
            f"(evaluation.checkpoint_devices), and training takes {ranks} of this machine's {len(gpus)}: set "
            "parallel.ranks to fewer, or evaluation.checkpoints=none"
        )
    return tuple(gpu.uuid for gpu in gpus[ranks : ranks + wanted])


def check_beside(config: RunConfig) -> None:
    """Raise ValueError, with the cure, if checkpoints cannot be evaluated beside training."""
    if not config.evaluation.devices_beside:
        return
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            "evaluation.checkpoints=beside evaluates on this machine, which has no torch: install it here, or set "
            "evaluation.checkpoints=none"
        )
    gpus_beside(config)
    for each in config.evaluation.held_out_sets:
        check_path(each.path, field="evaluation.held_out_sets")


def check_prompts(tokenizer: Path, encoding: TextEncoding, prompts: Iterable[str]) -> None:
    """Raise ValueError for a sample prompt that the tokenizer in this folder cannot encode."""
    encoder = TextEncoder(tokenizer, encoding.model_dump())
    for prompt in prompts:
        try:
            encoder.encode(prompt)
        except ValueError as error:
            raise ValueError(f"evaluation.prompts: {error}") from None
