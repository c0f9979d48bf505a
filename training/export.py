"""A checkpoint becomes runs/ID/export/: Hugging Face folder, ONNX graph, model card, and proof that they agree.

    python -m training.export runs/ID/plan.json

The folder appears only if both copies give the checkpoint's logits on held-out text within the plan's bounds.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.model import load_model
from training.model_card import model_card
from training.records import RunPlan, TrainResult, sha256_file
from training.results import ExportedModel, ParityReport
from training.retention import keep, reading
from training.shards import TokenStream

logger = logging.getLogger(__name__)

# Rows of a batch are limited so that one array of logits stays under 128 MiB.
MAX_BATCH_LOGITS = 2**25
# A protobuf file ends at 2 GiB: larger weights go to model.onnx.data beside it.
MAX_EMBEDDED_BYTES = 1_800_000_000

Logits = Callable[[np.ndarray], np.ndarray]


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
    """Write `run_dir`/export/ from the checkpoint that result.json names; keep one that is there already.

    Raises ValueError when parity is out of bounds (the figures are in parity.json; there is no export/ then).
    """
    plan, result = RunPlan.read(run_dir / "plan.json"), TrainResult.read(run_dir / "result.json")
    target, part = run_dir / "export", run_dir / "export.part"
    if (target / "export.json").is_file():
        existing = ExportedModel.read(target / "export.json")
        if existing.checkpoint_sha256 == result.checkpoint_sha256:
            logger.info("%s holds this checkpoint already (step %d): kept", target, existing.step)
            return existing
    for folder in (target, part):
        if folder.exists():
            shutil.rmtree(folder)
    part.mkdir()
    started = time.perf_counter()
    checkpoint = run_dir / result.checkpoint
    with reading(checkpoint):
        exported = _write_export(plan, result, run_dir=run_dir, folder=part)
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


def _write_export(plan: RunPlan, result: TrainResult, *, run_dir: Path, folder: Path) -> ExportedModel:
    with quiet():
        model = load_model(run_dir / result.checkpoint, plan).hf
        save_huggingface(model, folder, end_id=plan.end_id, causal=plan.config.objective == "causal")
        shutil.copytree(Path(plan.shards_dir) / "tokenizer", folder, dirs_exist_ok=True)
        save_onnx(model, folder / "model.onnx", context=plan.config.train.context)
        reloaded = load_model(folder, plan).hf
    batches = held_out_batches(plan)
    parity = compare(
        batches,
        expected=torch_logits(model),
        onnx=onnx_logits(folder / "model.onnx"),
        reloaded=torch_logits(reloaded),
        plan=plan,
    )
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
    )
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


class _LogitsOnly(torch.nn.Module):
    """One tensor in, one out, and no cache in the graph."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        # BERT's forward takes no use_cache; it never makes one.
        self.arguments = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, **self.arguments).logits
        return logits


def save_onnx(model: Any, path: Path, *, context: int) -> None:
    """fp32 graph: `input_ids` int64 [batch, length] -> `logits` fp32 [batch, length, vocab]; 5 s for small models."""
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    torch.onnx.export(
        _LogitsOnly(model).eval(),
        (torch.zeros(2, min(16, context), dtype=torch.int64),),  # a size of 1 would be taken for a constant
        path,
        dynamo=True,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=context)},),
        external_data=num_bytes > MAX_EMBEDDED_BYTES,
        optimize=False,  # saves 1 s of 6; ONNX Runtime optimizes by itself, and is as fast on either graph
        verbose=False,
    )


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


def held_out_batches(plan: RunPlan) -> list[np.ndarray]:
    """int64 [batch, length] arrays: windows spread over the held-out tokens, then some cut to other shapes."""
    stream = TokenStream(Path(plan.shards_dir), "validation")
    length = plan.config.train.context  # the plan made sure that there are more tokens than this
    starts = np.linspace(0, len(stream) - length, plan.config.export.parity_sequences).astype(np.int64)
    windows = np.stack([stream.read(int(start), int(start) + length) for start in starts]).astype(np.int64)
    rows = max(1, MAX_BATCH_LOGITS // (length * plan.vocab_size))
    whole = [windows[first : first + rows] for first in range(0, len(windows), rows)]
    cut = [windows[-1:, :1], windows[:1, : (length + 1) // 2], windows[: min(3, rows), : (length + 2) // 3]]
    return whole + cut


def torch_logits(model: Any) -> Logits:
    only = _LogitsOnly(model).eval()

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return only(torch.from_numpy(ids)).float().numpy()

    return logits


def onnx_logits(path: Path) -> Logits:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch needs the cores in between
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def logits(ids: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(["logits"], {"input_ids": ids})[0])

    return logits


def compare(
    batches: list[np.ndarray], *, expected: Logits, onnx: Logits, reloaded: Logits, plan: RunPlan
) -> ParityReport:
    """Largest differences of logits and the share of positions with the same likeliest token, over all batches."""
    differences, reload_differences, agreeing = [], [], 0
    for ids in batches:
        truth, candidate = expected(ids), onnx(ids)
        differences.append(np.abs(candidate - truth).max())
        reload_differences.append(np.abs(reloaded(ids) - truth).max())
        agreeing += int((candidate.argmax(-1) == truth.argmax(-1)).sum())
    positions = sum(ids.size for ids in batches)
    return ParityReport(
        max_logit_difference=float(np.max(differences)),  # numpy's max keeps a NaN, Python's may lose it
        reload_logit_difference=float(np.max(reload_differences)),
        argmax_agreement=agreeing / positions,
        positions=positions,
        max_logit_difference_bound=plan.config.export.max_logit_difference,
        min_argmax_agreement_bound=plan.config.export.min_argmax_agreement,
    )


def parity_failure(parity: ParityReport, *, report: Path) -> str:
    return (
        f"on {parity.positions} held-out positions ONNX differs from torch by up to "
        f"{parity.max_logit_difference:.3g} (bound {parity.max_logit_difference_bound:.3g}), the reloaded Hugging Face "
        f"folder by {parity.reload_logit_difference:.3g}, and the likeliest token agrees at "
        f"{100 * parity.argmax_agreement:.3f}% (bound {100 * parity.min_argmax_agreement_bound:.3f}%); see {report}. "
        "If this is rounding, raise export.max_logit_difference or lower export.min_argmax_agreement; "
        "if not, evaluate the checkpoint first: weights that are not finite show up here too"
    )


if __name__ == "__main__":
    main()
