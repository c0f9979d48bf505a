"""Measures how each packing fills sequences: documents that are cut, padding, and what it costs.

    python -m benchmarks.packing [--quick]

Documents have log-normal lengths with a median of 403 tokens and a mean of 740, as in web text. Of millions of them
only the lengths are made: the share of documents that are cut and of places that are padding, the seconds to count the
sequences of an epoch (the planner does, and a rank at its start), to make the tables in which a rank finds them, and
the bytes of these for each document, kept and at the peak. Of 40,000 documents there are shards, of which a rank reads
batches of 16 sequences.

The last line is one JSON object: `cut_documents_share`, `padding_share`, `seconds_per_million_documents`,
`bytes_per_document`, `peak_bytes_per_document` and `batch_ms`, each by packing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np

from tests.support.manifests import write_manifest
from training.data.shuffle import shuffled
from training.shards.format import write_shard
from training.shards.packing import Packing, Packs, Pieces, Sequences, Windows, document_rows, read_rows
from training.shards.packing import sequences_of as sequences_of_stream
from training.shards.stream import TokenStream

DOCUMENTS, QUICK_DOCUMENTS, IN_SHARDS = 10_000_000, 1_000_000, 40_000
BATCH, BATCHES = 16, 200


def bounds_of(num_documents: int) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(0).normal(6.0, 1.1, num_documents)).astype(np.int64) + 1
    return np.concatenate([[0], lengths.cumsum()])


def sequences_of(packing: Packing, bounds: np.ndarray, context: int) -> Sequences:
    by_document = {"padded": Pieces, "best-fit": Packs}
    if packing in by_document:
        return by_document[packing](bounds, context=context)
    return Windows(0, int(bounds[-1]), context, partial=False)


def cut_share(sequences: Sequences, bounds: np.ndarray, context: int) -> float:
    """Return the share of documents whose predicted tokens are in more than one sequence."""
    if isinstance(sequences, Windows):
        return float(((bounds[:-1] - 1) // context != (bounds[1:] - 2) // context)[1:].mean())
    epoch = sequences.epoch()
    return epoch.cut_documents / epoch.documents


def make_shards(folder: Path) -> TokenStream:
    bounds = bounds_of(IN_SHARDS)
    tokens = np.random.default_rng(1).integers(2, 50_000, bounds[-1]).astype("uint16")
    for split in ("train", "validation"):
        shard = write_shard(folder, split=split, index=0, tokens=tokens, ends=bounds[1:].tolist(), text_bytes=1)
    write_manifest(folder, [shard.model_copy(update={"split": "train"})], vocab_size=50_000, end_id=0)
    return TokenStream(folder, "train")


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(packing: Packing, bounds: np.ndarray, stream: TokenStream, *, context: int) -> dict[str, float]:
    first = np.arange(1)

    def make() -> Sequences:
        made = sequences_of(packing, bounds, context)
        made.rows(first)
        return made

    took = seconds(make)
    tracemalloc.start()
    sequences = make()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    epoch, num_documents = sequences.epoch(), len(bounds) - 1
    own_bounds = bounds.nbytes * (packing in ("padded", "best-fit"))  # read by each rank
    in_shards = sequences_of_stream(stream, packing=packing, context=context)

    def batch(number: int) -> None:
        places = np.arange(number * BATCH, (number + 1) * BATCH)
        rows = in_shards.rows(shuffled(places, length=len(in_shards), key=(0,)))
        read_rows(stream, rows, context=context, end_id=0)
        if packing == "documents":
            document_rows(stream, rows, context=context)
        elif packing == "best-fit":
            rows.numbers(context)

    batch(0)
    return {
        "cut_documents_share": cut_share(sequences, bounds, context),
        "padding_share": 1 - epoch.tokens / (epoch.sequences * context),
        "seconds_per_million_documents": took / num_documents * 1e6,
        "bytes_per_document": (own_bounds + kept) / num_documents,
        "peak_bytes_per_document": (own_bounds + peak) / num_documents,
        "batch_ms": 1000 * median(seconds(lambda number=n: batch(number)) for n in range(1, BATCHES)),  # type: ignore[misc]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 million documents instead of 10; under 2 minutes")
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    bounds = bounds_of(QUICK_DOCUMENTS if args.quick else DOCUMENTS)
    print(f"{len(bounds) - 1:,} documents of {bounds[-1] / len(bounds):,.0f} tokens, context {args.context:,}")
    print(f"{'':10}{'cut':>9}{'padding':>10}{'s per million':>15}{'bytes each':>12}{'at the peak':>13}{'batch ms':>10}")
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        stream = make_shards(Path(folder))
        for packing in get_args(Packing):
            found = measure(packing, bounds, stream, context=args.context)
            print(
                f"{packing:10}{found['cut_documents_share']:9.2%}{found['padding_share']:10.3%}"
                f"{found['seconds_per_million_documents']:15.3f}{found['bytes_per_document']:12.1f}"
                f"{found['peak_bytes_per_document']:13.1f}{found['batch_ms']:10.2f}",
                flush=True,
            )
            for name, value in found.items():
                figures.setdefault(name, {})[packing] = round(value, 6)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
