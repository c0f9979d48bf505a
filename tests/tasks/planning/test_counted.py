"""Where the parameters of model.path are counted: here, in the files' headers, on a host, or not yet."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.hardware.preflight import token
from tasks.planning.counted import FOLDER, counted_by_hosts, counted_shape
from tasks.planning.describe import describe_plan
from tasks.planning.plan import plan_run
from tests.support.configs import inventory, tiny_config
from training.config.run import RunConfig
from training.node.host_check import Asked

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}


def hide_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a head node without torch; after transformers was imported here, which looks for it too."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))


def saved(folder: Path, kind: str, *, weights: bool = True, **more: Any) -> tuple[RunConfig, int]:
    """Save a tiny model; return a run that begins with it, and its number of parameters."""
    settings = AutoConfig.for_model(kind, **TINY, **more)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    (model if weights else settings).save_pretrained(folder)
    config = tiny_config(
        model__architecture="path",
        model__path=str(folder),
        model__init="pretrained" if weights else "random",
        model__dropout=0.0,
        data__tokenizer={"vocab_size": 300},
    )
    return config, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mixtral", EXPERTS),
        ("qwen2", {"tie_word_embeddings": True}),
        ("starcoder2", {"num_key_value_heads": 2}),
        ("gpt2", {}),
        ("gemma", {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}),
        ("gpt_neox", {"intermediate_size": 48}),
    ],
)
def test_headers_of_weights_are_counted_without_torch(
    kind: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, parameters = saved(tmp_path / "model", kind, **more)
    file = tmp_path / "model" / "config.json"
    settings = json.loads(file.read_text())
    is_tied = kind in {"qwen2", "starcoder2", "gpt2", "gemma"}
    if kind in {"gpt2", "gemma", "gpt_neox"}:  # as the class has it by default
        settings.pop("tie_word_embeddings", None)
        file.write_text(json.dumps(settings))
    hide_torch(monkeypatch)
    shape = counted_shape(config)
    assert shape is not None
    assert (shape.parameters, shape.sizes.counted) == (parameters, "safetensors headers")
    assert (shape.tied, shape.sizes.tied, shape.sizes.looked_up > 0) == (is_tied, is_tied, not is_tied)
    assert shape.sizes.num_layers == shape.layers
    if kind == "mixtral":
        idle = 2 * 2 * 3 * 32 * 48  # in each of two layers, two of four experts
        assert shape.sizes.used == parameters - idle


def test_weights_without_a_number_of_words_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = saved(tmp_path, "gpt2")
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    del settings["vocab_size"]
    file.write_text(json.dumps(settings))
    hide_torch(monkeypatch)
    with pytest.raises(ValueError, match=r"config.json has no vocab_size: add it"):
        counted_shape(config)


def test_weights_that_are_the_classs_are_counted_by_their_headers_and_kept(tmp_path: Path) -> None:
    """The class says what of them is cut and used; one process with torch is enough for all plans."""
    config, parameters = saved(tmp_path / "model", "mixtral", **EXPERTS)
    plan = plan_run(config, inventory=inventory(1))
    assert (plan.shape.parameters, plan.shape.sizes.counted) == (parameters, "safetensors headers")
    rows = dict(describe_plan(plan))
    assert f"{parameters:,} parameters" in rows["model"]
    assert rows["parameters"] == f"a token uses {plan.shape.sizes.used:,}; safetensors headers"
    assert plan.shape.sizes.cut > 0.9 * parameters


def test_a_tied_matrix_that_files_have_twice_is_counted_once(tmp_path: Path) -> None:
    """As in the hub's Qwen3-0.6B."""
    config, parameters = saved(tmp_path / "model", "llama", tie_word_embeddings=True)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"}
    )
    shape = counted_shape(config)
    assert shape is not None
    assert (shape.parameters, shape.sizes.counted) == (parameters, "safetensors headers")


@pytest.mark.slow
def test_a_head_without_torch_counts_nothing_until_a_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, parameters = saved(tmp_path / "model", "mixtral", weights=False, **EXPERTS)
    hide_torch(monkeypatch)
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    with pytest.raises(ValueError, match=r"of type mixtral, 2 layers x 32, are not counted: .*no torch here.*install"):
        plan_run(config, inventory=inventory(1))
    run_dir = tmp_path / "home" / "run"
    run_dir.mkdir()
    with counted_by_hosts(config, run_dir=run_dir), token(run_dir) as word:
        asked = Asked(
            host="n7",
            home=str(tmp_path),
            folder=str(run_dir),
            token=word,
            address="127.0.0.1",
            interface="lo",
            port=0,
            shm_gib=0.0,
            disk_gib=0.0,
        )
        program = [sys.executable, "-m", "training.node.host_check", json.dumps(asdict(asked))]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout.splitlines()[-1])["findings"] == []
    assert list(run_dir.iterdir()) == []
    plan = plan_run(config, inventory=inventory(1))
    assert plan.shape.parameters == parameters
    assert plan.shape.sizes.counted.startswith("counted on node n7 with transformers ")


@pytest.mark.slow
def test_another_release_of_transformers_counts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes may have other parameters."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    config, parameters = saved(tmp_path / "model", "gpt2", weights=False)
    first = counted_shape(config)
    (kept,) = (tmp_path / "home" / FOLDER).iterdir()
    kept.write_text(kept.read_text().replace("counted on meta", "counted before"))
    hide_torch(monkeypatch)
    again = counted_shape(config)
    assert first is not None
    assert again is not None
    assert (again.parameters, again.sizes.counted[:14]) == (parameters, "counted before")
    info = tmp_path / "newer" / "transformers-99.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(str(info.parent))
    assert counted_shape(config) is None


def test_a_plan_says_what_a_rank_of_each_stage_has_and_what_tp_divides() -> None:
    tensor, pipeline = (
        plan_run(tiny_config(**{f"parallel__{axis}": 2}), inventory=inventory(2)) for axis in ("tp", "pp")
    )
    sizes = tensor.shape.sizes
    norms = 5 * 32  # of two layers, and the last one, which each rank has whole
    rank = (sizes.parameters - norms) // 2 + norms
    row = dict(describe_plan(tensor))["parameters"]
    assert row == f"a token uses all; added up from a llama's tensors; a rank has {rank:,}; tp divides 99.9%"
    words = tensor.shape.vocab_size * 32  # tied: on the first stage and on the last
    layer = sizes.layers[0].parameters
    row = dict(describe_plan(pipeline))["parameters"]
    assert row.endswith(f"; a rank of each stage has {words + layer:,}, {words + layer + 32:,}")
