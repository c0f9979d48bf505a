"""Compares tokenization by Shardline, `datasets.map` and datatrove's tokenizer step, with the same tokenizer.

    python -m benchmarks.tokenization [--quick]

The text is Python source of this machine, in four files of JSON lines; the tokenizer is a byte-level BPE of 4,096
tokens that was trained on a part of it. Each way runs in a process of its own (benchmarks/baselines/tokenizing.py), on
1 core with 1 worker and on 2 cores with 2, and is timed from the end of its imports until its tokens are on disk:
Shardline's with hashes of text and tokens, fsync and a manifest, the others' as they leave them. Figures are medians
over the repetitions. How Shardline's rate grows with the workers is measured on 6 copies of the text, because starting
processes takes a second, whatever the size of the text.

The last line is one JSON object: `mb_per_s_per_core` by way and number of workers, `ratio_vs_datasets` and
`ratio_vs_datatrove` (Shardline's rate over theirs, on as many workers as there are cores, 2 at most),
`linearity_2_workers` (Shardline's rate on 2 over twice that on 1, on 6 times the text; null on one core), `identical`
(whether all documents have the same tokens in all ways), `failed` (by way: why it could not run; its ratio is null),
`mb` of text and `documents`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.baselines.tokenizing import WAYS
from tasks.data.corpus import prepare_corpus
from training.config.data import DataConfig

FILES = 4
TIMES_FOR_LINEARITY = 6


def write_corpus(folder: Path, *, num_bytes: int) -> int:
    """Write the machine's Python source as JSON lines, a document for each file; return the number of documents."""
    folder.mkdir()
    number = written = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / f"{index}.jsonl").open("w", encoding="utf-8")) for index in range(FILES)]
        for text in _python_source():
            files[number % FILES].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            number, written = number + 1, written + len(text.encode())
            if written >= num_bytes:
                return number
    raise RuntimeError(f"this Python's packages have {written} bytes of source, {num_bytes} are needed")


def _python_source() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError):
            if text := path.read_text(encoding="utf-8"):
                yield text


def train_tokenizer(corpus: Path, folder: Path) -> Path:
    """Return the folder of a tokenizer that is trained on the corpus."""
    data = DataConfig.model_validate(
        {"path": str(corpus / "0.jsonl"), "tokenizer": {"kind": "bpe", "vocab_size": 4096, "sample_mib": 8}}
    )
    shards, _ = prepare_corpus(data, tokens_home=folder)
    return shards / "tokenizer"


def measure(way: str, corpus: Path, tokenizer: Path, *, workers: int) -> dict[str, Any]:
    """Return `seconds`, `tokens` and `digest` of a way in a process of its own, on as many cores as workers."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:workers]))
    with tempfile.TemporaryDirectory() as output:
        program = [sys.executable, "-m", "benchmarks.baselines.tokenizing"]
        command = ["taskset", "-c", cores, *program, way, str(corpus), str(tokenizer), output, str(workers)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def linearity_of(corpus: Path, tokenizer: Path, *, repetitions: int) -> float:
    """Return Shardline's rate on 2 workers divided by twice that on 1."""
    more = corpus.with_name("more")
    more.mkdir()
    for path in corpus.iterdir():
        for number in range(TIMES_FOR_LINEARITY):
            (more / f"{number}-{path.name}").hardlink_to(path)
    seconds = {
        workers: statistics.median(
            measure("shardline", more, tokenizer, workers=workers)["seconds"] for _ in range(repetitions)
        )
        for workers in (1, 2)
    }
    return round(seconds[1] / seconds[2] / 2, 3)


def run(*, num_bytes: int, repetitions: int) -> dict[str, Any]:
    numbers = (1, 2) if len(os.sched_getaffinity(0)) > 1 else (1,)
    with tempfile.TemporaryDirectory(prefix="shardline-tokenization-") as folder:
        corpus = Path(folder) / "corpus"
        documents = write_corpus(corpus, num_bytes=num_bytes)
        tokenizer = train_tokenizer(corpus, Path(folder) / "trained")
        rows, failed = dict[tuple[str, int], list[dict[str, Any]]](), dict[str, str]()
        for workers, way in itertools.product(numbers, WAYS):
            try:
                rows[way, workers] = [measure(way, corpus, tokenizer, workers=workers) for _ in range(repetitions)]
            except RuntimeError as error:  # of another's way: the others are compared all the same
                if way == "shardline":
                    raise
                failed[way] = str(error).splitlines()[-1]
        most = max(numbers)
        linearity = linearity_of(corpus, tokenizer, repetitions=repetitions) if most == 2 else None
    mb = num_bytes / 1e6
    rates = {key: mb / statistics.median(row["seconds"] for row in each) for key, each in rows.items()}
    return {
        "mb_per_s_per_core": {
            way: {str(n): round(rates[way, n] / n, 2) for n in numbers if (way, n) in rates} for way in WAYS
        },
        **{
            f"ratio_vs_{way}": round(rates["shardline", most] / rates[way, most], 2) if (way, most) in rates else None
            for way in ("datasets", "datatrove")
        },
        "failed": failed,
        "linearity_2_workers": linearity,
        "identical": len({(row["digest"], row["tokens"]) for each in rows.values() for row in each}) == 1,
        "tokens": rows["shardline", 1][0]["tokens"],
        "mb": round(mb, 1),
        "documents": documents,
        "repetitions": repetitions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="24 MB once instead of 64 MB three times")
    quick = parser.parse_args().quick
    result = run(num_bytes=24_000_000 if quick else 64_000_000, repetitions=1 if quick else 3)
    print(f"{result['mb']:.0f} MB, {result['documents']:,} documents, {result['tokens']:,} tokens; MB/s per core")
    for way, rates in result["mb_per_s_per_core"].items():
        row = "".join(f"{rate:8.2f} on {workers}" for workers, rate in rates.items())
        print(f"{way:12}{row}" + (f"  failed: {result['failed'][way]}" if way in result["failed"] else ""))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
