"""The documents of one step's batch, each with its loss: what `shardline blame` asks for, and what it gets."""

from __future__ import annotations

from training.records.evaluation_plan import EvaluationPlan
from training.records.record import Record


class BlamePlan(EvaluationPlan):
    """SHARDLINE_HOME/evaluations/ID/plan.json: measure the batch of `batch_step` of the run whose plan is `run_plan`,
    a path.
    """

    batch_step: int
    run_plan: str


class BlamedDocument(Record):
    """A document of the training split, and its mean loss over its `tokens` in the batch, nats.

    `first`, `stop`: stream positions around these tokens; `document`: those of the whole document.
    """

    number: int
    loss: float
    tokens: int
    first: int
    stop: int
    document: tuple[int, int]


class Blame(Record):
    """blame.json: the documents in a step's batch, the largest loss first, under the checkpoint before it."""

    documents: tuple[BlamedDocument, ...]
