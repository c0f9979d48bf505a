"""Exports a checkpoint to runs/ID/export/: Hugging Face folder, ONNX graphs, model card, and a report of their parity.

    python -m training.export runs/ID/plan.json

The folder appears only if all of them give the checkpoint's logits on held-out text within the plan's bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from training.build_engine import build_engines
from training.checkpoint.retention import keep
from training.exports.latency import measure_latency
from training.exports.model_card import model_card
from training.exports.onnx_graphs import remove_graph, save_graphs, save_quantized
from training.exports.parity import QUANTIZED, check_parity, parity_failure
from training.exports.tensorrt import why_no_tensorrt
from training.models.language_model import load_model
from training.records.checkpoint import check_model, reading
from training.records.plan import RunPlan
from training.records.record import sha256_file
from training.records.results import ExportedModel
from training.records.train_result import TrainResult
from training.tracking.progress import Progress, to_rank_log

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__)
    parser.add_argument("plan", type=Path, help="the run's plan.json")
    run_dir = parser.parse_args(arguments).plan.resolve().parent
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        export_run(run_dir)
    except ValueError as error:
        sys.exit(f"Error: {error}")


def export_run(run_dir: Path) -> ExportedModel:
    """Writes `run_dir`/export/ from the checkpoint that result.json names; keeps an export of the same checkpoint.

    Raises ValueError when parity is out of bounds (the figures are in parity.json; there is no export/ then).
    """
    plan, result = RunPlan.read(run_dir / "plan.json"), TrainResult.read(run_dir / "result.json")
    target, part = run_dir / "export", run_dir / "export.part"
    if (target / "export.json").is_file():
        existing = ExportedModel.read(target / "export.json")
        if existing.checkpoint_sha256 == result.checkpoint_sha256:
            logger.info("kept %s: it was exported from this checkpoint (step %d)", target, existing.step)
            return existing
    for folder in (target, part):
        if folder.exists():
            shutil.rmtree(folder)
    part.mkdir()
    started = time.perf_counter()
    checkpoint = run_dir / result.checkpoint
    with reading(checkpoint):
        with Progress(to_rank_log, part="reading the checkpoint") as progress:
            check_model(checkpoint)
            exported = _write_export(plan, result, progress, run_dir=run_dir, folder=part)
        keep(checkpoint, why=f"exported to {target.name}/, and whatever is registered from there leads back to it")
    part.rename(target)
    logger.info(
        "exported step %d to %s in %.1f s: |ONNX - torch| <= %.1e, same likeliest token at %.2f%% of %d positions",
        result.step,
        target,
        time.perf_counter() - started,
        exported.parity.max_logit_difference,
        100 * exported.parity.argmax_agreement,
        exported.parity.positions,
    )
    return exported


def _write_export(
    plan: RunPlan, result: TrainResult, progress: Progress, *, run_dir: Path, folder: Path
) -> ExportedModel:
    causal = plan.config.objective == "causal"
    with quiet():
        model = load_model(run_dir / result.checkpoint, plan).hf
        progress.begin("writing the Hugging Face files")
        save_huggingface(model, folder, end_id=plan.end_id, causal=causal)
        shutil.copytree(Path(plan.shards_dir) / "tokenizer", folder, dirs_exist_ok=True)
        reloaded = load_model(folder, plan).hf
        progress.begin("writing the ONNX graphs")
        skipped = save_graphs(reloaded, folder, causal=causal)
        if "fp16" in plan.config.export.precisions:
            half = load_model(folder, plan, dtype=torch.float16).hf
            skipped |= save_graphs(half, folder, precision="fp16", causal=causal)
        for precision in QUANTIZED:
            if precision in plan.config.export.precisions:
                progress.begin(f"quantizing to {precision}")
                skipped |= save_quantized(folder, precision)
    if why := why_no_tensorrt():
        skipped["tensorrt"] = why
    progress.begin("comparing the logits of the graphs with torch's")
    parity, out_of_bounds = check_parity(model, reloaded, folder, plan=plan)
    for name in out_of_bounds:
        remove_graph(folder / name)
    skipped |= out_of_bounds
    for name, why in skipped.items():
        logger.warning("left out %s: %s", name, why)
    parity.write(run_dir / "parity.json")
    if not parity.passed:
        shutil.rmtree(folder)
        raise ValueError(parity_failure(parity, report=run_dir / "parity.json"))
    (folder / "README.md").write_text(model_card(plan, result, parity=parity, run_dir=run_dir))
    exported = ExportedModel(
        step=result.step,
        checkpoint_sha256=result.checkpoint_sha256,
        objective=plan.config.objective,
        context=plan.config.train.context,
        end_id=plan.end_id,
        files={path.name: sha256_file(path) for path in sorted(folder.iterdir())},
        parity=parity,
        skipped=skipped,
    )
    exported.write(folder / "export.json")
    if "tensorrt" not in skipped:
        progress.begin("building TensorRT engines")
        exported = _with_engines(exported, folder, plan=plan)
    if plan.config.export.latency_seconds:
        progress.begin("measuring the latency of the graphs")
        with quiet():
            measure_latency(model, folder, plan=plan).write(folder / "latency.json")
    return exported


def _with_engines(exported: ExportedModel, folder: Path, *, plan: RunPlan) -> ExportedModel:
    """Builds engines for this GPU. They are not among the export's files, and it is complete without them."""
    try:
        build_engines(folder, plan=plan)
    except ValueError as error:
        logger.warning("left out tensorrt: %s", error)
        exported = exported.model_copy(update={"skipped": {**exported.skipped, "tensorrt": str(error)}})
        exported.write(folder / "export.json")
    return exported


def save_huggingface(model: Any, folder: Path, *, end_id: int, causal: bool) -> None:
    """config.json, model.safetensors and, for causal models, a generation_config.json that ends at `end_id`."""
    if causal:
        model.config.use_cache = True  # training switched it off
        model.generation_config.use_cache = True
        model.generation_config.eos_token_id = end_id
        if model.generation_config.pad_token_id is None:
            model.generation_config.pad_token_id = end_id
    model.save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars, missing-torchvision notes and the like off the terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
