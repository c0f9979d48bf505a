"""Evaluation is exact: the whole held-out split, the same whatever the number of ranks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from tests.support.configs import read_plan
from tests.support.layouts import LAYOUTS
from tests.support.plain_torch import by_hand
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny_run import tiny_run
from tests.support.tiny_shards import END, MakeRun
from training.data.held_out import held_out_by_source
from training.models.language_model import build_model
from training.records.plan import RunPlan
from training.records.results import EvalReport
from training.shards.packing import BY_DOCUMENT
from training.shards.stream import TokenStream


def trained_model(plan_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(plan_path.parent / "checkpoints" / "00000030").eval()


@pytest.fixture(scope="module")
def trained(make_run: MakeRun) -> Path:
    plan_path = make_run("trained", evaluation__sample_tokens=5, train__steps=30)
    run_ranks(plan_path)
    return plan_path


def evaluate(plan_path: Path, *, ranks: int) -> EvalReport:
    Ranks(plan_path, program="training.evaluate", ranks=ranks).finish()
    return EvalReport.read(plan_path.parent / "eval.json")


def test_replicas_of_unlike_shape_give_the_figures_of_one_rank(make_run: MakeRun) -> None:
    ranks, layout = LAYOUTS["unlike"]
    settings = {"model__layers": 4, "train__steps": 2, "train__micro_batch": 1, "evaluation__sample_tokens": 5}
    plan_path = make_run("unlike", ranks=ranks, **settings, **layout)
    run_ranks(plan_path)
    many, one = evaluate(plan_path, ranks=ranks), evaluate(plan_path, ranks=1)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert (many.tokens, many.accuracy, many.samples) == (one.tokens, one.accuracy, one.samples)


def test_one_and_two_ranks_give_the_figures_of_a_plain_loop(trained: Path, tmp_path: Path) -> None:
    losses, right = by_hand(trained, trained_model(trained))
    expected_loss = losses.mean()
    of_two = (np.arange(1, 451) >= 90) & (np.arange(1, 451) < 290)  # by the target's place; the first is no target
    for ranks in (1, 2):
        report = evaluate(trained, ranks=ranks)
        assert report.tokens == 450
        assert report.loss == pytest.approx(expected_loss, rel=1e-6)
        assert report.accuracy == right.mean()
        assert report.perplexity == pytest.approx(np.exp(expected_loss), rel=1e-5)
        assert report.bits_per_byte == pytest.approx(expected_loss * 450 / np.log(2) / 451, rel=1e-6)
        assert [(source.source, source.tokens, source.text_bytes) for source in report.sources] == [
            ("one.txt", 250, 251),
            ("two.txt", 200, 200),
        ]
        for source, targets in zip(report.sources, (~of_two, of_two), strict=True):
            assert source.loss == pytest.approx(losses[targets].mean(), rel=1e-6)
            assert source.accuracy == right[targets].mean()
            bits = losses[targets].sum() / np.log(2) / source.text_bytes
            assert source.bits_per_byte == pytest.approx(bits, rel=1e-6)
        assert sum(source.loss * source.tokens for source in report.sources) == pytest.approx(report.loss * 450)
        shutil.copy(trained.parent / "eval.json", tmp_path / f"{ranks}.json")
    first, second = (EvalReport.read(tmp_path / f"{ranks}.json") for ranks in (1, 2))
    assert first.samples == second.samples
    assert len(first.samples[0].text) > 0


def test_ranks_that_share_a_model_have_the_figures_of_one_rank(trained: Path, tmp_path: Path) -> None:
    """Under fsdp as training had it, without optimizer state; what were cp peers take sequences of their own."""
    losses, right = by_hand(trained, trained_model(trained))
    shutil.copytree(trained.parent, tmp_path / "run")
    plan = RunPlan.read(trained)
    mesh = {"pp": 1, "dp": 1, "cp": 2, "tp": 1}
    shared = {"mesh": mesh, "ranks_per_host": (2,), "micro_batches": (2,), "strategy": "fsdp"}
    plan.model_copy(update=shared).write(tmp_path / "run" / "plan.json")
    run_ranks(tmp_path / "run" / "plan.json", program="training.evaluate")
    report = EvalReport.read(tmp_path / "run" / "eval.json")
    assert report.loss == pytest.approx(losses.mean(), rel=1e-6)
    assert report.accuracy == right.mean()
    assert [source.tokens for source in report.sources] == [250, 200]


@torch.no_grad()
def test_a_masked_model_has_the_loss_of_its_masked_tokens_and_no_bits_per_byte(tmp_path: Path) -> None:
    """And the log says meanwhile how far the evaluation is."""
    run_dir = tiny_run(tmp_path / "run", architecture="bert")
    ranks = Ranks(run_dir / "plan.json", program="tests.programs.talkative_evaluate")
    ranks.finish()
    line = r"PROGRESS evaluating held-out text: \d+ of 2 batches \(\d+%\) in .* s, about .* s left"
    assert re.search(line, ranks.log()), ranks.log()
    report, plan = EvalReport.read(run_dir / "eval.json"), read_plan(run_dir)
    model, loss, count = AutoModelForMaskedLM.from_pretrained(run_dir / "checkpoints" / "8").eval(), 0.0, 0
    for _, batch in held_out_by_source(plan, rank=0, world_size=1, device=torch.device("cpu")):
        assert batch.documents is not None
        lengths = (batch.documents >= 0).sum(1).tolist()
        for row, here in enumerate(map(slice, filter(None, lengths))):  # the last batch is filled up with empty rows
            logits, targets = model(batch.inputs[row : row + 1, here]).logits[0], batch.targets[row, here]
            loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += int((targets >= 0).sum())
    assert report.tokens == count > 40
    assert report.loss == pytest.approx(loss / count, rel=1e-5)
    assert (report.bits_per_byte, report.samples) == (None, ())


def apart(plan: RunPlan) -> Iterator[np.ndarray]:
    """Tokens of each stretch that is to be scored by itself: the first is only looked at."""
    stream, context = TokenStream(Path(plan.shards_dir), "validation"), plan.config.train.context
    tokens = stream.read(0, len(stream)).astype(np.int64)
    documents = stream.document_ids(0, len(stream)).tolist()
    if plan.config.train.packing in BY_DOCUMENT:
        for number in range(documents[-1] + 1):
            document = np.array([END, *(t for t, d in zip(tokens, documents, strict=True) if d == number)])
            for start in range(0, len(document) - 1, context):
                yield document[start : start + context + 1]
    else:
        for start in range(0, len(tokens) - 1, context):
            places = np.arange(start + 1, min(start + context + 1, len(tokens)))
            for number in sorted({documents[place] for place in places}):
                own = [place for place in places if documents[place] == number]
                yield tokens[own[0] - 1 : own[-1] + 1]


@pytest.mark.parametrize("packing", ["documents", "padded", "best-fit"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@torch.no_grad()
def test_packed_documents_score_as_if_each_stood_alone(packing: str, architecture: str, make_run: MakeRun) -> None:
    shape = {"model__architecture": architecture, "model__kv_heads": 0}
    plan = RunPlan.read(make_run(f"{packing}-{architecture}", train__packing=packing, train__micro_batch=4, **shape))
    model, expected = build_model(plan).eval(), 0.0
    for tokens in map(torch.from_numpy, apart(plan)):
        logits = model.hf(tokens[None, :-1]).logits[0]
        expected += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
    batches = (batch for _, batch in held_out_by_source(plan, rank=0, world_size=1, device=torch.device("cpu")))
    assert sum(model.scores(batch)[0].sum().item() for batch in batches) == pytest.approx(expected, rel=1e-6)
