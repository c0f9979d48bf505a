"""The time of a pattern that reads what others wrote grows with the length of the text, whatever the text is."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable

import pytest

from training.config.credentials import WITHOUT_CREDENTIALS, problem_of, without_url_credentials
from training.store.urls import without_query
from training.tracking.redaction import plain, without_credentials, without_secrets

# Whose patterns read what others wrote: requests, errors, logs of ranks, corpora, configs and headers of model folders.
READERS = (
    "infra.images",
    "tasks.comparison.compare",
    "tasks.data.corpus",
    "tasks.data.readers.documents",
    "tasks.data.readers.json_rows",
    "tasks.display.markdown",
    "tasks.evaluation.report",
    "tasks.hardware.pods",
    "tasks.launch.failure",
    "tasks.launch.rank_logs",
    "tasks.launch.slurm",
    "tasks.serving.app",
    "training.config.credentials",
    "training.node.output",
    "training.planner.model_shape",
    "training.planner.precision",
    "training.records.checkpoint",
    "training.records.model_state",
    "training.tracking.redaction",
)
# Patterns that are only asked whether a text begins with them.
AT_THE_BEGINNING = (
    "tasks.launch.rank_logs",
    "tasks.serving.app",
    "training.node.output",
    "training.planner.model_shape.QUERIES",
)
PUMPS = (
    *(
        "://",
        "://a:",
        "://a:1@",
        "://:",
        "://a:b@sha256:",
        "https://a?key",
        "?key",
        "key",
        "tokenkey=",
        ";a",
        "?",
        "a&",
    ),
    *("\x1b", "\x1b[", "\x1b[0", "\x1b]", "\x1b] ", "\x1b]\x1b", "a", "1", " ", "\n", "\r", "\t", '"', '\t"', '""'),
    *(".", "a.", ".1", "1.", "self.attn.", "experts.", "_proj.", "linear", "dropout", "final_layer_norm", "a\n", "a "),
    *("STATUS_", "STATUS_ALLOC", "/dev/shm ", "file </torch_", "rank 1", "Signal ", "timed ", "srun: error: "),
    *("application/", "+", "[rank1]", "[PG 0 ", "[E1 ", "what():", "Sending process 1", "1: ", "a: ", "a=", "task 0"),
)
LENGTH, QUICK_S = 20_000, 0.02


def found_patterns() -> dict[str, Callable[[str], object]]:
    found: dict[str, Callable[[str], object]] = {}
    for module in READERS:
        named = vars(importlib.import_module(module)).items()
        patterns = [(name, value) for name, value in named if isinstance(value, re.Pattern)]
        assert patterns, f"{module} has none any more"
        for name, pattern in patterns:
            whole = f"{module}.{name}"
            search = pattern.match if whole.startswith(AT_THE_BEGINNING) else pattern.search
            is_bytes = isinstance(pattern.pattern, bytes)
            found[whole] = (lambda text, search=search: search(text.encode())) if is_bytes else search  # type: ignore[misc]
    return found


WORK: dict[str, Callable[[str], object]] = found_patterns() | {
    "a form in Prefect": re.compile(str(WITHOUT_CREDENTIALS["not"]["pattern"])).search,
    "a text of a config": problem_of,
    "an error, shown": without_url_credentials,
    "a store's error": without_query,
    "a colourful log": plain,
    "an error of MLflow": lambda text: without_credentials(text, uri="http://ada:hunter2@mlflow"),
    "a log's line": without_secrets,
}


def seconds(work: Callable[[str], object], text: str) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        work(text)
        best = min(best, time.process_time() - began)
        if best < QUICK_S:
            break
    return best


@pytest.mark.parametrize("work", WORK)
def test_a_text_of_four_times_the_length_takes_four_times_as_long(work: str) -> None:
    """A search that grows with the square would take sixteen times as long, and a second for a text of 100 kB."""
    for pump in PUMPS:
        for end in ("", "@", "\n"):
            once, twice, four = (pump * (times * LENGTH // len(pump)) + end for times in (1, 2, 4))
            first = seconds(WORK[work], once)
            if first > QUICK_S:
                second, fourth = seconds(WORK[work], twice), seconds(WORK[work], four)
                assert fourth < 8 * first, f"{pump!r}: {first:.3f} s, {second:.3f} s, {fourth:.3f} s"
