"""Tokenizes a corpus chunk by chunk, in several processes; shards that an earlier run finished are kept."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tasks.data.encoder import SavedTokenizer, encode
from tasks.data.split import Passage
from training.records.token_shards import Shard, Stretch
from training.shards.format import SPLITS, finished_shards, write_marker, write_shard

Chunk = list[Passage]  # what becomes one shard of each split
Tokenized = tuple[int, tuple[Shard, ...]]


def cut_chunks(passages: Iterable[Passage], *, num_bytes: int) -> Iterator[Chunk]:
    """Cuts chunks of at least `num_bytes` of UTF-8 text; they depend on the text alone, not on who tokenizes it."""
    chunk: Chunk = []
    size = 0
    for passage in passages:
        chunk.append(passage)
        size += len(passage.text.encode())
        if size >= num_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def tokenize_chunks(
    chunks: Iterable[Chunk], folder: Path, tokenizer: SavedTokenizer, *, processes: int
) -> Iterator[Tokenized]:
    """Yields each chunk's index and shards as they are finished; at most 2 chunks per process are in memory."""
    finished: list[Tokenized] = []
    todo = _unfinished(chunks, folder, finished)
    first = list(itertools.islice(todo, processes + 1))
    # With no more than a chunk per process the tokenizer's own threads are as fast, without 1 s of process starts.
    if processes == 1 or len(first) <= processes:
        for index, chunk in itertools.chain(first, todo):
            yield index, tokenize_chunk(folder, tokenizer, index, chunk)
    else:
        yield from _in_pool(itertools.chain(first, todo), folder, tokenizer, processes)
    yield from finished


def tokenize_chunk(folder: Path, tokenizer: SavedTokenizer, index: int, chunk: Chunk) -> tuple[Shard, ...]:
    """Writes shard `index` of each split that this chunk has text of, then the marker that they are finished."""
    shards = []
    for split in SPLITS:
        passages = [passage for passage in chunk if passage.split == split]
        tokens, ends, lengths = encode(tokenizer, passages)
        if len(tokens):
            num_bytes = [len(passage.text.encode()) for passage in passages]
            shard = write_shard(folder, split=split, index=index, tokens=tokens, ends=ends, text_bytes=sum(num_bytes))
            if split == "validation":
                shard = shard.model_copy(update={"stretches": _stretches(passages, lengths, num_bytes)})
            shards.append(shard)
    write_marker(folder, index, tuple(shards))
    return tuple(shards)


def _stretches(passages: Iterable[Passage], lengths: list[int], num_bytes: list[int]) -> tuple[Stretch, ...]:
    """Tokens and bytes by source, neighbouring passages of one source counted together."""
    counted = zip((passage.source for passage in passages), lengths, num_bytes, strict=True)
    stretches = []
    for source, group in itertools.groupby(counted, key=lambda each: each[0]):
        rows = list(group)
        tokens, text_bytes = sum(row[1] for row in rows), sum(row[2] for row in rows)
        stretches.append(Stretch(source=source, tokens=tokens, text_bytes=text_bytes))
    return tuple(stretches)


def _unfinished(chunks: Iterable[Chunk], folder: Path, finished: list[Tokenized]) -> Iterator[tuple[int, Chunk]]:
    for index, chunk in enumerate(chunks):
        shards = finished_shards(folder, index)
        if shards is None:
            yield index, chunk
        else:
            finished.append((index, shards))


def _in_pool(
    todo: Iterable[tuple[int, Chunk]], folder: Path, tokenizer: SavedTokenizer, processes: int
) -> Iterator[Tokenized]:
    # spawn: this process has threads (the tokenizer's, the progress bar's), which a fork does not survive
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker)
    running: dict[Future[tuple[Shard, ...]], int] = {}
    try:
        for index, chunk in todo:
            if len(running) > processes:  # one more than can run, so that none waits for the reader
                yield from _collect(running)
            running[pool.submit(tokenize_chunk, folder, tokenizer, index, chunk)] = index
        while running:
            yield from _collect(running)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {processes} tokenizing processes was killed, most often because memory ran out: lower "
            "data.processes or data.shard_mib; the same command continues where this one stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(running: dict[Future[tuple[Shard, ...]], int]) -> Iterator[Tokenized]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        yield running.pop(future), future.result()


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many of these processes as cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them; the parent ends them in order
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process with its parent: after kill -9 of the parent it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
