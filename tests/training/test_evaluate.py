"""Evaluation is exact: the whole held-out split, the same whatever the number of ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import END, REPO, rank_env, run_ranks
from training.records import EvalReport, RunPlan
from training.shards import TokenStream


@pytest.fixture(scope="module")
def trained(make_run: Callable[..., Path], tiny_shards: Path) -> Path:
    """A trained run; its shards have a tokenizer, since evaluation samples text."""
    from tokenizers import Tokenizer, models

    vocabulary = {"<|endoftext|>": END, **{chr(0x4E00 + n): n for n in range(1, 61)}}
    (tiny_shards / "tokenizer").mkdir(exist_ok=True)
    Tokenizer(models.WordLevel(vocabulary)).save(str(tiny_shards / "tokenizer" / "tokenizer.json"))
    plan_path = make_run("trained", evaluation__sample_tokens=5, train__steps=30)
    run_ranks(plan_path)
    return plan_path


def evaluate(plan_path: Path, *, ranks: int) -> EvalReport:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "training.evaluate", str(plan_path)]
    done = subprocess.run(command, cwd=REPO, env=rank_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return EvalReport.read(plan_path.parent / "eval.json")


def by_hand(plan_path: Path) -> tuple[float, float]:
    """Mean loss and accuracy with one loop over transformers' model, window by window."""
    plan = RunPlan.read(plan_path)
    model = AutoModelForCausalLM.from_pretrained(plan_path.parent / "checkpoints" / "00000030").eval()
    stream, context = TokenStream(Path(plan.shards_dir), "validation"), plan.config.train.context
    loss, right, count = 0.0, 0, 0
    for start in range(0, len(stream) - 1, context):
        tokens = torch.from_numpy(stream.read(start, min(start + context + 1, len(stream))).astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        loss += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        right += int((logits.argmax(-1) == tokens[1:]).sum())
        count += len(tokens) - 1
    assert count == len(stream) - 1
    return loss / count, right / count


def test_one_and_two_ranks_give_the_figures_of_a_plain_loop(trained: Path, tmp_path: Path) -> None:
    expected_loss, expected_accuracy = by_hand(trained)
    for ranks in (1, 2):
        report = evaluate(trained, ranks=ranks)
        assert report.tokens == 450
        assert report.loss == pytest.approx(expected_loss, rel=1e-6)
        assert report.accuracy == expected_accuracy
        assert report.perplexity == pytest.approx(np.exp(expected_loss), rel=1e-5)
        assert report.bits_per_byte == pytest.approx(expected_loss * 450 / np.log(2) / 451, rel=1e-6)
        shutil.copy(trained.parent / "eval.json", tmp_path / f"{ranks}.json")
    first, second = (EvalReport.read(tmp_path / f"{ranks}.json") for ranks in (1, 2))
    assert first.samples == second.samples
    assert len(first.samples[0].text) > 0
