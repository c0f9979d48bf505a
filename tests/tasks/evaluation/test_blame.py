"""The noise behind a spike is found by blame, with its line, and passed by skip, by rewind, and by hand."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.data.corpus import prepare_corpus
from tasks.evaluation.blame import blame
from tasks.runs.without import read_steps, resume_without
from tests.support.ranks import losses, result, run_ranks
from tests.support.tiny_run import byte_tokenizer
from tests.support.tiny_shards import plan_tiny_run
from training.config.data import DataConfig
from training.config.serving import InferenceConfig
from training.data.loader import Loader
from training.records.plan import RunPlan

SPIKE, STEPS, LENGTH = 27, 31, 60
DOCUMENTS = 400
BATCH = 8


def write_corpus(path: Path, noisy: set[int]) -> None:
    """A JSON line for each document: the alphabet from some letter on, or noise."""
    rng, lines = np.random.default_rng(3), []
    for number in range(DOCUMENTS):
        start, noise = int(rng.integers(26)), rng.choice(list(string.ascii_letters + string.digits), LENGTH)
        text = "".join(chr(97 + (start + place) % 26) for place in range(LENGTH))
        text = "".join(noise) if number in noisy else text
        lines.append(json.dumps({"text": f"{number:03d} {text}"}))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[..., Path], set[int]]:
    """make("name", train__on_spike="skip") -> plan of a run whose batch of step SPIKE is noise; the lines of it."""
    home = tmp_path_factory.mktemp("home")
    corpus = home / "corpus.jsonl"
    byte_tokenizer(home / "bytes")
    settings = {"tokenizer": {"kind": "pretrained", "path": str(home / "bytes")}, "split": "documents"}

    def make(name: str, **overrides: Any) -> Path:
        data = DataConfig.model_validate({"path": str(corpus), **settings})
        shards_dir, _ = prepare_corpus(data, tokens_home=home / "tokens")
        config = {
            **{f"data__{field}": value for field, value in settings.items()},
            "data__path": str(corpus),
            "model__dropout": 0.0,
            "parallel__strategy": "single",
            "train__packing": "padded",
            "train__context": 80,
            "train__steps": STEPS,
            "train__learning_rate": 1e-2,
            "train__log_every_steps": 5,
            "train__spike_window_steps": 15,
            "checkpoint__every_steps": 5,
            "checkpoint__keep_last": 20,
            "evaluation__every_steps": 0,
        }
        return plan_tiny_run(home / name, shards_dir=shards_dir, **config | overrides)

    write_corpus(corpus, set())
    plan = RunPlan.read(make("clean"))
    loader = Loader(plan, dp_rank=0, device=torch.device("cpu"))
    noisy = set()
    for batch in loader.share(SPIKE - 1).batches:
        for row in batch.targets.tolist():
            noisy.add(int(bytes(row[:3])))
    write_corpus(corpus, noisy)
    return make, noisy


@pytest.mark.slow
def test_a_planted_spike_is_found_and_passed(
    planted: tuple[Callable[..., Path], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, noisy = planted
    runs = {on_spike: make(on_spike, train__on_spike=on_spike) for on_spike in ("continue", "skip", "rewind")}
    for plan_path in runs.values():
        run_ranks(plan_path)
    assert result(runs["continue"]).spikes == result(runs["skip"]).spikes == (SPIKE,)
    assert result(runs["rewind"]).left_out == (SPIKE,)

    run_dir = runs["continue"].parent
    monkeypatch.setenv("SHARDLINE_HOME", str(run_dir.parent))
    found = blame(run_dir, step=SPIKE, top=5, inference=InferenceConfig())
    assert (found.checkpoint_step, found.of, len(found.documents)) == (25, BATCH, 5)
    worst = found.documents[0]
    assert worst.loss == max(each.loss for each in found.documents)
    for each in found.documents:
        number = int(each.text[:3])
        assert number in noisy
        assert each.place.endswith(f"corpus.jsonl:{number + 1}")
        assert each.text in Path(found.page).read_text()
    calm = blame(run_dir, step=SPIKE - 1, top=5, inference=InferenceConfig())
    assert calm.documents[0].loss < worst.loss - 1

    resume_without(run_dir, read_steps(str(SPIKE), of=SPIKE), force=False)
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("[0-9]*"))[-1] == "00000025"
    run_ranks(runs["continue"])
    assert result(runs["continue"]).left_out == (SPIKE,)
    assert losses(runs["continue"])[STEPS] == losses(runs["rewind"])[STEPS]
    with pytest.raises(ValueError, match="no checkpoint from before step 3 is left"):
        blame(run_dir, step=3, top=5, inference=InferenceConfig())
