"""Scores of downstream tasks are those of a plain loop over the model, whichever way its ranks share it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.support.configs import read_plan
from tests.support.lm_eval_tasks import QUESTIONS, write_tasks
from tests.support.ranks import Ranks
from tests.support.tiny_run import tiny_run
from training.records.results import EvalReport, TaskScore


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny trained run whose config names the local tasks."""
    folder = tmp_path_factory.mktemp("runs")
    run_dir = tiny_run(folder / "run")
    greedy = [continued(run_dir, row["question"]) for row in QUESTIONS]
    tasks = write_tasks(folder / "tasks", continuations=[*greedy[:4], *["no"] * 5])
    plan = read_plan(run_dir)
    wanted = plan.config.evaluation.model_copy(update={"task_files": (str(tasks),), "prompts": ()})
    config = plan.config.model_copy(update={"evaluation": wanted})
    plan.model_copy(update={"config": config, "threads_per_rank": 1}).write(run_dir / "plan.json")
    return run_dir


def continued(run_dir: Path, question: str) -> str:
    """Up to a line's end, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "8").eval()
    ids = list(question.encode())
    for _ in range(3):
        ids.append(int(model(torch.tensor([ids[-32:]])).logits[0, -1].argmax()))
    tokenizer = Tokenizer.from_file(str(run_dir.parent / "shards-run" / "tokenizer" / "tokenizer.json"))
    return str(tokenizer.decode(ids[-3:])).partition("\n")[0]


def evaluated(run_dir: Path, **plan: Any) -> dict[str, TaskScore]:
    own = read_plan(run_dir)
    own.model_copy(update=plan).write(run_dir / "plan.json")
    try:
        Ranks(run_dir / "plan.json", program="training.evaluate").finish()
    finally:
        own.write(run_dir / "plan.json")
    return {score.task: score for score in EvalReport.read(run_dir / "eval.json").tasks}


def log_probabilities(model: Any, text: str, *, first: Sequence[int] = ()) -> np.ndarray:
    """Of each byte but the first, behind these tokens, looking at no more than the model's context."""
    ids = torch.tensor([[*first, *text.encode()]])
    logits = model(ids[:, :-1]).logits[0].log_softmax(-1).detach()
    return logits[range(ids.shape[1] - 1), ids[0, 1:]].double().numpy()


def test_scores_are_those_of_a_plain_loop(run_dir: Path) -> None:
    scores = evaluated(run_dir)
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "8").eval()
    right = 0
    for row in QUESTIONS:
        sums = []
        for choice in row["choices"]:
            whole = (row["question"] + choice)[-33:]  # context 32: 33 tokens have 32 before the last
            sums.append(log_probabilities(model, whole)[-len(choice) :].sum())
        right += int(np.argmax(sums)) == row["answer"]
    assert scores["endings"].metric == "acc"
    assert scores["endings"].value == pytest.approx(right / len(QUESTIONS))
    assert scores["endings"].samples == len(QUESTIONS)
    likelihood = sum(log_probabilities(model, row["question"], first=[256]).sum() for row in QUESTIONS)
    num_bytes = sum(len(row["question"].encode()) for row in QUESTIONS)
    assert scores["whole"].value == pytest.approx(-likelihood / np.log(2) / num_bytes, rel=1e-5)
    assert not scores["whole"].higher_is_better
    assert scores["continued"].value == pytest.approx(4 / 9)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp", *(pytest.param(axis, marks=pytest.mark.long) for axis in ("tp", "pp"))])
def test_two_ranks_give_the_scores_of_one(axis: str, run_dir: Path) -> None:
    mesh = {name: 2 if name == axis else 1 for name in ("pp", "dp", "tp")}
    alone = evaluated(run_dir)
    shared = evaluated(run_dir, mesh=mesh, ranks_per_host=(2,), micro_batches=(4,) * mesh["dp"])
    assert shared.keys() == alone.keys() == {"endings", "continued", "whole"}
    for task, score in alone.items():
        assert shared[task].value == pytest.approx(score.value, rel=1e-6), task
        assert shared[task].samples == score.samples
