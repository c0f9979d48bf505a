"""The records of evaluation, export and registration."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from training.facts.formats import Kind
from training.facts.placed import FileName
from training.records.record import Record
from training.records.text_encoding import TextEncoding

Weights = Literal["last", "average"]  # of the last step, or by train.average


class Sample(Record):
    """A text that the model generated."""

    prompt: str
    text: str


class Figures(Record):
    """Measurements on held-out text. `loss` is in nats per token; a masked model has no bits per byte."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    accuracy: float
    tokens: int
    text_bytes: int


class SourceFigures(Figures):
    """Measurements on the held-out documents of one source."""

    source: str


class TaskScore(Record):
    """One metric of a downstream task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int
    higher_is_better: bool


class EvalReport(Figures):
    """eval.json: measurements over the whole held-out split, in which every token is predicted once.

    `weights`: those which all figures are of. Where train.average makes others, `last_loss` and `average_loss` are the
    losses of both, and `averaged_steps` the checkpoints' steps; otherwise None, and empty.
    """

    step: int
    checkpoint_sha256: str
    shards_fingerprint: str
    sources: tuple[SourceFigures, ...] = ()
    tasks: tuple[TaskScore, ...] = ()
    samples: tuple[Sample, ...]
    weights: Weights = "last"
    last_loss: float | None = None
    average_loss: float | None = None
    averaged_steps: tuple[int, ...] = ()
    seconds: float

    @property
    def describe_weights(self) -> str:
        """Describe both weights, where there are two; else empty."""
        if self.last_loss is None or self.average_loss is None:
            return ""
        steps = ", ".join(f"{step:,}" for step in self.averaged_steps)
        return (
            f"loss {self.last_loss:.4f} with the last weights, {self.average_loss:.4f} with the average of the "
            f"checkpoints of steps {steps}; all other figures, and the export, are of the {self.weights}"
        )

    @property
    def loss_by_source(self) -> dict[str, float]:
        return {source.source: source.loss for source in self.sources}


class GraphParity(Record):
    """One ONNX graph against torch in fp32 on held-out text, and the bounds that it must keep."""

    file: str
    graph: Literal["forward", "decode", "batch"]
    precision: Literal["fp32", "fp16"]
    positions: int
    max_logit_difference: float
    argmax_agreement: float
    perplexity: float
    torch_perplexity: float
    max_logit_difference_bound: float
    min_argmax_agreement_bound: float
    max_perplexity_difference_bound: float

    @property
    def perplexity_difference(self) -> float:
        """The difference as a fraction of torch's perplexity."""
        return abs(self.perplexity / self.torch_perplexity - 1)

    @property
    def passed(self) -> bool:
        return (
            self.max_logit_difference <= self.max_logit_difference_bound
            and self.argmax_agreement >= self.min_argmax_agreement_bound
            and self.perplexity_difference <= self.max_perplexity_difference_bound
        )


class PrecisionQuality(Record):
    """The graph that the server steps in one precision: its size with its weights, and its price in quality."""

    precision: Literal["fp32", "fp16", "int8", "int4"]
    size_bytes: int
    perplexity: float
    fp32_perplexity: float
    max_increase: float

    @property
    def increase(self) -> float:
        """The increase as a fraction of the perplexity in fp32; negative if it fell."""
        return self.perplexity / self.fp32_perplexity - 1

    @property
    def passed(self) -> bool:
        return self.precision == "fp32" or self.increase <= self.max_increase


class ParityReport(Record):
    """Differences between exported copies and the checkpoint in torch; `reload_…`: the saved Hugging Face folder.

    `precisions`: of the graph that the server steps, fp32 first; those that did not pass were left out.

    Without graphs (`export.onnx_up_to_gib`) nothing is computed: the weights are the checkpoint's own bytes.
    """

    reload_logit_difference: float
    reload_logit_difference_bound: float
    graphs: tuple[GraphParity, ...]
    precisions: tuple[PrecisionQuality, ...] = ()

    @property
    def passed(self) -> bool:
        reloaded = self.reload_logit_difference <= self.reload_logit_difference_bound
        return reloaded and all(graph.passed for graph in self.graphs)

    # The figures of the fp32 graphs stand for the whole in summaries; None where there are none.
    @property
    def max_logit_difference(self) -> float | None:
        # NaN is the largest
        return max((graph.max_logit_difference for graph in self._fp32), key=lambda x: (x != x, x), default=None)

    @property
    def argmax_agreement(self) -> float | None:
        return min((graph.argmax_agreement for graph in self._fp32), default=None)

    @property
    def in_words(self) -> str:
        if not self._fp32:
            return "no ONNX graphs; the weights are copies of the checkpoint's"
        return (
            f"ONNX logits within {self.max_logit_difference:.1e} of torch's, same likeliest token at "
            f"{self.argmax_agreement:.2%} of {self._fp32[0].positions:,} positions"
        )

    @property
    def _fp32(self) -> list[GraphParity]:
        return [graph for graph in self.graphs if graph.precision == "fp32"]


QUANTIZED = ("int8", "int4")  # precisions of the graph that the server steps, with rounded weights
SERVED = "ONNX Runtime in place"  # as the server steps: the graph whose cache stays where it is


class LatencyFigure(Record):
    """Median time of `rounds` runs: of texts of `length` tokens (forward), or of one token after as many (decode)."""

    engine: str
    graph: Literal["forward", "decode"]
    precision: Literal["fp32", "fp16", "int8", "int4"]
    batch: int
    length: int
    rounds: int
    median_ms: float
    tokens_per_s: float


class LatencyReport(Record):
    """export/latency.json, apart from ExportedModel: two exports of one checkpoint are equal, their times differ."""

    device: str
    figures: tuple[LatencyFigure, ...]
    seconds: float

    def served_ms(self, precision: str) -> float | None:
        """Geometric mean over shapes of a step of the graph that the server steps; None if it was not measured."""
        found = [
            figure.median_ms for figure in self.figures if (figure.engine, figure.precision) == (SERVED, precision)
        ]
        return math.exp(sum(map(math.log, found)) / len(found)) if found else None


class EngineRecord(Record):
    """A TensorRT engine; it runs only with this version of TensorRT and on this kind of GPU."""

    file: str
    tensorrt: str
    gpu: str
    profiles: tuple[dict[str, tuple[tuple[int, ...], ...]], ...]  # each: input -> smallest, usual and largest shape
    parity: GraphParity
    texts: Literal["held-out", "random"]  # what parity was checked on
    build_s: float


class EngineReport(Record):
    """export/tensorrt.json, beside the engines."""

    FORMAT: ClassVar[Kind] = "exports"

    engines: tuple[EngineRecord, ...]
    latency: tuple[LatencyFigure, ...]


class ExportedModel(Record):
    """export/: model.safetensors, config.json, tokenizer, generation_config.json, ONNX graphs; sha256 by name.

    averaged_steps: of the checkpoints whose average it is, by train.average; empty: it is the checkpoint's own weights.
    end_ids: the tokens that end a generated text; end_id alone ends documents.
    tensors: the shapes of the model's state by name. text_encoding: how text becomes tokens.
    """

    FORMAT: ClassVar[Kind] = "exports"

    step: int
    checkpoint_sha256: str
    averaged_steps: tuple[int, ...] = ()
    objective: Literal["causal", "masked"]
    context: int
    end_id: int
    end_ids: tuple[int, ...]
    text_encoding: TextEncoding
    files: dict[FileName, str]
    tensors: dict[str, tuple[int, ...]]
    parity: ParityReport
    skipped: dict[str, str]  # what could not be made or was not carried over, and why

    @property
    def formats(self) -> str:
        """The formats of this export, in one text: `Hugging Face, decode.onnx, model.onnx`."""
        return ", ".join(["Hugging Face", *(name for name in self.files if name.endswith(".onnx"))])

    @property
    def left_out(self) -> str:
        """The formats that could not be made, each with its reason, in one text; empty if all were made."""
        return "; ".join(f"{name}: {why}" for name, why in self.skipped.items())


class RegisteredModel(Record):
    """A version in the registry, with what the gates decided about it."""

    name: str
    version: int
    alias: Literal["champion", "challenger", ""]  # "": superseded by a later version
    verdict: str
