"""What evaluation, export and registration leave: the records of stages 7 to 9, like those in training/records.py."""

from __future__ import annotations

from typing import Literal

from training.records import Record


class Sample(Record):
    prompt: str
    text: str


class EvaluationJob(Record):
    """evaluate.json beside a plan: the model to evaluate, a folder in Hugging Face layout."""

    model: str
    step: int
    checkpoint_sha256: str


class SourceFigures(Record):
    """Figures of the held-out documents of one source."""

    source: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    accuracy: float
    tokens: int
    text_bytes: int


class TaskScore(Record):
    """One figure of a downstream task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int
    higher_is_better: bool


class EvalReport(Record):
    """Exact figures over the whole held-out split: every token is predicted once."""

    step: int
    checkpoint_sha256: str
    shards_fingerprint: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    accuracy: float
    tokens: int
    text_bytes: int
    sources: tuple[SourceFigures, ...] = ()
    tasks: tuple[TaskScore, ...] = ()
    samples: tuple[Sample, ...]
    seconds: float


class ParityReport(Record):
    """ONNX against torch on held-out text; `reload_logit_difference`: the saved Hugging Face folder against torch."""

    max_logit_difference: float
    reload_logit_difference: float
    argmax_agreement: float
    positions: int
    max_logit_difference_bound: float
    min_argmax_agreement_bound: float

    @property
    def passed(self) -> bool:
        return (
            self.max_logit_difference <= self.max_logit_difference_bound
            and self.reload_logit_difference <= self.max_logit_difference_bound
            and self.argmax_agreement >= self.min_argmax_agreement_bound
        )


class ExportedModel(Record):
    """export/: model.safetensors, config.json, tokenizer, generation_config.json, model.onnx; sha256 by name."""

    step: int
    checkpoint_sha256: str
    objective: Literal["causal", "masked"]
    context: int
    end_id: int
    files: dict[str, str]
    parity: ParityReport


class RegisteredModel(Record):
    name: str
    version: int
    alias: Literal["champion", "challenger", ""]  # "": superseded by a later version
    verdict: str
