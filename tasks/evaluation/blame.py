"""Names the documents in one step's batch: their loss under the checkpoint before, their file and line, their text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tasks.data.lineage import places_of
from tasks.display.html_page import write_html
from tasks.evaluation.evaluate import find_subject, planned
from tasks.launch import recovery
from tasks.launch.local import LocalLauncher
from tasks.runs.folder import read_plan
from tasks.workspace.paths import home, present
from training.config.evaluation import EvaluationConfig
from training.config.serving import InferenceConfig
from training.records.blame import Blame, BlamedDocument, BlamePlan
from training.records.checkpoint import damage, finished_checkpoints, newest_intact
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.token_shards import Shard, TokenShards
from training.shards.stream import TokenStream
from training.tokenizer.text_encoder import open_tokenizer

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 2**18  # of a document, by which it is looked up in its file
SHOWN_CHARACTERS = 4000  # of a document on the page


class FoundDocument(Record):
    """A document of the batch."""

    number: int
    """Number of the document in the training split, from 0."""
    loss: float
    """Mean loss over the document's predicted tokens in the batch, in nats."""
    tokens: int
    """Number of the document's tokens that are predicted in the batch."""
    place: str
    """Where the document is in the corpus, as FILE:LINE."""
    text: str
    """Text of the document's tokens in the batch, cut at SHOWN_CHARACTERS."""


class Found(Record):
    """The documents of one step's batch that have the largest mean loss."""

    run_id: str
    """ID of the run that trained on the batch."""
    step: int
    """Step whose batch was measured, counted from 1."""
    checkpoint_step: int
    """Step of the checkpoint that gave the losses, the newest from before `step`."""
    of: int
    """Number of documents in the batch, of which `documents` are some."""
    documents: tuple[FoundDocument, ...]
    """Documents with the largest mean loss, the largest first."""
    page: str
    """Path of the HTML page about the documents in `documents`."""


def blame(run_dir: Path, *, step: int, top: int, inference: InferenceConfig) -> Found:
    """Measure the batch of `step` and write a page about its `top` worst documents to the run's folder.

    Raises ValueError for a step that the run does not have, and where no checkpoint from before it is left.
    """
    plan = read_plan(run_dir)
    if plan is None:
        raise ValueError(f"{run_dir} has no plan.json: the run has not begun to train")
    if not 1 <= step <= plan.steps:
        raise ValueError(f"--step {step}: {plan.run_id} has steps 1 to {plan.steps}")
    if inference.parallel == "data" and inference.degree > 1:
        raise ValueError(
            "inference.parallel=data divides batches, and one batch is measured: set inference.parallel=tensor, or "
            "inference.degree=1"
        )
    checkpoint = _checkpoint_before(run_dir, step)
    measured = _measured(plan, checkpoint, step=step, inference=inference)
    shards_dir = present(Path(plan.shards_dir))
    found = tuple(_found(plan, shards_dir, measured.documents[:top]))
    page = run_dir / f"blame-{step}.html"
    result = Found(
        run_id=plan.run_id,
        step=step,
        checkpoint_step=int(checkpoint.name),
        of=len(measured.documents),
        documents=found,
        page=str(page),
    )
    write_html(page, "evaluation/blame.html.j2", title=f"{plan.run_id}, step {step}", found=result)
    return result


def _checkpoint_before(run_dir: Path, step: int) -> Path:
    """Return the newest complete checkpoint from before the step."""
    folders = [folder for folder in finished_checkpoints(run_dir) if int(folder.name) < step]
    if checkpoint := newest_intact(folders, damage_of=partial(damage, hashes=False)):
        return checkpoint
    kept = ", ".join(folder.name for folder in finished_checkpoints(run_dir)) or "none"
    raise ValueError(
        f"no checkpoint from before step {step} is left (there are: {kept}), and documents are measured under one: "
        "keep more of them with checkpoint.keep_every_steps, or ask for a later step"
    )


def _measured(plan: RunPlan, checkpoint: Path, *, step: int, inference: InferenceConfig) -> Blame:
    subject = find_subject(str(checkpoint))
    shards_dir = present(Path(plan.shards_dir))
    shards = TokenShards.read(shards_dir / "manifest.json")
    evaluated = planned(subject, shards_dir, shards, evaluation=EvaluationConfig(), inference=inference)
    folder = home() / "evaluations" / evaluated.run_id
    folder.mkdir(parents=True)
    plan.model_copy(update={"shards_dir": str(shards_dir)}).write(folder / "run.json")
    own = BlamePlan(**dict(evaluated), batch_step=step, run_plan=str(folder / "run.json"))
    own.write(folder / "plan.json")
    logger.info("measuring the batch of step %d under checkpoint %s, in %s", step, checkpoint.name, folder)
    recovery.run_program(
        "training.blame", plan=own, run_dir=folder, launcher=LocalLauncher(own, run_dir=folder, log="blame")
    )
    return Blame.read(folder / "blame.json")


def _found(plan: RunPlan, shards_dir: Path, documents: tuple[BlamedDocument, ...]) -> Iterator[FoundDocument]:
    stream = TokenStream(shards_dir, "train")
    tokenizer = open_tokenizer(shards_dir / "tokenizer" / "tokenizer.json", None)
    special = {plan.end_id, plan.mask_id}

    def text(first: int, stop: int) -> str:
        ids = [token for token in stream.read(first, stop).tolist() if token not in special]
        decoded: str = tokenizer.decode(ids, skip_special_tokens=False)
        return decoded

    wanted: dict[int, tuple[Shard, str]] = {}
    for each in documents:
        first, stop = each.document
        wanted[each.number] = stream.shard_at(first), text(first, min(stop, first + MOST_CHARACTERS))
    places = places_of(plan.config.data, stream.manifest, wanted)
    files = {file.name for file in stream.manifest.sources}
    for each in documents:
        if places[each.number] in files:  # the document is the whole file: the line is that of its first token here
            places[each.number] += f":{text(each.document[0], each.first).count(chr(10)) + 1}"
        yield FoundDocument(
            number=each.number,
            loss=each.loss,
            tokens=each.tokens,
            place=places[each.number],
            text=text(each.first, each.stop)[:SHOWN_CHARACTERS],
        )


def rows_of(found: Found) -> list[tuple[str, ...]]:
    """Return (loss, tokens, document, place, beginning of the text) of each document."""
    return [
        (f"{each.loss:.3f}", f"{each.tokens:,}", f"{each.number:,}", each.place, " ".join(each.text.split())[:80])
        for each in found.documents
    ]
