"""Downstream tasks: lm-evaluation-harness sends requests, and the model answers them on the ranks that share it.

If each rank holds the whole model, the ranks share a task's documents; if they hold parts of it, all of them answer
each request together. Scores are the same in both cases.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # read at import; progress bars do not belong in a log

import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from training.data.batch import IGNORED, Batch
from training.evaluation.lm_eval_tasks import EXAMPLES_SEED, load_tasks
from training.evaluation.loaded_model import Opened
from training.inference.generate_uncached import continuations
from training.inference.sampling import SamplingParams
from training.records.results import TaskScore
from training.tokenizer.text_encoder import TextEncoder
from training.tracking.progress import Progress

BOOTSTRAP_SAMPLES = 1000  # for the standard error of metrics that are not means
ScoreRequest = tuple[Any, list[int], list[int]]  # text, and tokens of context and continuation


def task_scores(opened: Opened, progress: Progress) -> tuple[TaskScore, ...]:
    """Return the scores of the config's tasks and groups on the first rank, () on the others. Collective."""
    settings = opened.plan.config.evaluation
    # One rank after the other, because ranks of one host share the caches of data sets.
    progress.begin("reading the documents of downstream tasks")
    loaded: dict[str, Any] = {}
    for turn in range(opened.rank.world_size):
        if turn == opened.rank.rank:
            loaded = load_tasks(settings)
        dist.barrier()
    found = evaluate(
        lm=RanksModel(opened, progress),
        task_dict=loaded,
        limit=settings.task_limit or None,
        bootstrap_iters=BOOTSTRAP_SAMPLES,
        log_samples=False,
    )
    return () if found is None or opened.rank.rank > 0 else tuple(_scores(found))


def _scores(found: Any) -> Iterator[TaskScore]:
    """Yield the harness's figures, which it names METRIC,FILTER; most tasks have no filter."""
    for task, figures in {**found["results"], **found.get("groups", {})}.items():
        for key, value in figures.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{chosen}")
            yield TaskScore(
                task=task,
                metric=metric if chosen == "none" else f"{metric}:{chosen}",
                value=float(value),
                stderr=float(error) if isinstance(error, int | float) else None,
                samples=_samples(found, task),
                higher_is_better=bool(found.get("higher_is_better", {}).get(task, {}).get(metric, True)),
            )


def _samples(found: Any, task: str) -> int:
    """Return the number of a task's samples, or of all tasks of a group."""
    counted, members = found["n-samples"], found.get("group_subtasks", {}).get(task, [])
    return int(counted[task]["effective"]) if task in counted else sum(_samples(found, name) for name in members)


class RanksModel(TemplateLM):
    """The harness's interface to the model, on the ranks that share it."""

    def __init__(self, opened: Opened, progress: Progress) -> None:
        super().__init__()
        self.opened, self.plan, self.progress = opened, opened.plan, progress
        self.encoder = TextEncoder(Path(self.plan.shards_dir) / "tokenizer", self.plan.text_encoding.model_dump())
        self.max_length = self.plan.config.train.context
        self.rows = self.plan.micro_batches[opened.dp_rank]
        self.shares = self.plan.strategy == "single" and self.plan.mesh["tp"] == self.plan.mesh["pp"] == 1
        self._device = opened.rank.device
        if self.shares:
            self._rank, self._world_size = opened.rank.rank, opened.rank.world_size

    def all_gather(self, tensor: Any) -> Any:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def gather_object(self, obj: Any, dst: int = 0) -> Any:
        gathered = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, gathered, dst=dst)
        return gathered

    def barrier(self) -> None:
        dist.barrier()

    @property
    def eot_token_id(self) -> int:
        return self.plan.end_id

    @property
    def prefix_token_id(self) -> int:
        """The token after which a document's text begins."""
        return [self.plan.end_id, *self.encoder.bos_ids][-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.encoder.encode(string, begins=add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests: Sequence[ScoreRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would give it."""
        order = sorted(range(len(requests)), key=lambda n: len(requests[n][1]) + len(requests[n][2]))
        answers: dict[int, tuple[float, bool]] = {}
        self.progress.begin("scoring answers of downstream tasks", total=len(requests), unit="answers")
        for start in range(0, len(order), self.rows):
            numbers = order[start : start + self.rows]
            answers |= zip(numbers, self._scored([requests[n][1:] for n in numbers]), strict=True)
            self.progress.advance(len(numbers))
        return [answers[n] for n in range(len(requests))]

    @torch.no_grad()
    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is greedy.

        Of longer texts the model sees the last tokens.
        """
        rows = [[*context, *continuation][-self.max_length - 1 :] for context, continuation in pairs]
        inputs = torch.full((len(rows), max(map(len, rows)) - 1), self.plan.end_id)
        targets = torch.full_like(inputs, IGNORED)
        for n, (row, (_, continuation)) in enumerate(zip(rows, pairs, strict=True)):
            inputs[n, : len(row) - 1] = torch.tensor(row[:-1])
            asked = min(len(continuation), len(row) - 1)
            targets[n, len(row) - 1 - asked : len(row) - 1] = torch.tensor(row[len(row) - asked :])
        losses, right = self.opened.strategy.scores(Batch(inputs.to(self.device), targets.to(self.device)))
        both = torch.stack([losses.double(), right.double()]).view(2, *targets.shape)
        for axis in ("tp", "pp"):  # one peer has the results, the others have zeros
            if self.plan.mesh[axis] > 1:
                dist.all_reduce(both, group=self.opened.mesh[axis].get_group())
        losses, right = both.cpu()
        asked_for = targets != IGNORED
        greedy = (right.bool() | ~asked_for).all(1)
        return list(zip((-losses.sum(1)).tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, cut into windows of the context that do not overlap."""
        windows: list[ScoreRequest] = []
        owners = []
        for number, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            for pair in utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *utils.make_disjoint_window(pair)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += likelihood
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answer requests with the same settings together, some rows at a time."""
        asked = [(json.dumps(request.args[1], sort_keys=True), n) for n, request in enumerate(requests)]
        texts: dict[int, str] = {}
        self.progress.begin("writing answers of downstream tasks", total=len(requests), unit="answers")
        for settings, group in groupby(sorted(asked), key=lambda each: each[0]):
            numbers = [n for _, n in group]
            for start in range(0, len(numbers), self.rows):
                some = numbers[start : start + self.rows]
                texts |= zip(some, self._texts([requests[n].args[0] for n in some], json.loads(settings)), strict=True)
                self.progress.advance(len(some))
        return [texts[n] for n in range(len(requests))]

    def _texts(self, prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        given: Any = normalize_gen_kwargs(settings)
        stops = [stop for stop in handle_stop_sequences(given.get("until"), eos=None) if stop]
        params = SamplingParams(
            temperature=float(given.get("temperature") or 0),
            top_k=int(given.get("top_k") or 0),
            top_p=float(given.get("top_p") or 1),
        )
        new = continuations(
            self.opened.strategy,
            [self.tok_encode(prompt) or [self.eot_token_id] for prompt in prompts],
            new_tokens=given["max_gen_toks"],
            params=params,
            seeds=[EXAMPLES_SEED] * len(prompts),
            end_ids=self.plan.end_ids,
            context=self.max_length,
            device=self.device,
            is_done=lambda ids: any(stop in self._decode(ids) for stop in stops),
            together=not self.shares,
        )
        return [_until(self._decode(ids), stops) for ids in new]

    def _decode(self, ids: list[int]) -> str:
        return str(self.encoder.tokenizer.decode(ids, skip_special_tokens=True))


def _until(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text
