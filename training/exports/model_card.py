"""The README.md of an exported model: what it is, what it was trained on, its figures, how to load it."""

from __future__ import annotations

from pathlib import Path

from training.records.plan import RunPlan
from training.records.results import EvalReport, ParityReport
from training.records.train_result import TrainResult
from training.records.words import counted


def model_card(plan: RunPlan, result: TrainResult, *, parity: ParityReport, run_dir: Path, folder: Path) -> str:
    """Return Markdown with the header that the Hugging Face hub reads, for the export in `folder`."""
    masked = plan.config.objective == "masked"
    shape, train = plan.shape, plan.config.train
    auto_class = "AutoModelForMaskedLM" if masked else "AutoModelForCausalLM"
    return f"""---
library_name: transformers
pipeline_tag: {"fill-mask" if masked else "text-generation"}
tags: [shardline, {shape.architecture}{", onnx" * bool(parity.graphs)}]
---
# {plan.config.model_name}

A {shape.architecture} {"masked" if masked else "causal"} language model of {shape.parameters / 1e6:.1f} million
parameters ({counted(shape.layers, "layer")}, width {shape.width:,}, {counted(shape.heads, "head")}), context
{train.context:,} tokens, vocabulary {plan.vocab_size:,}; made by Shardline's run `{plan.run_id}`.

## Data
Corpus `{plan.config.data.described}`, token shards with fingerprint `{plan.shards_fingerprint}`. What may be done with
the model depends on the licence of that corpus.

## Figures
{_figures(result, parity=parity, evaluation=_evaluation(run_dir, result))}

## How to load
```python
from transformers import {auto_class}, PreTrainedTokenizerFast

model, tokenizer = {auto_class}.from_pretrained("."), PreTrainedTokenizerFast.from_pretrained(".")
```
{_graphs(plan, folder)}`shardline reproduce {plan.run_id}` trains it again.
"""


def _graphs(plan: RunPlan, folder: Path) -> str:
    context, vocab = plan.config.train.context, plan.vocab_size
    about = {
        "model.onnx": f"""`model.onnx` takes `input_ids` int64 [batch, length], length up to {context}, and gives
`logits` fp32 [batch, length, {vocab}]. """,
        "decode.onnx": """`decode.onnx` continues texts with a KV cache: it takes `input_ids`, `position_ids`,
`attention_mask` [batch, past + length] and `past_key_values.N.key|value`, which may be empty, and gives `logits` and
`present.N.key|value`. """,
        "batch.onnx": """`batch.onnx` and `batch_PRECISION.onnx`, if present, do the same with ONNX Runtime, which
updates their cache in place. """,
        "model.onnx.data": "fp32 weights are in `model.onnx.data`. ",
    }
    return "".join(text for name, text in about.items() if (folder / name).is_file())


def _evaluation(run_dir: Path, result: TrainResult) -> EvalReport | None:
    """Return eval.json, if the run was evaluated at this checkpoint."""
    path = run_dir / "eval.json"
    report = EvalReport.read(path) if path.is_file() else None
    return report if report and report.checkpoint_sha256 == result.checkpoint_sha256 else None


def _figures(result: TrainResult, *, parity: ParityReport, evaluation: EvalReport | None) -> str:
    rows = [("steps", f"{result.step:,}"), ("training tokens", f"{result.tokens:,}")]
    if evaluation is not None:
        rows += [
            ("validation loss", f"{evaluation.loss:.4f} nats per token, {evaluation.tokens:,} held-out tokens"),
            ("perplexity", f"{evaluation.perplexity:.2f}"),
        ]
        if evaluation.describe_weights:
            rows.append(("weights", evaluation.describe_weights))
        if evaluation.bits_per_byte is not None:  # None for masked models: they predict only masked tokens
            rows.append(("bits per byte", f"{evaluation.bits_per_byte:.4f}"))
    rows.append(("export", parity.in_words))
    return "\n".join(["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
