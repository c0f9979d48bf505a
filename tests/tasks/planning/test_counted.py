"""Where the parameters of model.path are counted: here, on a host, or not yet."""

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


def test_a_process_with_torch_counts_the_class(tmp_path: Path) -> None:
    config, parameters = saved(tmp_path / "model", "mixtral", **EXPERTS)
    plan = plan_run(config, inventory=inventory(1))
    assert plan.shape.parameters == parameters
    rows = dict(describe_plan(plan))
    assert f"{parameters:,} parameters" in rows["model"]
    assert rows["parameters"] == f"a token uses {plan.shape.sizes.used:,}; {plan.shape.sizes.counted}"
    assert plan.shape.sizes.counted.startswith("counted on meta with transformers ")
    assert plan.shape.sizes.cut > 0.9 * parameters


@pytest.mark.slow
def test_a_head_without_torch_counts_nothing_until_a_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, parameters = saved(tmp_path / "model", "mixtral", **EXPERTS)
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
