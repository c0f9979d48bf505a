"""Parity: whether an export's files give the checkpoint's logits on held-out text, within the config's bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from training.config.export import ExportConfig
from training.exports.onnx_graphs import Forward, graph_file, reason, weights_file
from training.exports.onnx_session import decoded_logits, forward_logits, in_place_logits, open_session
from training.records.plan import RunPlan
from training.records.results import QUANTIZED, GraphParity, ParityReport, PrecisionQuality
from training.shards.stream import TokenStream

# Rows of a batch are limited so that one array of logits stays under 128 MiB.
MAX_BATCH_LOGITS = 2**25
NUM_SEQUENCES = 8  # held-out ones on which parity is checked
# Bounds beside export.max_logit_difference: its multiple for fp16; the share of positions with the likeliest token of
# torch in fp32; the difference of perplexity, as a fraction.
FP16_LOGITS = 100
ARGMAX_AGREEMENT = {"fp32": 0.999, "fp16": 0.98}
PERPLEXITY_DIFFERENCE = {"fp32": 1e-3, "fp16": 0.01}
CURE = "if the logits alone exceed theirs, by rounding, raise export.max_logit_difference"
STEPS = 8  # tokens that the decode graph gets one by one, after a prompt

Portable = Literal["forward", "decode"]
Kind = Literal["forward", "decode", "batch"]
PORTABLE: tuple[Portable, ...] = ("forward", "decode")  # any ONNX runtime can run them
BATCH: tuple[Kind, ...] = ("batch",)  # only ONNX Runtime can
K = TypeVar("K", bound=str)

# Texts of any lengths -> fp32 [length, vocab] for each
Logits = Callable[[list[np.ndarray]], list[np.ndarray]]


@dataclass
class Tally:
    """Sums up how an export's logits differ from the model's, over texts."""

    masked: bool
    largest: list[float] = field(default_factory=list)
    agreeing: int = 0
    positions: int = 0
    predicted: int = 0
    loss: float = 0.0  # of the export, in nats, summed
    true_loss: float = 0.0  # of the model

    def add(self, texts: list[np.ndarray], candidates: list[np.ndarray], truths: list[np.ndarray]) -> None:
        for text, candidate, truth in zip(texts, candidates, truths, strict=True):
            self.largest.append(float(np.abs(candidate - truth).max()))
            self.agreeing += int((candidate.argmax(-1) == truth.argmax(-1)).sum())
            self.positions += len(text)
            # A causal model predicts the next token; a masked one is asked for the tokens that it sees.
            logits, targets = (slice(None), text) if self.masked else (slice(-1), text[1:])
            self.predicted += len(targets)
            self.loss += _loss(candidate[logits], targets)
            self.true_loss += _loss(truth[logits], targets)

    @property
    def difference(self) -> float:
        return float(np.max(self.largest))  # numpy's max keeps a NaN, Python's may lose it

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss / max(1, self.predicted)))

    def report(self, kind: Kind, precision: str, bounds: ExportConfig) -> GraphParity:
        fp16 = precision == "fp16"
        return GraphParity(
            file=graph_file(kind, precision),
            graph=kind,
            precision="fp16" if fp16 else "fp32",
            positions=self.positions,
            max_logit_difference=self.difference,
            argmax_agreement=self.agreeing / self.positions,
            perplexity=self.perplexity,
            torch_perplexity=float(np.exp(self.true_loss / max(1, self.predicted))),
            max_logit_difference_bound=bounds.max_logit_difference * (FP16_LOGITS if fp16 else 1),
            min_argmax_agreement_bound=ARGMAX_AGREEMENT["fp16" if fp16 else "fp32"],
            max_perplexity_difference_bound=PERPLEXITY_DIFFERENCE["fp16" if fp16 else "fp32"],
        )


def _loss(logits: np.ndarray, targets: np.ndarray) -> float:
    if not len(targets):
        return 0.0
    return float(
        torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(targets), reduction="sum")
    )


def check_parity(model: Any, reloaded: Any, folder: Path, *, plan: RunPlan) -> tuple[ParityReport, dict[str, str]]:
    """Compare every graph in `folder`, and the model that was reloaded from it, with `model`.

    The report is of the graphs that may stay. Also return those that may not, with reasons: they are out of bounds, or
    ONNX Runtime cannot run them.
    """
    masked, bounds = plan.config.objective == "masked", plan.config.export
    graphs = graphs_in(folder, (*PORTABLE, *BATCH))
    left = {key: _opened_when_run(folder / graph_file(*key), key[0]) for key in graphs}
    tallies = {key: Tally(masked) for key in left}
    expected, reloaded_logits, reload = torch_logits(model), torch_logits(reloaded), Tally(masked)
    out: dict[str, str] = {}
    for texts in held_out_texts(plan):
        truth = expected(texts)
        reload.add(texts, reloaded_logits(texts), truth)
        for key, logits in [*left.items()]:
            try:
                tallies[key].add(texts, logits(texts), truth)
            except Exception as error:
                del left[key]
                out[graph_file(*key)] = f"ONNX Runtime cannot run it ({reason(error)})"
    reports = [tallies[key].report(*key, bounds) for key in left if key[1] not in QUANTIZED]
    out |= {graph.file: f"{figures(graph)}: {CURE}" for graph in reports if not graph.passed}
    precisions: list[PrecisionQuality] = []
    steps = [precision for kind, precision in left if kind == "batch" and graph_file(kind, precision) not in out]
    if "fp32" in steps:
        precisions = [_quality(folder, precision, tallies, bounds) for precision in steps]
        out |= {graph_file("batch", one.precision): _price(one) for one in precisions if not one.passed}
    else:  # quantized graphs are made from it
        out |= {graph_file("batch", name): f"{graph_file('batch')} is left out" for name in steps if name in QUANTIZED}
    report = ParityReport(
        reload_logit_difference=reload.difference,
        reload_logit_difference_bound=bounds.max_logit_difference,
        graphs=tuple(graph for graph in reports if graph.file not in out),
        precisions=tuple(precisions),
    )
    return report, out


def _quality(
    folder: Path, precision: str, tallies: dict[tuple[Kind, str], Tally], bounds: ExportConfig
) -> PrecisionQuality:
    files = [folder / graph_file("batch", precision), folder / weights_file(precision)]
    return PrecisionQuality.model_validate(
        {
            "precision": precision,
            "size_bytes": sum(path.stat().st_size for path in files),
            "perplexity": tallies["batch", precision].perplexity,
            "fp32_perplexity": tallies["batch", "fp32"].perplexity,
            "max_increase": bounds.max_perplexity_increase,
        }
    )


def _price(quality: PrecisionQuality) -> str:
    return (
        f"perplexity rises by {100 * quality.increase:.2f}% (from {quality.fp32_perplexity:.4g} to "
        f"{quality.perplexity:.4g}), export.max_perplexity_increase allows {100 * quality.max_increase:.2f}%"
    )


def graphs_in(folder: Path, kinds: Sequence[K]) -> list[tuple[K, str]]:
    """Return the kind and precision of the graphs of these kinds in `folder`, fp32 first."""
    of_kinds = [(kind, precision) for precision in ("fp32", "fp16", *QUANTIZED) for kind in kinds]
    return [key for key in of_kinds if (folder / graph_file(*key)).is_file()]


def held_out_texts(plan: RunPlan) -> list[list[np.ndarray]]:
    """Return int64 texts, in lists that run as one batch: windows spread over held-out tokens, then shorter ones."""
    stream = TokenStream(Path(plan.shards_dir), "validation")
    length = plan.config.train.context  # the plan made sure that there are more tokens than this
    starts = np.linspace(0, len(stream) - length, NUM_SEQUENCES).astype(np.int64)
    windows = [stream.read(int(start), int(start) + length).astype(np.int64) for start in starts]
    rows = max(1, MAX_BATCH_LOGITS // (length * plan.vocab_size))
    whole = [windows[first : first + rows] for first in range(0, len(windows), rows)]
    unlike = [windows[0], windows[-1][: (length + 1) // 2], windows[0][: (length + 2) // 3]]
    return [*whole, [windows[-1][:1]], unlike[: min(3, rows)]]


def torch_logits(model: Any) -> Logits:
    forward = Forward(model).eval()

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return forward(torch.from_numpy(ids)).numpy()

    return lambda texts: _by_length(logits, texts)


def session_logits(session: Any, kind: str) -> Logits:
    if kind != "forward":
        decoded = decoded_logits if kind == "decode" else in_place_logits
        return lambda texts: decoded(session, texts, steps=STEPS)
    return lambda texts: _by_length(lambda ids: forward_logits(session, ids), texts)


def _opened_when_run(graph: Path, kind: str) -> Logits:
    opened = functools.cache(lambda: session_logits(open_session(graph), kind))
    return lambda texts: opened()(texts)


def _by_length(logits: Callable[[np.ndarray], np.ndarray], texts: list[np.ndarray]) -> list[np.ndarray]:
    """Run texts of one length together, others one by one: a forward graph has no padding."""
    if len({len(text) for text in texts}) == 1:
        return list(logits(np.stack(texts)))
    return [logits(text[None])[0] for text in texts]


def parity_failure(parity: ParityReport, *, report: Path) -> str:
    return (
        f"the reloaded Hugging Face folder differs from torch by up to {parity.reload_logit_difference:.3g} (bound "
        f"{parity.reload_logit_difference_bound:.3g}); see {report}. If this is rounding, raise "
        "export.max_logit_difference; if not, evaluate the checkpoint first: weights that are not finite fail this "
        "check too"
    )


def figures(graph: GraphParity) -> str:
    """Return in words by how much a graph or an engine differs from torch."""
    return (
        f"on {graph.positions} held-out positions it differs from torch by up to "
        f"{graph.max_logit_difference:.3g} (bound {graph.max_logit_difference_bound:.3g}), the likeliest token agrees "
        f"at {100 * graph.argmax_agreement:.3f}% (bound {100 * graph.min_argmax_agreement_bound:.3f}%), perplexity "
        f"differs by {100 * graph.perplexity_difference:.2g}% (bound "
        f"{100 * graph.max_perplexity_difference_bound:.2g}%)"
    )
