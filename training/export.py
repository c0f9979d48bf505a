"""Exports a checkpoint to runs/ID/export/: Hugging Face folder, ONNX graphs, model card, and a report of their parity.

    python -m training.export runs/ID/plan.json

The folder appears only if the Hugging Face files give the checkpoint's logits on held-out text within the plan's
bounds. ONNX graphs and TensorRT engines that do not, or that cannot be made, are left out, and the record says why. Of
a model that is too large for that the Hugging Face files are copied from the checkpoint, and there is nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from training.build_engine import build_engines
from training.checkpoint.averaged_weights import AveragedWeights
from training.checkpoint.copied_weights import copy_weights
from training.checkpoint.load import weights_for
from training.checkpoint.retention import keep
from training.exports.carried_files import carry_files
from training.exports.latency import measure_latency
from training.exports.model_card import model_card
from training.exports.onnx_graphs import (
    experts_bytes,
    graph_file,
    graph_files,
    reason,
    remove_graphs,
    save_graphs,
    save_quantized,
)
from training.exports.parity import PORTABLE, check_parity, graphs_in, held_out_texts, parity_failure
from training.exports.tensorrt import why_no_tensorrt
from training.exports.tokenizer_files import copy_tokenizer, why_others_differ
from training.facts.model_config import read_settings
from training.models.init_weights import fill
from training.models.language_model import LanguageModel, load_model
from training.models.pretrained import auto_class_of
from training.node.limits import usable_memory_bytes
from training.records.checkpoint import check_model, checkpoint_folder, reading
from training.records.model_state import Shapes, check_export
from training.records.plan import RunPlan
from training.records.record import sha256_file, write_atomically
from training.records.results import QUANTIZED, EvalReport, ExportedModel, ParityReport
from training.records.train_result import TrainResult
from training.tracking.progress import Progress, to_rank_log

logger = logging.getLogger(__name__)

GRAPHS_MEMORY = 5  # of the weights: the model, its copy read back, the graphs' weights, a session of each graph


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
    """Writes `run_dir`/export/ from the checkpoint that result.json names; keeps an export of
    the same checkpoint that has the graphs which the plan asks for.

    Raises ValueError when parity is out of bounds (the figures are in parity.json; there is no export/ then).
    """
    plan, result = RunPlan.read(run_dir / "plan.json"), TrainResult.read(run_dir / "result.json")
    target, part = run_dir / "export", run_dir / "export.part"
    averaged = _averaged(plan, result, run_dir)
    steps = tuple(int(each.name) for each in averaged)
    if (target / "export.json").is_file():
        existing = ExportedModel.read(target / "export.json")
        is_same = (existing.checkpoint_sha256, existing.averaged_steps) == (result.checkpoint_sha256, steps)
        if is_same and not lacks_graphs(existing, plan):
            logger.info("kept %s: it was exported from this checkpoint (step %d)", target, existing.step)
            return existing
    for folder in (target, part):
        if folder.exists():
            shutil.rmtree(folder)
    part.mkdir()
    started = time.perf_counter()
    checkpoint = run_dir / result.checkpoint
    with contextlib.ExitStack() as held:
        for each in averaged or [checkpoint]:
            held.enter_context(reading(each))
        with Progress(to_rank_log, part="reading the checkpoint") as progress:
            for each in averaged or [checkpoint]:
                check_model(each)
            exported = _write_export(plan, result, progress, averaged=averaged, run_dir=run_dir, folder=part)
        keep(checkpoint, why=f"exported to {target.name}/, and whatever is registered from there leads back to it")
    part.rename(target)
    logger.info(
        "exported %s to %s in %.1f s: %s",
        f"the average of steps {', '.join(map(str, steps))}" if averaged else f"step {result.step}",
        target,
        time.perf_counter() - started,
        exported.parity.in_words,
    )
    return exported


def _averaged(plan: RunPlan, result: TrainResult, run_dir: Path) -> list[Path]:
    """Return the checkpoints whose average is exported; none: the last weights are.

    Raises ValueError if the run's evaluation, which chooses, was not made.
    """
    if not plan.config.train.num_averaged or plan.config.export.weights == "last":
        return []
    path = run_dir / "eval.json"
    report = EvalReport.read(path) if path.is_file() else None
    if report is None or report.checkpoint_sha256 != result.checkpoint_sha256:
        raise ValueError(
            f"train.average={plan.config.train.average}: {path} does not say whether the average is better than the "
            "last weights of this checkpoint: evaluate the run first, or set export.weights=last"
        )
    steps = report.averaged_steps if report.weights == "average" else ()
    return [checkpoint_folder(run_dir, step) for step in steps]


def lacks_graphs(existing: ExportedModel, plan: RunPlan) -> bool:
    """Return whether the plan asks for a graph that an export neither has nor left out for a reason."""
    if "onnx" in existing.skipped:
        return not why_no_graphs(plan)
    kinds = {precision: "batch" if precision in QUANTIZED else "forward" for precision in plan.config.export.precisions}
    wanted = {graph_file(kind, precision) for precision, kind in kinds.items()}
    return not wanted <= existing.files.keys() | existing.skipped.keys()


def _write_export(
    plan: RunPlan, result: TrainResult, progress: Progress, *, averaged: list[Path], run_dir: Path, folder: Path
) -> ExportedModel:
    """Write the files to `folder`. `averaged`: the checkpoints whose average is exported; none: the last one is."""
    checkpoint, why = run_dir / result.checkpoint, why_no_graphs(plan)
    copy_tokenizer(plan, folder)
    progress.begin("writing the Hugging Face files")
    average = AveragedWeights(averaged, plan.config.train) if averaged else None
    hashes, tensors = _copy_huggingface(plan, checkpoint, folder, average=average)
    model, left_out = None, carry_files(plan, folder)
    with quiet():
        if differs := why_others_differ(plan, folder):
            left_out["AutoTokenizer"] = differs
    if why:
        parity, skipped = _without_graphs(plan), {"onnx": why} | left_out
    else:
        model, parity, skipped = _with_graphs(plan, checkpoint, folder, progress, average=average)
        skipped |= left_out
    for name, why_not in skipped.items():
        logger.warning("left out %s: %s", name, why_not)
    if not why and (no_tensorrt := why_no_tensorrt()):
        skipped["tensorrt"] = no_tensorrt
        level = logging.INFO if plan.device_kind == "cpu" else logging.WARNING
        logger.log(level, "left out tensorrt: %s", no_tensorrt)
    parity.write(run_dir / "parity.json")
    if not parity.passed:
        shutil.rmtree(folder)
        raise ValueError(parity_failure(parity, report=run_dir / "parity.json"))
    (folder / "README.md").write_text(model_card(plan, result, parity=parity, run_dir=run_dir, folder=folder))
    exported = ExportedModel(
        step=result.step,
        checkpoint_sha256=result.checkpoint_sha256,
        averaged_steps=tuple(int(each.name) for each in averaged),
        objective=plan.config.objective,
        context=plan.config.train.context,
        end_id=plan.end_id,
        end_ids=plan.end_ids,
        text_encoding=plan.text_encoding,
        files={path.name: hashes.get(path.name) or sha256_file(path) for path in sorted(folder.iterdir())},
        tensors={name: tuple(shape) for name, shape in tensors.items()},
        parity=parity,
        skipped=skipped,
    )
    check_export(folder, exported)
    exported.write(folder / "export.json")
    if not graphs_in(folder, PORTABLE):
        return exported
    if "tensorrt" not in skipped:
        progress.begin("building TensorRT engines")
        exported = _unless_it_fails("tensorrt", lambda: build_engines(folder, plan=plan), exported, folder)
    if plan.config.export.latency_seconds:
        progress.begin("measuring the latency of the graphs")
        exported = _unless_it_fails("latency.json", lambda: _measure(model, folder, plan), exported, folder)
    return exported


def _measure(model: Any, folder: Path, plan: RunPlan) -> None:
    with quiet():
        measure_latency(model, folder, plan=plan).write(folder / "latency.json")


def why_no_graphs(plan: RunPlan) -> str:
    """Return the reason why the weights are copied and no ONNX graphs made, "" if graphs are."""
    size, most = 4 * plan.shape.parameters / 2**30, plan.config.export.onnx_up_to_gib
    what = f"the weights take {size:.3g} GiB in fp32"
    if size > most:
        return f"{what}, and export.onnx_up_to_gib = {most:g}: raise it to have graphs"
    return _no_room(
        size * GRAPHS_MEMORY, f"{what}; making and checking ONNX graphs needs {GRAPHS_MEMORY} times as much"
    )


def why_no_experts(model: Any, plan: RunPlan) -> str:
    """Return the reason why no ONNX graphs are made of this mixture of experts, "" if they are."""
    tokens = max(sum(map(len, texts)) for texts in held_out_texts(plan))
    size = tokens * experts_bytes(model) / 2**30
    return _no_room(size, f"an ONNX graph copies its experts' weights for each token: {tokens:,} need {size:.3g} GiB")


def _no_room(gib: float, what: str) -> str:
    free = min(psutil.virtual_memory().available, usable_memory_bytes()) / 2**30
    more = "export on a host with more to have graphs"
    return f"{what} of memory, and {free:.1f} GiB are free: {more}" if gib > free else ""


def _with_graphs(
    plan: RunPlan, checkpoint: Path, folder: Path, progress: Progress, *, average: AveragedWeights | None
) -> tuple[Any, ParityReport, dict[str, str]]:
    """Write the graphs of the Hugging Face files in `folder`: the model, their parity with the checkpoint's model, or
    with the `average`, and what is left out and why.
    """
    with quiet():
        progress.begin("writing the ONNX graphs")
        exported = load_model(folder, plan).hf
        skipped = _save_graphs(exported, plan, folder, progress)
    progress.begin("comparing the logits of the graphs with torch's")
    with quiet():
        trained = load_model(checkpoint, plan).hf
    if average is not None:
        fill(trained, average)
    parity, out = check_parity(trained, exported, folder, plan=plan)
    remove_graphs(folder, out)
    return exported, parity, skipped | out


def _save_graphs(model: Any, plan: RunPlan, folder: Path, progress: Progress) -> dict[str, str]:
    """Write the graphs that the plan asks for; return what is left out and why."""
    causal, precisions = plan.config.objective == "causal", plan.config.export.precisions
    if why := why_no_experts(model, plan):
        return {name: why for precision in precisions for name in graph_files(precision, causal=causal)}
    skipped = save_graphs(model, folder, causal=causal)
    if "fp16" in precisions:
        half = load_model(folder, plan, dtype=torch.float16).hf
        skipped |= save_graphs(half, folder, precision="fp16", causal=causal)
    for precision in QUANTIZED:
        if precision in precisions:
            progress.begin(f"quantizing to {precision}")
            skipped |= save_quantized(folder, precision)
    return skipped


def _copy_huggingface(
    plan: RunPlan, checkpoint: Path, folder: Path, *, average: AveragedWeights | None
) -> tuple[dict[str, str], Shapes]:
    """Write the files that save_pretrained would, without holding the model in memory: the weights' hashes, by file,
    and the shapes of the model's tensors.

    Raises ValueError if the checkpoint does not have the model's tensors, or has a weight that is not finite.
    """
    from transformers import GenerationConfig

    with quiet(), torch.device("meta"):
        settings = read_settings(checkpoint)
        model = auto_class_of(plan.config.objective).from_config(settings, dtype=torch.float32)
    whole, buffers = LanguageModel(model, precision="fp32"), {name for name, _ in model.named_buffers()}
    weights_for(whole, checkpoint)
    written = copy_weights(checkpoint, folder, buffers=buffers, average=average)
    hashes = {name: file.sha256 for name, file in written.items()}
    if plan.config.objective == "causal":
        model.config.use_cache = True  # training switched it off
    model.config.architectures = [type(model).__name__]
    vars(model.config).pop("auto_map", None)  # it names files with code, which are never run and not carried
    model.config.save_pretrained(folder)
    if model.can_generate():
        own = GenerationConfig.from_pretrained(checkpoint, config_file_name="config.json", _from_model_config=True)
        own.use_cache = True
        write_generation_config(plan, folder, own=own.to_diff_dict())
    return hashes, whole.state_shapes


def write_generation_config(plan: RunPlan, folder: Path, *, own: dict[str, Any]) -> None:
    """Write generation_config.json: the pretrained model's, or what its config.json says of it, with all end tokens.

    transformers would refuse to save some that it reads, such as a temperature beside do_sample=false.
    """
    content = dict(plan.generation_config) or own
    if plan.config.objective == "causal":
        ends = list(plan.end_ids) if plan.more_ends else plan.end_id
        named = content.get("eos_token_id")
        if not (isinstance(named, list) and sorted(named) == sorted(plan.end_ids)):  # the order says nothing
            content["eos_token_id"] = ends
        if content.get("pad_token_id") is None:
            content["pad_token_id"] = plan.end_id
    write_atomically(folder / "generation_config.json", json.dumps(content, indent=2) + "\n")


def _without_graphs(plan: RunPlan) -> ParityReport:
    bound = plan.config.export.max_logit_difference
    return ParityReport(reload_logit_difference=0.0, reload_logit_difference_bound=bound, graphs=())


def _unless_it_fails(what: str, make: Callable[[], object], exported: ExportedModel, folder: Path) -> ExportedModel:
    """Make what is not among the export's files. If it fails the export is complete without it, and says why."""
    try:
        make()
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else reason(error)
        logger.warning("left out %s: %s", what, why)
        exported = exported.model_copy(update={"skipped": {**exported.skipped, what: why}})
        exported.write(folder / "export.json")
    return exported


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
