"""The model of benchmarks/serving.py in every form that its contestants take: one set of weights, one tokenizer."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

VOCAB, CONTEXT, END = 2048, 256, "<|endoftext|>"
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
NAME = "served"


def write_models(folder: Path) -> None:
    """Write FOLDER/registry.db with two versions of one export; FOLDER/transformers and FOLDER/pyfunc for MLflow."""
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        export = folder / "version" / "artifacts" / "export"
        model, tokenizer = _write_export(export)
        _write_mlflow(folder, export, model, tokenizer)
        _register(folder, folder / "version")


def _write_export(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from training.exports.onnx_graphs import save_graphs
    from training.records.record import sha256_file
    from training.records.results import ExportedModel, ParityReport

    folder.mkdir(parents=True)
    tokenizer = _tokenizer(folder)
    torch.manual_seed(0)
    ids = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    sizes = {"vocab_size": VOCAB, "intermediate_size": 688, "max_position_embeddings": CONTEXT, **SIZES}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ids)).eval()
    with torch.no_grad():
        model.lm_head.weight[0] = 0  # never the likeliest: all contestants make all tokens that are asked for
    model.save_pretrained(folder)
    if problems := save_graphs(model, folder, causal=True):
        raise RuntimeError(f"no graph to decode with: {problems}")
    ExportedModel(
        step=0,
        checkpoint_sha256="0" * 64,
        objective="causal",
        context=CONTEXT,
        end_id=0,
        files={path.name: sha256_file(path) for path in folder.iterdir()},
        parity=ParityReport(reload_logit_difference=0, reload_logit_difference_bound=0, graphs=()),
        skipped={},
    ).write(folder / "export.json")
    return model, tokenizer


def _tokenizer(folder: Path) -> Any:
    """Train a byte-level BPE on the modules at the top of Python's standard library."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    texts = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    trained = ByteLevelBPETokenizer()
    trained.train(texts, vocab_size=VOCAB, special_tokens=[END], show_progress=False)
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

    def requirements(*names: str) -> list[str]:  # written out: found out by MLflow they cost half a minute
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
    write_models(Path(sys.argv[1]))
