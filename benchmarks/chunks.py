"""Measures whether the cost of handing out a chunk grows with the corpus, up to 1 TB, for each tokenization engine.

    python -m benchmarks.chunks [--quick]

The corpus is simulated: 100 JSON-lines files of 10 GB behind a URL, of which only names and sizes exist. The
coordinator does the same as for a real corpus: it cuts chunks, hands out tasks, collects each chunk's result and writes
the manifest. The workers leave out reading, encoding and writing. The engines are the pool of `tasks`, Prefect's
process pool and a Dask cluster on this machine (if prefect-dask is installed), with 2 workers each. Prefect's server is
a process of its own; Dask's scheduler is part of the coordinator and is counted. A task has 20 chunks.

All costs are CPU time of the coordinator, threads included, because other machines would wait for that time.

The last line is one JSON object: `chunks` (the two numbers), `plan_us_per_chunk`, `manifest_us_per_chunk`,
`ms_per_task` and `us_per_chunk` (of everything) by engine and number of chunks, `growth` (microseconds per chunk at the
larger number over those at the smaller) by engine, and `coordinator_s_per_100_tb`, the seconds by engine for a corpus
of 100 TB in 100,000 chunks, which are 4,096 tasks, the most there ever are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.servers.embedded import start_prefect_server
from tasks.data.chunks import Chunk, cut_chunks
from tasks.data.encoder import SavedTokenizer
from tasks.data.engine import MOST_TASKS, Engine, LocalProcesses, Task
from tasks.data.remote import RemoteFile
from tasks.data.sharding import TokenizeWork
from tasks.data.sources import Source
from tasks.data.split import SplitRule
from training.config.data import DataConfig
from training.records.token_shards import FinishedChunk, Shard, SourceFile, Stretch, TokenShards

FILES = 100
FILE_BYTES = 10**10
WORKERS = 2
CHUNKS_PER_TASK = 20
CHUNKS_OF_100_TB = 100_000


def leave_out(work: TokenizeWork, chunk: Chunk) -> FinishedChunk:
    """Return what `tokenize_chunk` would return for a chunk of one file, without its work."""
    tokens = chunk.num_bytes // 4
    stretches = tuple(Stretch(source=span.number, tokens=tokens, text_bytes=chunk.num_bytes) for span in chunk.spans)
    common = {"tokens": tokens, "documents": 1000, "text_bytes": chunk.num_bytes, "sha256": "0" * 64}
    return FinishedChunk(
        shards=(
            Shard(name=f"train/{chunk.index:05d}", split="train", **common),
            Shard(name=f"validation/{chunk.index:05d}", split="validation", stretches=stretches, **common),
        )
    )


def sources() -> list[Source]:
    names = [f"part-{number:05d}.jsonl" for number in range(FILES)]
    return [
        Source(
            Path(name),
            "json lines",
            "",
            SourceFile(name=name, num_bytes=FILE_BYTES, sha256="0" * 64),
            remote=RemoteFile(f"s3://bucket/{name}", name, FILE_BYTES, "0"),
        )
        for name in names
    ]


@contextlib.contextmanager
def engines(kind: str) -> Iterator[Engine]:
    if kind == "pool":
        yield LocalProcesses(WORKERS)
        return
    from flows.stages.engine import PrefectEngine
    from training.config.data import EngineConfig

    with contextlib.ExitStack() as stack:
        yield PrefectEngine(EngineConfig(kind="dask" if kind == "dask" else "local"), WORKERS, stack)


def measure(kind: str, number: int, folder: Path) -> dict[str, float]:
    """Measure the cost of each part, for about `number` chunks; the engine is warm."""
    from benchmarks import chunks as here  # workers import this module by this name

    data = DataConfig(path="s3://bucket", shard_mib=round(FILES * FILE_BYTES / number / 2**20))
    tokenizer = SavedTokenizer(
        folder / "tokenizer.json", "bpe, 32000 tokens", "0" * 64, 32000, 31999, None, "gigatoken"
    )
    work = TokenizeWork(data, SplitRule("documents", 0.1, 0, "documents"), folder, tokenizer)
    listed, made = sources(), {}
    with engines(kind) as engine:
        list(engine.run([Task("warm up", here.leave_out, work, (chunk,)) for chunk in cut_chunks(listed[:8], data)]))
        started = time.process_time()
        chunks = cut_chunks(listed, data)
        planned = time.process_time()
        parts = [tuple(chunks[first : first + CHUNKS_PER_TASK]) for first in range(0, len(chunks), CHUNKS_PER_TASK)]
        for results in engine.run([Task(f"tokenize {part[0].index}", here.leave_out, work, part) for part in parts]):
            made |= dict(results)
        done = time.process_time()
        manifest = TokenShards(
            fingerprint="0" * 64,
            sources=tuple(source.record for source in listed),
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            mask_id=None,
            text_encoding=tokenizer.encoding,
            dtype=tokenizer.dtype,
            split_rule=work.rule.why,
            shards=tuple(shard for chunk in chunks for shard in made[chunk.index].shards),
            skipped=0,
            skipped_examples=(),
        )
        manifest.write(folder / "manifest.json")
        written = time.process_time()
    return {
        "chunks": len(chunks),
        "plan_us_per_chunk": 1e6 * (planned - started) / len(chunks),
        "manifest_us_per_chunk": 1e6 * (written - done) / len(chunks),
        "ms_per_task": 1e3 * (done - planned) / len(parts),
        "us_per_chunk": 1e6 * (written - started) / len(chunks),
    }


def run(numbers: tuple[int, int]) -> dict[str, Any]:
    kinds = ["pool", "prefect"] + (["dask"] if importlib.util.find_spec("prefect_dask") else [])
    with tempfile.TemporaryDirectory(prefix="shardline-chunks-") as folder:
        rows = {(kind, number): measure(kind, number, Path(folder)) for kind in kinds for number in numbers}
    few, many = numbers

    def by(field: str) -> dict[str, dict[str, float]]:
        return {kind: {str(number): round(rows[kind, number][field], 3) for number in numbers} for kind in kinds}

    def seconds_of_100_tb(kind: str) -> float:
        row = rows[kind, many]
        own = row["plan_us_per_chunk"] + row["manifest_us_per_chunk"]
        return round(MOST_TASKS * row["ms_per_task"] / 1e3 + CHUNKS_OF_100_TB * own / 1e6, 1)

    return {
        "chunks": [int(rows["pool", number]["chunks"]) for number in numbers],
        "plan_us_per_chunk": by("plan_us_per_chunk"),
        "manifest_us_per_chunk": by("manifest_us_per_chunk"),
        "ms_per_task": by("ms_per_task"),
        "us_per_chunk": by("us_per_chunk"),
        "growth": {
            kind: round(rows[kind, many]["us_per_chunk"] / rows[kind, few]["us_per_chunk"], 2) for kind in kinds
        },
        "coordinator_s_per_100_tb": {kind: seconds_of_100_tb(kind) for kind in kinds},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 and 1,000 chunks instead of 1,000 and 20,000")
    quick = parser.parse_args().quick
    start_prefect_server()()
    from prefect import flow

    result = flow(run, name="chunks", validate_parameters=False)((400, 1000) if quick else (1000, 20_000))
    for kind, rows in result["us_per_chunk"].items():
        print(f"{kind:8}" + "".join(f"{cost:12,.0f} us per chunk at {number}" for number, cost in rows.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
