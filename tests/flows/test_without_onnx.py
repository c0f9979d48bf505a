"""The whole story where no ONNX graph decodes: FINISHED, champion, and its text by transformers at every place."""

from __future__ import annotations

import importlib.util
import json
from inspect import unwrap
from typing import Any

import pytest
from transformers import AutoConfig

from flows.stages.training import generate
from tasks.tracking.mlflow_run import read_run
from tests.support.configs import read_plan
from tests.support.mlflow_store import Store
from tests.support.serving import server
from tests.support.user_folder import UserFolder
from training.records.results import ExportedModel, RegisteredModel

pytestmark = pytest.mark.slow

SHORT = (
    "train.steps=4", "train.warmup_steps=1", "train.context=16", "checkpoint.every_steps=4", "evaluation.every_steps=0",
    "evaluation.sample_tokens=4", "parallel.strategy=single",
)  # fmt: skip


@pytest.fixture(scope="module")
def user_folder(user_of_prefect: UserFolder) -> UserFolder:
    return user_of_prefect


def pretrained(user_folder: UserFolder, *overrides: str, has: str = "") -> tuple[dict[str, Any], ExportedModel]:
    """The outcome of a run that must be champion, with the Hugging Face files and the graphs that are named."""
    formats = ", ".join(filter(None, ("Hugging Face", has)))
    out, _ = user_folder.run("pretrain", str(user_folder.config), *SHORT, *overrides, "--json")
    outcome: dict[str, Any] = json.loads(out)
    run_dir = user_folder.home / outcome["run_id"]
    run = user_folder.mlflow_run(run_dir)
    assert run.info.status == "FINISHED"
    assert (outcome["version"], outcome["alias"]) == (1, "champion")
    assert f"the export is within its parity bounds: {formats}; " in outcome["verdict"]
    assert outcome["generated"].startswith("the ")
    assert len(outcome["generated"]) > len("the ")
    exported = ExportedModel.read(run_dir / "export" / "export.json")
    assert run.data.tags["shardline.left_out"] == exported.left_out
    version = user_folder.mlflow.get_model_version(outcome["model"], "1")
    assert version.tags["shardline.formats"] == formats
    assert "| left out |" in version.description
    assert "Left out of the export" in (run_dir / "report.html").read_text()
    return outcome, exported


@pytest.fixture(scope="module")
def too_large(user_folder: UserFolder) -> tuple[dict[str, Any], ExportedModel]:
    """A run of a model that is too large for ONNX graphs by its config."""
    return pretrained(user_folder, "export.onnx_up_to_gib=0")


def test_a_model_that_is_too_large_for_onnx_is_champion_and_makes_text_at_every_place(
    user_folder: UserFolder, too_large: tuple[dict[str, Any], ExportedModel]
) -> None:
    outcome, exported = too_large
    assert "export.onnx_up_to_gib = 0: raise it" in exported.skipped["onnx"]
    prompts, out = user_folder.folder / "prompts.jsonl", user_folder.folder / "out.jsonl"
    prompts.write_text('{"prompt": "the "}\n')
    user_folder.run("generate", "verses", "--prompts", str(prompts), "--out", str(out), "--tokens", "4", "--seed", "5")
    written = json.loads(out.read_text())["completion"]
    store = Store(f"sqlite:///{user_folder.home}/mlflow.db", user_folder.folder, "", user_folder.home)
    with server(store, "verses@champion") as (client, _):
        reply = client.post("/generate", json={"prompt": "the ", "new_tokens": 4, "seed": 5})
    assert reply.json()["text"] == written
    assert outcome["serve"].endswith("serve verses@champion")


def test_where_no_engine_can_open_the_version_the_run_shows_its_newest_sample_and_a_warning(
    user_folder: UserFolder,
    too_large: tuple[dict[str, Any], ExportedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a head node without torch."""
    monkeypatch.setenv("SHARDLINE_HOME", str(user_folder.home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{user_folder.home}/mlflow.db")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    run = read_run(too_large[0]["run_id"])
    model = RegisteredModel(name="verses", version=1, alias="champion", verdict="")
    plan = read_plan(run.folder)
    (run.folder / "samples.jsonl").unlink(missing_ok=True)
    assert unwrap(generate)(plan, run, model) == ""
    rows = [{"step": step, "prompt": "the ", "text": text} for step, text in ((2, "old"), (4, "new"))]
    (run.folder / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert unwrap(generate)(plan, run, model) == "the new"
    assert "verses/1 is registered, but made no text here: the torch engine is needed (the export has no" in caplog.text


def test_a_class_that_onnx_cannot_decode_is_champion_with_the_graphs_that_there_are(user_folder: UserFolder) -> None:
    config = AutoConfig.for_model("openai-gpt", n_embd=32, n_layer=1, n_head=4, n_positions=32, vocab_size=300)
    config.save_pretrained(user_folder.folder / "gpt")
    _, exported = pretrained(
        user_folder, "name=gpt", "model.architecture=path", f"model.path={user_folder.folder}/gpt", has="model.onnx"
    )
    assert exported.skipped["decode.onnx"].startswith("OpenAIGPTLMHeadModel cannot be traced with its cache (")
    assert [graph.file for graph in exported.parity.graphs] == ["model.onnx"]
