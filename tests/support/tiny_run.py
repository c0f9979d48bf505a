"""A run folder as training leaves it: tiny model with random weights, byte tokens of a little text, all records."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.configs import inventory, read_plan
from tests.support.manifests import write_checkpoint_manifest, write_manifest
from training.config.run import RunConfig
from training.planner.plan import make_plan
from training.records.plan import RunPlan
from training.records.record import sha256_config, sha256_file
from training.records.results import EvalReport, ExportedModel, Sample
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.shards.format import write_shard

TEXT = "def add(a, b):\n    return a + b  # größer, 中文\n\n\n" * 30
END, MASK, VOCAB = 256, 257, 258
SAMPLES = (Sample(prompt="", text="x"), Sample(prompt="Once upon a", text=" time"))


def byte_tokenizer(folder: Path) -> None:
    """258 tokens: the bytes in the order of their values, end and mask; as AutoTokenizer loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in _byte_alphabet()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|mask|>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_alphabet() -> list[tuple[int, str]]:
    """GPT-2's printable stand-ins: printable bytes stand for themselves, the others are 256, 257, …"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return sorted([(byte, chr(byte)) for byte in printable] + [(byte, chr(256 + i)) for i, byte in enumerate(others)])


def byte_shards(folder: Path, *, text: str = TEXT, fingerprint: str = "a" * 64) -> Path:
    byte_tokenizer(folder / "tokenizer")
    tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
    shards = [
        write_shard(folder, split=split, index=0, tokens=part, ends=(), text_bytes=len(part))
        for split, part in (("train", tokens[:-400]), ("validation", tokens[-400:]))
    ]
    tokenizer = {"tokenizer": "bytes", "tokenizer_sha256": sha256_file(folder / "tokenizer" / "tokenizer.json")}
    write_manifest(folder, shards, vocab_size=VOCAB, end_id=END, mask_id=MASK, fingerprint=fingerprint, **tokenizer)
    return folder


def tiny_run(folder: Path, *, architecture: str = "llama", layers: int = 2, width: int = 32, **export: Any) -> Path:
    """runs/ID after training and evaluation, before export; random weights from seed 0."""
    shards = byte_shards(folder.parent / f"shards-{folder.name}")
    config = RunConfig.model_validate(
        {
            "name": "tiny",
            "data": {"path": "stdlib", "tokenizer": {"kind": "bytes"}},
            "model": {"architecture": architecture, "layers": layers, "width": width, "heads": 4, "kv_heads": 2},
            "train": {"steps": 8, "context": 32, "global_batch": 8, "seed": 0, "warmup_steps": 2},
            "parallel": {"strategy": "single", "precision": "fp32"},
            "export": {"latency_seconds": 0, **export},
        }
    )
    manifest = TokenShards.read(shards / "manifest.json")
    plan = make_plan(config, inventory(1), run_id=folder.name, shards=manifest, shards_dir=str(shards))
    plan.write(folder / "plan.json")
    _checkpoint(plan, folder / "checkpoints" / "8")
    TrainResult(
        step=8,
        loss=5.5,
        tokens=2048,
        samples_per_s=31.25,
        tokens_per_s=1000.0,
        step_ms=256.0,
        matmul_share=0.3,
        device_utilisation=0.9,
        peak_memory_gib=0.1,
        memory={},
        skipped_steps=0,
        checkpoint="checkpoints/8",
        checkpoint_sha256="c" * 64,
        stopped_by="steps",
        train_s=1.0,
    ).write(folder / "result.json")
    EvalReport(
        step=8,
        checkpoint_sha256="c" * 64,
        shards_fingerprint=manifest.fingerprint,
        loss=5.5,
        perplexity=244.7,
        bits_per_byte=None if config.objective == "masked" else 7.93,
        accuracy=0.01,
        tokens=399,
        text_bytes=400,
        samples=() if config.objective == "masked" else SAMPLES,
        seconds=1.0,
    ).write(folder / "eval.json")
    return folder


def _checkpoint(plan: RunPlan, folder: Path) -> None:
    from training.models.language_model import build_model

    model: Any = build_model(plan).hf
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # training's checkpoints have none
    write_checkpoint_manifest(folder, step=8, tokens=2048, mesh=plan.mesh, config_sha256=sha256_config(plan.config))


def export_by_program(run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.export", str(run_dir / "plan.json")]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def exported_tiny_run(folder: Path, *, architecture: str) -> None:
    """A tiny run with its export. A Llama's is made by the program, as the flow does it, over one of other weights.

    What the program prints is beside the run, in stdout and stderr. The others have one layer: tracing takes long.
    """
    from training.export import export_run

    more = {"layers": 2, "precisions": ["fp32", "int8", "int4"]} if architecture == "llama" else {"layers": 1}
    tiny_run(folder, architecture=architecture, **more)
    if architecture != "llama":
        export_run(folder)
        return
    (folder / "export").mkdir()
    (folder / "export" / "stale.txt").touch()
    done = export_by_program(folder)
    assert done.returncode == 0, done.stderr
    (folder.parent / "stdout").write_text(done.stdout)
    (folder.parent / "stderr").write_text(done.stderr)


def another_run(
    exported: Path,
    folder: Path,
    *,
    mlflow_run_id: str,
    loss: float,
    checkpoint: str = "c",
    dataset: str = "a",
    **plan: Any,
) -> Path:
    """A copy of an exported run under another id, with other results, as if it had been trained so."""
    shutil.copytree(exported, folder)
    old = read_plan(folder)
    shards = folder / "shards"
    shutil.copytree(old.shards_dir, shards)
    manifest = TokenShards.read(shards / "manifest.json")
    manifest.model_copy(update={"fingerprint": dataset * 64}).write(shards / "manifest.json")
    update = {"run_id": folder.name, "mlflow_run_id": mlflow_run_id, "shards_dir": str(shards), **plan}
    old.model_copy(update=update).write(folder / "plan.json")
    sha256 = {"checkpoint_sha256": checkpoint * 64}
    result = TrainResult.read(folder / "result.json")
    result.model_copy(update=sha256).write(folder / "result.json")
    evaluation = EvalReport.read(folder / "eval.json")
    evaluation.model_copy(update={**sha256, "loss": loss}).write(folder / "eval.json")
    export = ExportedModel.read(folder / "export" / "export.json")
    export.model_copy(update=sha256).write(folder / "export" / "export.json")
    return folder
