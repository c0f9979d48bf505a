"""The exported folder loads elsewhere, gives the checkpoint's logits, and is not there when it would not."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from benchmarks.support.cost import memory_mib
from tests.support.configs import read_plan
from tests.support.tiny_run import END, VOCAB, tiny_run
from training.checkpoint.copied_weights import copy_weights
from training.checkpoint.safetensors_files import TensorFiles, file_name, index_name, write_tensors
from training.checkpoint.writer import write_index
from training.config.run import RunConfig
from training.export import export_run, lacks_graphs, why_no_experts
from training.exports.latency import measure_latency
from training.exports.parity import parity_failure
from training.exports.tensorrt import why_no_tensorrt
from training.models.language_model import load_model
from training.records.checkpoint import CheckpointManifest, RankFile, WrittenFile
from training.records.plan import RunPlan
from training.records.record import sha256_file
from training.records.results import ExportedModel, ParityReport
from training.records.train_result import TrainResult

AUTO_CLASS = {"llama": AutoModelForCausalLM, "gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert"))],
)
def exported(request: pytest.FixtureRequest, exported_runs: Callable[[str], Path]) -> Path:
    return exported_runs(request.param)


def onnx_logits(export: Path, ids: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(export / "model.onnx"))
    return session.run(["logits"], {"input_ids": ids})[0]


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (2, 5), (5, 17)])
def test_onnx_and_saved_folder_give_the_checkpoints_logits(exported: Path, shape: tuple[int, int]) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, shape)
    auto_class = AUTO_CLASS[exported.name]
    expected = torch_logits(auto_class.from_pretrained(exported / "checkpoints" / "8"), ids)
    assert expected.shape == (*shape, VOCAB)
    checkpoint, export = (TensorFiles(exported / name, "model") for name in ("checkpoints/8", "export"))
    assert {*checkpoint} == {*export}
    assert all(torch.equal(export[name], tensor) for name, tensor in checkpoint.items())
    # Where the tensors begin in a file changes how products are rounded.
    assert np.abs(torch_logits(auto_class.from_pretrained(exported / "export"), ids) - expected).max() < 1e-6
    assert np.abs(onnx_logits(exported / "export", ids) - expected).max() < 1e-4


def test_the_record_names_every_file_with_its_hash(exported: Path) -> None:
    folder = exported / "export"
    record = ExportedModel.read(folder / "export.json")
    assert {"model.safetensors", "config.json", "model.onnx", "tokenizer.json", "README.md"} <= set(record.files)
    assert ("decode.onnx" in record.files) == (exported.name != "bert")
    assert set(record.skipped) == ({"tensorrt"} if why_no_tensorrt() else set())
    assert {path.name for path in folder.iterdir()} == {*record.files, "export.json"}
    assert all(sha256_file(folder / name) == sha256 for name, sha256 in record.files.items())
    quantized = {"batch_int8.onnx", "batch_int4.onnx"} if exported.name == "llama" else set()
    files = {graph.file for graph in record.parity.graphs} | quantized
    assert files == {name for name in record.files if name.endswith(".onnx")}
    # 8 windows of 32 tokens, one of 1, and three of unlike lengths: in the decode graph padded, in the batch graph rows
    assert {graph.positions for graph in record.parity.graphs} == {8 * 32 + 1 + 32 + 16 + 11}
    assert all(graph.perplexity == pytest.approx(graph.torch_perplexity, rel=1e-5) for graph in record.parity.graphs)
    assert record.parity.passed
    assert record.parity.reload_logit_difference < 1e-6
    assert not (exported / "export.part").exists()


def test_causal_models_end_where_documents_end_and_use_their_cache(exported: Path) -> None:
    causal = exported.name != "bert"
    assert (exported / "export" / "generation_config.json").exists() == causal
    if causal:
        model = AutoModelForCausalLM.from_pretrained(exported / "export")
        assert model.generation_config.eos_token_id == END
        assert model.generation_config.pad_token_id == END
        assert model.config.use_cache
        assert AutoTokenizer.from_pretrained(exported / "export").eos_token_id == END


def test_every_engine_is_measured_at_every_shape_in_turns(exported: Path) -> None:
    plan = read_plan(exported)
    wanted = {"latency_seconds": 0.01}
    config = plan.config.model_dump(mode="json") | {"export": wanted}
    plan = plan.model_copy(update={"config": RunConfig.model_validate(config)})
    model = load_model(exported / "export", plan).hf
    report = measure_latency(model, exported / "export", plan=plan)
    graphs = {"forward"} if exported.name == "bert" else {"forward", "decode"}
    # 32 and 128 tokens are more than the context of 32 has
    shapes = {(graph, batch, 31) for graph in graphs for batch in (1, 8)}
    for engine in ("torch", "ONNX Runtime"):
        found = [figure for figure in report.figures if figure.engine == engine]
        assert {(figure.graph, figure.batch, figure.length) for figure in found} == shapes
        assert len(found) == len(shapes)
    for figure in report.figures:
        assert figure.rounds >= 3
        tokens = figure.batch * (figure.length if figure.graph == "forward" else 1)
        assert figure.tokens_per_s == pytest.approx(tokens / figure.median_ms * 1e3)


def test_the_model_card_says_how_to_load_it_and_how_good_it_is(exported: Path) -> None:
    card = (exported / "export" / "README.md").read_text()
    assert f"{AUTO_CLASS[exported.name].__name__}.from_pretrained" in card
    assert "5.5000 nats per token" in card
    assert ("| bits per byte | 7.9300 |" in card) == (exported.name != "bert")
    assert "None" not in card


def test_a_second_export_of_the_same_checkpoint_is_skipped_and_says_so(
    exported: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (exported / "export" / "model.onnx").stat().st_mtime_ns
    with caplog.at_level("INFO"):
        export_run(exported)
    assert (exported / "export" / "model.onnx").stat().st_mtime_ns == before
    assert "kept" in caplog.text


def test_a_plan_that_asks_for_other_graphs_has_its_export_made_again(exported: Path) -> None:
    """As a resume with other export.precisions does."""
    plan, existing = read_plan(exported), ExportedModel.read(exported / "export" / "export.json")
    lacks = {
        precision: lacks_graphs(existing, asking(plan, precisions=["fp32", precision]))
        for precision in ("fp16", "int8", "int4")
    }
    has = {"batch_int8.onnx", "batch_int4.onnx"} <= existing.files.keys()
    assert lacks == {"fp16": True, "int8": not has, "int4": not has}
    left_out = existing.model_copy(update={"skipped": existing.skipped | {"model_fp16.onnx": "it does not run here"}})
    assert not lacks_graphs(left_out, asking(plan, precisions=["fp32", "fp16"])), "it would be left out again"
    without = existing.model_copy(update={"files": {}, "skipped": {"onnx": "the weights take 9 GiB in fp32"}})
    assert lacks_graphs(without, plan), "there is room now"
    assert not lacks_graphs(without, asking(plan, onnx_up_to_gib=0.0))


def asking(plan: RunPlan, **export: Any) -> RunPlan:
    content = plan.config.model_dump(mode="json")
    content["export"] |= export
    return plan.model_copy(update={"config": RunConfig.model_validate(content)})


def test_the_program_exports_quietly_and_replaces_the_export_of_another_checkpoint(exported_run: Path) -> None:
    run_dir = exported_run
    assert (run_dir.parent / "stdout").read_text() == ""
    *before, last = (run_dir.parent / "stderr").read_text().splitlines()
    assert "exported step 8" in last
    # besides progress, on a slow machine: the one thing that is left out, why, and what helps
    notes = [line for line in before if not re.search(r"( so far| left| in [\w. ]+)$", line)]
    assert ["left out tensorrt" in line and "python -m training.build_engine" in line for line in notes] == (
        [True] if why_no_tensorrt() else []
    )
    assert not (run_dir / "export" / "stale.txt").exists()
    record = ExportedModel.read(run_dir / "export" / "export.json")
    assert record.checkpoint_sha256 == TrainResult.read(run_dir / "result.json").checkpoint_sha256
    assert (run_dir / "checkpoints" / "8" / "keep").exists(), "pruning must not take what was exported"


@pytest.mark.slow
def test_a_graph_that_is_out_of_bounds_is_left_out_with_the_figures_and_the_cure(tmp_path: Path) -> None:
    wanted = {"precisions": ["fp32", "fp16"], "max_logit_difference": 2e-6}
    run_dir = tiny_run(tmp_path / "run", architecture="bert", layers=1, **wanted)
    record = export_run(run_dir)
    assert record.parity.passed
    assert [graph.file for graph in record.parity.graphs] == ["model.onnx"]
    why = record.skipped["model_fp16.onnx"]
    assert "(bound 0.0002)" in why
    assert "raise export.max_logit_difference" in why
    assert not list((run_dir / "export").glob("model_fp16*")), "nor are there weights of a graph that is not there"
    assert record.formats == "Hugging Face, model.onnx"


def test_files_that_give_other_logits_end_the_export_with_a_report_and_the_cure(tmp_path: Path) -> None:
    report = ParityReport(reload_logit_difference=1.5, reload_logit_difference_bound=1e-3, graphs=())
    assert not report.passed
    failure = parity_failure(report, report=tmp_path / "parity.json")
    assert "differs from torch by up to 1.5 (bound 0.001)" in failure
    assert "raise export.max_logit_difference; if not, evaluate the checkpoint" in failure


def test_experts_that_do_not_fit_in_memory_when_copied_for_each_token_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan(tiny_run(tmp_path / "run"))
    config = AutoConfig.for_model(
        "mixtral", hidden_size=64, intermediate_size=64, num_local_experts=4, vocab_size=VOCAB
    )
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config)
    assert why_no_experts(model, plan) == ""
    monkeypatch.setattr("training.export.usable_memory_bytes", lambda: 2**20)
    assert re.search(r"experts' weights for each token: 256 need 0.02\d+ GiB of memory, and 0.0 GiB are free", (
        why_no_experts(model, plan)
    ))  # fmt: skip


def test_a_checkpoint_that_was_exchanged_after_training_is_not_exported(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path / "run")
    folder = run_dir / "checkpoints" / "8"
    weights, manifest = folder / "model.safetensors", CheckpointManifest.read(folder / "manifest.json")
    written = WrittenFile(size_bytes=weights.stat().st_size, sha256=sha256_file(weights))
    manifest.model_copy(update={"files": {weights.name: written}}).write(folder / "manifest.json")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoints/8 is not whole \(model\.safetensors has another sha256"):
        export_run(run_dir)
    assert not (run_dir / "export").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run_dir = tiny_run(tmp_path / "run", architecture="bert")
    weights = run_dir / "checkpoints" / "8" / "model.safetensors"
    tensors = load_file(weights)
    tensors["bert.embeddings.LayerNorm.weight"][3] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="is not finite"):
        export_run(run_dir)
    assert not (run_dir / "export").exists()


def test_a_larger_model_is_copied_into_files_that_load_as_the_checkpoint_does(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint that several ranks wrote; what other programs read is what an export with graphs has."""
    layers = 2 if exported.name == "llama" else 1
    run_dir = tiny_run(tmp_path / "run", architecture=exported.name, layers=layers, onnx_up_to_gib=0)
    in_parts(run_dir / "checkpoints" / "8", parts=3)
    monkeypatch.setattr("training.export.copy_weights", functools.partial(copy_weights, file_bytes=20_000))
    record, folder = export_run(run_dir), run_dir / "export"
    assert "raise it to have graphs" in record.skipped["onnx"]
    assert record.parity.passed
    card = (folder / "README.md").read_text()
    assert "no ONNX graphs" in card
    assert "model.onnx" not in card, "it describes what is there"
    assert {path.name for path in folder.iterdir()} == {*record.files, "export.json"}
    assert all(sha256_file(folder / name) == sha256 for name, sha256 in record.files.items())
    with_graphs = {path.name for path in (exported / "export").iterdir() if ".onnx" not in path.name}
    copied = {name for name in record.files if name.startswith("model-")}
    assert len(copied) > 2
    assert {*record.files, "export.json"} - copied == with_graphs - {"model.safetensors"} | {index_name("model")}
    for name in {"config.json", "generation_config.json", "tokenizer.json"} & with_graphs:
        assert (folder / name).read_bytes() == (exported / "export" / name).read_bytes()
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 9))
    models = [AUTO_CLASS[exported.name].from_pretrained(each) for each in (folder, run_dir / "checkpoints" / "8")]
    assert np.array_equal(*(torch_logits(model, ids) for model in models))


def in_parts(checkpoint: Path, *, parts: int) -> None:
    """Write a checkpoint's weights again, as so many ranks do."""
    tensors = {name: tensor.clone() for name, tensor in TensorFiles(checkpoint, "model").items()}
    (checkpoint / "model.safetensors").unlink(missing_ok=True)
    files: list[dict[str, RankFile]] = []
    for number in range(parts):
        name, own = file_name("model", number=number, of=parts), dict(list(tensors.items())[number::parts])
        written = write_tensors(checkpoint / name, own, abandoned=threading.Event())
        files.append({name: RankFile(written=written, names=tuple(own), tensor_bytes=0)})
    write_index(checkpoint, "model", files)


def test_copying_holds_the_tensors_of_one_file_whatever_the_model_has(tmp_path: Path) -> None:
    source, target = tmp_path / "checkpoint", tmp_path / "export"
    source.mkdir()
    target.mkdir()
    tensors = {f"layer.{number}.weight": torch.full((2**19,), float(number)) for number in range(64)}
    write_tensors(source / "model.safetensors", tensors, abandoned=threading.Event())
    in_parts(source, parts=4)
    expected = {name: float(tensor[0]) for name, tensor in tensors.items()}
    size_mib = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    del tensors
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    held = memory_mib("VmRSS")
    copy_weights(source, target, file_bytes=16 * 2**20)
    most = memory_mib("VmHWM") - held
    assert size_mib == 128
    assert most < 64, "a file's tensors, and two blocks of 16 MiB"
    assert len(list(target.glob("model-*.safetensors"))) == 8
    copied = TensorFiles(target, "model")
    assert {name: float(copied[name].unique()) for name in copied} == expected


def test_the_folder_has_what_vllms_loader_looks_for(exported: Path) -> None:
    """Architecture by name, dtype, context, tokenizer and weights under the class's own parameter names."""
    if exported.name == "bert":
        return
    folder = exported / "export"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [{"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[exported.name]]
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    assert config.get("max_position_embeddings", config.get("n_positions")) == 32
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {p.name for p in folder.iterdir()}
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        names, metadata = set(weights.keys()), weights.metadata()
    assert metadata["format"] == "pt"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert names <= set(model.state_dict())
    assert {name for name, _ in model.named_parameters()} - names <= {"lm_head.weight"}, (
        "only a tied one may be left out"
    )
