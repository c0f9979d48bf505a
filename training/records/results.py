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
    """Text that the model was to continue."""
    text: str
    """Continuation that the model generated, without the prompt."""


class Figures(Record):
    """Measurements on held-out text."""

    loss: float
    """Mean cross-entropy in nats per predicted token."""
    perplexity: float
    """Exponential of the loss, which is capped at 700 nats first."""
    bits_per_byte: float | None
    """Bits of cross-entropy per byte of text; None for a masked model, which predicts too few of the tokens."""
    accuracy: float
    """Share of the predicted tokens that the model gave the highest probability."""
    tokens: int
    """Number of tokens that were predicted."""
    text_bytes: int
    """UTF-8 bytes of the held-out text whose tokens were predicted."""


class SourceFigures(Figures):
    """Measurements on the held-out documents of one source."""

    source: str
    """Name of the source in data.sources, or of a file or folder; `others (N)` for the N smallest together."""


class TaskScore(Record):
    """One metric of a downstream task."""

    task: str
    """Name of the task, or of a group of tasks, in the Language Model Evaluation Harness."""
    metric: str
    """Name of the metric, such as acc; with the harness's filter behind a colon if it has one."""
    value: float
    """The metric's value over all samples of the task, in the metric's own unit."""
    stderr: float | None
    """Standard error of the value; None if the harness estimates none."""
    samples: int
    """Number of samples that were scored; for a group, those of all its tasks."""
    higher_is_better: bool
    """Whether a larger value is a better one."""


class EvalReport(Figures):
    """eval.json: measurements over the whole held-out split, in which every token is predicted once."""

    step: int
    """Step of the evaluated checkpoint; 0 for a model that is no checkpoint of a run."""
    checkpoint_sha256: str
    """SHA-256 that identifies the evaluated weights: that of the checkpoint's manifest, where it is one."""
    shards_fingerprint: str
    """Fingerprint in the manifest of the token shards whose validation split was predicted."""
    sources: tuple[SourceFigures, ...] = ()
    """Figures of each source of the held-out text, the one with the most tokens first."""
    tasks: tuple[TaskScore, ...] = ()
    """Scores of the downstream tasks that the config asks for; empty if none."""
    samples: tuple[Sample, ...]
    """Texts that the model wrote, one for each prompt; empty for a masked model."""
    weights: Weights = "last"
    """Weights that all other figures are measured with: those of the last step, or an average by train.average."""
    last_loss: float | None = None
    """Loss with the last step's weights, where train.average makes others; None if there is no average."""
    average_loss: float | None = None
    """Loss with the averaged weights; None if there is no average."""
    averaged_steps: tuple[int, ...] = ()
    """Steps of the checkpoints in the average, oldest first; empty if there is no average."""
    seconds: float
    """Seconds that the whole evaluation took, with loading the model."""

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
    """Name of the graph's file in the export's folder."""
    graph: Literal["forward", "decode", "batch"]
    """What the graph computes. forward: logits of whole texts. decode: those after one more token. batch: one token for
    each of several texts, with the cache in place.
    """
    precision: Literal["fp32", "fp16"]
    """Precision of the graph's weights and products."""
    positions: int
    """Number of held-out tokens at whose positions the logits were compared."""
    max_logit_difference: float
    """Largest absolute difference between a logit of the graph and torch's; NaN if either was NaN."""
    argmax_agreement: float
    """Share of the positions at which both give the highest logit to the same token."""
    perplexity: float
    """Perplexity of the graph on the compared text."""
    torch_perplexity: float
    """Perplexity of the model in torch, in fp32, on the same text."""
    max_logit_difference_bound: float
    """Largest `max_logit_difference` that passes: export.max_logit_difference, or its multiple for fp16."""
    min_argmax_agreement_bound: float
    """Smallest `argmax_agreement` that passes."""
    max_perplexity_difference_bound: float
    """Largest difference of both perplexities that passes, as a fraction of torch's."""

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
    """Precision of the weights, which are rounded to 8 or 4 bits in int8 and int4."""
    size_bytes: int
    """Bytes of the graph's file and of the file with its weights."""
    perplexity: float
    """Perplexity of the graph on held-out text."""
    fp32_perplexity: float
    """Perplexity of the fp32 graph on the same text."""
    max_increase: float
    """Largest increase over `fp32_perplexity` that passes, as a fraction of it: export.max_perplexity_increase."""

    @property
    def increase(self) -> float:
        """The increase as a fraction of the perplexity in fp32; negative if it fell."""
        return self.perplexity / self.fp32_perplexity - 1

    @property
    def passed(self) -> bool:
        return self.precision == "fp32" or self.increase <= self.max_increase


class ParityReport(Record):
    """Differences between exported copies and the checkpoint in torch.

    Without graphs (`export.onnx_up_to_gib`) nothing is computed: the weights are the checkpoint's own bytes.
    """

    reload_logit_difference: float
    """Largest absolute difference of logits between the saved Hugging Face folder, once loaded, and the checkpoint."""
    reload_logit_difference_bound: float
    """Largest `reload_logit_difference` that passes: export.max_logit_difference."""
    graphs: tuple[GraphParity, ...]
    """The graphs in fp32 and fp16 that stay in the export, each compared with torch."""
    precisions: tuple[PrecisionQuality, ...] = ()
    """The graph that the server steps, by precision, fp32 first; those that did not pass are not exported."""

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
    """The measured speed of one graph on inputs of one shape."""

    engine: str
    """Program that ran it: torch, ONNX Runtime, ONNX Runtime in place (as the server steps), or TensorRT."""
    graph: Literal["forward", "decode"]
    """What was run. forward: logits of whole texts. decode: one more token after the texts so far."""
    precision: Literal["fp32", "fp16", "int8", "int4"]
    """Precision of the weights."""
    batch: int
    """Number of texts in the input."""
    length: int
    """Tokens of each text: those that a forward run reads, or those in the cache before a decoded one."""
    rounds: int
    """Number of timed runs, over which the median is taken."""
    median_ms: float
    """Median milliseconds of one run."""
    tokens_per_s: float
    """Tokens that go through the model in a second: all of the batch (forward), or one for each text (decode)."""


class LatencyReport(Record):
    """export/latency.json, apart from ExportedModel: two exports of one checkpoint are equal, their times differ."""

    device: str
    """Processor on which all was measured, with its number of threads."""
    figures: tuple[LatencyFigure, ...]
    """One figure for each engine, graph, precision, batch and length."""
    seconds: float
    """Seconds that the measurement took."""

    def served_ms(self, precision: str) -> float | None:
        """Geometric mean over shapes of a step of the graph that the server steps; None if it was not measured."""
        found = [
            figure.median_ms for figure in self.figures if (figure.engine, figure.precision) == (SERVED, precision)
        ]
        return math.exp(sum(map(math.log, found)) / len(found)) if found else None


class EngineRecord(Record):
    """A TensorRT engine; it runs only with this version of TensorRT and on this kind of GPU."""

    file: str
    """Name of the engine's file in the export's folder, which ends in .plan."""
    tensorrt: str
    """Version of TensorRT that built the engine, and that alone can run it."""
    gpu: str
    """Name of the kind of GPU that the engine was built on and runs on."""
    profiles: tuple[dict[str, tuple[tuple[int, ...], ...]], ...]
    """Ranges of shapes that the engine is fast in; each has the smallest, the usual and the largest shape by input."""
    parity: GraphParity
    """Comparison of the engine with the model in torch."""
    texts: Literal["held-out", "random"]
    """What parity was checked on: held-out text of the run, or random tokens where the run's plan was not given."""
    build_s: float
    """Seconds that building and checking the engine took."""


class EngineReport(Record):
    """export/tensorrt.json, beside the engines."""

    FORMAT: ClassVar[Kind] = "exports"

    engines: tuple[EngineRecord, ...]
    """One engine for each portable ONNX graph of the export."""
    latency: tuple[LatencyFigure, ...]
    """Speed of the engines, beside torch's on the same GPU; empty if export.latency_seconds is 0."""


class ExportedModel(Record):
    """export/export.json: what the folder holds, which is a Hugging Face model and its ONNX graphs."""

    FORMAT: ClassVar[Kind] = "exports"

    step: int
    """Step of the run's last checkpoint, which was exported."""
    checkpoint_sha256: str
    """SHA-256 of the manifest of the run's last checkpoint."""
    averaged_steps: tuple[int, ...] = ()
    """Steps of the checkpoints whose average the weights are; empty: they are the last checkpoint's own."""
    objective: Literal["causal", "masked"]
    """What the model was trained for: the next token (causal), or hidden tokens (masked)."""
    context: int
    """Tokens of a training sequence, beyond which the model has seen no positions."""
    end_id: int
    """Token that ends a document."""
    end_ids: tuple[int, ...]
    """Tokens that end a generated text, `end_id` among them."""
    text_encoding: TextEncoding
    """How text becomes tokens for this model."""
    files: dict[FileName, str]
    """SHA-256 of each file in the folder, by its name."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of each tensor of the model's state, by its name."""
    parity: ParityReport
    """Comparison of the exported files with the checkpoint."""
    skipped: dict[str, str]
    """Why a file or format was not made or not carried over, by its name."""

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
    """Name of the model in MLflow's registry, under which its versions are counted."""
    version: int
    """Number of the version that the run registered."""
    alias: Literal["champion", "challenger", ""]
    """Alias that the version has now; empty if it has neither, because a later version took it."""
    verdict: str
    """Sentence that says what the promotion gates decided, and why; empty before they have."""
