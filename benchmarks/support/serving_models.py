"""Writes the models of benchmarks/serving.py in the form that each server needs: same weights, same tokenizer."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

CONTEXT, END = 256, "<|endoftext|>"
SMALL, LARGE = "4M", "94M"
SIZES = {  # a small one; as the smallest GPT-2, but 8,192 words
    SMALL: {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 4},
    LARGE: {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_key_value_heads": 12},
}
NAME = "served"
TRAINING_STEPS, HELD_OUT_TEXTS = 40, 24
RUNTIMES = {"openvino": "openvino_genai", "ctranslate2": "ctranslate2", "genai": "onnxruntime_genai"}


def missing_runtimes() -> dict[str, str]:
    """Return the other runtimes that are not installed, and the command that installs them."""
    cure = "not installed: pip install 'shardline[benchmark]'"
    return {name: cure for name, module in RUNTIMES.items() if importlib.util.find_spec(module) is None}


def write_models(folder: Path, *, with_mlflow: bool) -> None:
    """Write FOLDER/SIZE with registry.db (two versions of one export), and the export for the other runtimes.

    FOLDER/4M also has quality.json (perplexity in fp32 and int8) and, if `with_mlflow`, `transformers` and `pyfunc`.
    """
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for size in SIZES:
            export = folder / size / "version" / "artifacts" / "export"
            model, tokenizer = _write_export(export, size)
            if size == SMALL and with_mlflow:
                _write_mlflow(folder / size, export, model, tokenizer)
            if size == SMALL:
                _write_quality(folder / size / "quality.json", export, tokenizer)
            _register(folder / size, folder / size / "version")
            _write_other_runtimes(folder / size, export, model, tokenizer)


def _write_other_runtimes(folder: Path, export: Path, model: Any, tokenizer: Any) -> None:
    from benchmarks.support.other_runtimes import write_ctranslate2, write_genai, write_openvino

    missing = missing_runtimes()

    def targets(name: str) -> dict[str, Path]:
        return {precision: folder / f"{name}-{precision}" for precision in ("fp32", "int8")}

    def openvino() -> None:
        write_openvino(model, tokenizer, targets("openvino"))

    def ctranslate2() -> None:
        for precision, target in targets("ctranslate2").items():
            write_ctranslate2(export, target, precision=precision)
            shutil.copy(export / "tokenizer.json", target)

    def genai() -> None:
        for precision, target in targets("genai").items():
            write_genai(export, target, precision=precision)

    for name, write in (("openvino", openvino), ("ctranslate2", ctranslate2), ("genai", genai)):
        try:
            if name not in missing:
                write()
        except Exception as error:  # such as an unsupported version; the others are still compared
            missing[name] = f"it cannot convert the model: {type(error).__name__}: {error}"[:500]
    (folder / "missing.json").write_text(json.dumps(missing))


def _write_quality(path: Path, export: Path, tokenizer: Any) -> None:
    """Write the perplexity, by the graphs that the server runs, on text that the model was not trained on."""
    import numpy as np

    from training.exports.onnx_graphs import graph_file
    from training.exports.onnx_session import open_session
    from training.exports.parity import Tally, session_logits

    ids = np.array(tokenizer(_texts(held_out=True))["input_ids"][: HELD_OUT_TEXTS * CONTEXT], dtype=np.int64)
    texts = list(ids.reshape(-1, CONTEXT))
    graphs = {
        name: session_logits(open_session(export / graph_file("batch", name)), "batch") for name in ("fp32", "int8")
    }
    tallies = {name: Tally(masked=False) for name in graphs}
    for text in texts:
        truth = graphs["fp32"]([text])[0]
        for name, logits in graphs.items():
            tallies[name].add(text, logits([text])[0], truth)
    path.write_text(json.dumps({name: tally.perplexity for name, tally in tallies.items()}))


def _texts(*, held_out: bool) -> str:
    """Return the source of Python's standard library: every tenth module if `held_out`, else the other modules."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [path for number, path in enumerate(paths) if (number % 10 == 0) == held_out]
    return "\n".join(path.read_text(errors="replace") for path in chosen)


def _train(model: Any, tokenizer: Any) -> None:
    """Train for a few steps, because int8 rounding costs nothing in a model that has learned nothing."""
    import torch

    ids = torch.tensor(tokenizer(_texts(held_out=False)[:2_000_000])["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(TRAINING_STEPS):
        starts = torch.randint(len(ids) - 128, (8,))
        batch = torch.stack([ids[start : start + 128] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _write_export(folder: Path, size: str) -> tuple[Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from training.exports.onnx_graphs import save_graphs, save_quantized
    from training.records.model_state import saved_shapes
    from training.records.record import sha256_file
    from training.records.results import ExportedModel, ParityReport
    from training.records.text_encoding import NOTHING_SPECIAL

    folder.mkdir(parents=True)
    tokenizer = _tokenizer(folder, SIZES[size]["vocab_size"])
    torch.manual_seed(0)
    ids = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**SIZES[size], max_position_embeddings=CONTEXT, **ids)).eval()
    if size == SMALL:
        _train(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight[0] = 0  # the end token is never the likeliest, so that all servers make all tokens
    model.save_pretrained(folder)
    if problems := save_graphs(model, folder, causal=True) | save_quantized(folder, "int8"):
        raise RuntimeError(f"no graph to decode with: {problems}")
    ExportedModel(
        step=0,
        checkpoint_sha256="0" * 64,
        objective="causal",
        context=CONTEXT,
        end_id=0,
        end_ids=(0,),
        text_encoding=NOTHING_SPECIAL,
        tensors=saved_shapes(folder),
        files={path.name: sha256_file(path) for path in folder.iterdir()},
        parity=ParityReport(reload_logit_difference=0, reload_logit_difference_bound=0, graphs=()),
        skipped={},
    ).write(folder / "export.json")
    return model, tokenizer


def _tokenizer(folder: Path, vocab_size: int) -> Any:
    """Train a byte-level BPE on the modules at the top of Python's standard library."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    texts = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    trained = ByteLevelBPETokenizer()
    trained.train(texts, vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=CONTEXT
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _write_mlflow(folder: Path, export: Path, model: Any, tokenizer: Any) -> None:
    import mlflow
    import pandas as pd
    from mlflow.models import infer_signature

    from tasks.registry.logged_model import GENERATOR, PYFUNC_MODEL

    def requirements(*names: str) -> list[str]:  # given, because MLflow takes half a minute to find them
        return [f"{name}=={importlib.metadata.version(name)}" for name in names]

    mlflow.transformers.save_model(
        {"model": model, "tokenizer": tokenizer},
        folder / "transformers",
        task="text-generation",
        signature=infer_signature(
            ["def "], ["x"], {"max_new_tokens": 64, "do_sample": False, "return_full_text": False}
        ),
        pip_requirements=requirements("mlflow", "torch", "transformers"),
    )
    mlflow.pyfunc.save_model(
        folder / "pyfunc",
        python_model=PYFUNC_MODEL,
        artifacts={"export": str(export), "generator": str(GENERATOR)},
        signature=infer_signature(
            pd.DataFrame({"prompt": ["def "]}), ["x"], {"new_tokens": 64, "temperature": 0.0, "top_k": 0, "seed": 1}
        ),
        pip_requirements=requirements("mlflow", "numpy", "onnxruntime", "pandas", "tokenizers"),
    )


def _register(folder: Path, version: Path) -> None:
    """Register one folder as two versions, so that texts stay comparable while the alias moves between them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(registry_uri(folder), registry_uri(folder))
    client.create_registered_model(NAME)
    for _ in range(2):
        client.create_model_version(NAME, source=version.as_uri())
    client.set_registered_model_alias(NAME, "champion", "1")


def registry_uri(folder: Path) -> str:
    return f"sqlite:///{folder}/registry.db"


if __name__ == "__main__":
    write_models(Path(sys.argv[1]), with_mlflow=sys.argv[2:] == ["--mlflow"])
