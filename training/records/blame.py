"""The documents of one step's batch, each with its loss: what `shardline blame` asks for, and what it gets."""

from __future__ import annotations

from training.records.evaluation_plan import EvaluationPlan
from training.records.record import Record


class BlamePlan(EvaluationPlan):
    """SHARDLINE_HOME/evaluations/ID/plan.json: measure the loss of each document in one batch of a run."""

    batch_step: int
    """Step whose batch is measured, counted from 1."""
    run_plan: str
    """Path of the plan of the run that has this batch."""


class BlamedDocument(Record):
    """A document of the training split, and its loss in the batch."""

    number: int
    """Number of the document in the training split, from 0."""
    loss: float
    """Mean loss over the document's predicted tokens in the batch, in nats."""
    tokens: int
    """Number of the document's tokens that are predicted in the batch."""
    first: int
    """Position in the training split's stream of the document's first token that the batch predicts."""
    stop: int
    """Position in the training split's stream after the document's last token that the batch predicts."""
    document: tuple[int, int]
    """Positions in the training split's stream of the whole document: its first token, and the one after its last."""


class Blame(Record):
    """blame.json: the documents in a step's batch, measured under the checkpoint before it."""

    documents: tuple[BlamedDocument, ...]
    """All documents in the batch, the one with the largest loss first."""
