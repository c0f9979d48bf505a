"""Generates a completion for each prompt of a file, in the same order; the next call continues an interrupted one."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

from tasks.inference.engine import Engine, EngineDied
from tasks.inference.onnx_generator import Sampling
from training.records.record import Record, write_atomically

logger = logging.getLogger(__name__)

RESTART_S = 600.0  # to wait for an engine that is restarted
SAMPLING = {field.name for field in fields(Sampling)}


class GeneratedFile(Record):
    """The content of OUT.record.json: what OUT was made from."""

    key: str
    """Hash of prompts, model and settings; a second call with the same key does nothing."""
    model: str
    """Name and version of the model that wrote the completions."""
    rows: int
    """Number of rows in OUT, one for each prompt."""
    failed: int
    """Number of rows that have an error instead of a completion."""
    made: int
    """Rows that the last call generated; earlier calls may have made others."""
    tokens: int
    """New tokens that the last call generated."""
    seconds: float
    """Seconds in which the last call generated, without the start of the engine."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def generate_file(
    open_engine: Callable[[], Engine],
    prompts: Path,
    out: Path,
    *,
    sampling: dict[str, Any],
    model: str,
    show: Callable[[int, int, float], None] = lambda done, total, tokens_per_s: None,
) -> GeneratedFile:
    """Generate the completions of a file of prompts and write them to `out`, a JSON object per line.

    Each line of `prompts` is {"prompt": …} with any fields of Sampling; all other fields are copied to `out`. A row
    that fails has an `error` instead of a `completion`. Finished rows are kept in OUT.part; OUT is written when all
    are finished. Raises ValueError for files that cannot be used, EngineDied if the engine died twice.
    """
    content = _read(prompts, out)
    key = hashlib.sha256(json.dumps([content, model, sampling], sort_keys=True).encode()).hexdigest()
    record_path, lines = out.with_name(f"{out.name}.record.json"), content.splitlines()
    if out.exists() and record_path.exists() and (kept := GeneratedFile.read(record_path)).key == key:
        logger.info("kept %s: %s generated it from the same prompts", out, model)
        return kept.model_copy(update={"made": 0, "tokens": 0, "seconds": 0.0})
    partial = PartialFile(out.with_name(f"{out.name}.part"), key=key)
    left = [number for number in range(len(lines)) if number not in partial.rows]
    if partial.rows:
        logger.info("%d of %d rows are finished: continuing with the others", len(partial.rows), len(lines))
    tokens, seconds = _make_rows(open_engine, lines, left, sampling, partial=partial, show=show) if left else (0, 0.0)
    rows = [partial.rows[number] for number in range(len(lines))]
    record = GeneratedFile(
        key=key,
        model=model,
        rows=len(rows),
        failed=sum("error" in row for row in rows),
        made=len(left),
        tokens=tokens,
        seconds=seconds,
    )
    write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    record.write(record_path)
    partial.path.unlink(missing_ok=True)
    return record


def _make_rows(
    open_engine: Callable[[], Engine],
    lines: list[str],
    left: list[int],
    sampling: dict[str, Any],
    *,
    partial: PartialFile,
    show: Callable[[int, int, float], None],
) -> tuple[int, float]:
    """Generate the rows that are left; return the number of new tokens, and the seconds without the engine's start."""
    engine, tokens = open_engine(), 0
    started = time.monotonic()
    try:
        for number, row in _rows(engine, lines, left, sampling):
            partial.add(number, row)
            tokens += row.get("tokens", 0)
            show(len(partial.rows), len(lines), tokens / (time.monotonic() - started))
        return tokens, time.monotonic() - started
    finally:
        engine.close()
        partial.close()


def _read(prompts: Path, out: Path) -> str:
    if out.resolve() == prompts.resolve():
        raise ValueError(f"--prompts and --out are the same file, {prompts}: give --out another name")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    try:
        return prompts.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--prompts {prompts} cannot be read: {error}") from None


class PartialFile:
    """OUT.part: the finished rows, in any order. The file is emptied if prompts, settings or model have changed."""

    def __init__(self, path: Path, *, key: str) -> None:
        self.path, self.rows = path, dict[int, dict[str, Any]]()
        whole = (
            [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            if path.exists()
            else []
        )
        if whole and json.loads(whole[0]) == {"key": key}:
            for line in whole[1:]:
                entry = json.loads(line)
                self.rows[entry["row"]] = entry["result"]
        else:
            if whole:
                logger.warning("%s is from other prompts, settings or another model: starting again", path)
            whole = [json.dumps({"key": key}).encode() + b"\n"]
        write_atomically(path, b"".join(whole))
        self.file = path.open("a")

    def add(self, row: int, result: dict[str, Any]) -> None:
        self.rows[row] = result
        self.file.write(json.dumps({"row": row, "result": result}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _rows(
    engine: Engine, lines: list[str], left: list[int], sampling: dict[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows as they finish. The longest are started first, so that none of them runs alone at the end."""
    rows = {number: _parsed(lines[number]) for number in left}

    def length(number: int) -> tuple[int, int]:
        row = rows[number]
        return row.get("new_tokens", sampling.get("new_tokens", 0)) if "error" not in row else 0, len(lines[number])

    pool = ThreadPoolExecutor(max(1, min(engine.concurrent, len(left))), thread_name_prefix="rows")
    try:
        futures = {
            pool.submit(_completed, engine, rows[number], sampling): number
            for number in sorted(left, key=length, reverse=True)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _parsed(line: str) -> dict[str, Any]:
    """Return the line's row, or a row with an `error`."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return {"line": line, "error": f"not JSON: {error}"}
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        return {"line": line, "error": 'not a JSON object with a text "prompt"'}
    for name in ("new_tokens", "top_k", "seed"):
        if type(row.get(name, 0)) is not int:  # true and false are not
            return {**row, "error": f"{name} = {row[name]!r} is not a whole number"}
    return row


def _completed(
    engine: Engine, row: dict[str, Any], sampling: dict[str, Any], *, may_retry: bool = True
) -> dict[str, Any]:
    if "error" in row:
        return row
    params = {**sampling, **{name: value for name, value in row.items() if name in SAMPLING}}
    try:
        stream = engine.stream(row["prompt"], **params)
        completion = "".join(stream)
    except EngineDied:  # the row is not at fault
        if not may_retry or not engine.wait_ready(RESTART_S):
            raise
        return _completed(engine, row, sampling, may_retry=False)
    except (ValueError, TypeError) as error:
        return {**row, "error": str(error)}
    return {
        **row,
        "completion": completion,
        "tokens": stream.new_tokens,
        "finish_reason": stream.finish_reason,
    }
