"""A file of prompts becomes a file of completions, row by row in the same order; goes on where it was interrupted."""

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

RESTART_S = 600.0  # that ranks which died are waited for
SAMPLING = {field.name for field in fields(Sampling)}


class GeneratedFile(Record):
    """OUT.record.json: what OUT was made of; a second call with the same `key` has nothing to do.

    `tokens` and `seconds` are of the last call, which may have made only some of the rows.
    """

    key: str
    model: str
    rows: int
    failed: int
    made: int
    tokens: int
    seconds: float

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
    """Each line of `prompts` is {"prompt": …} with any fields of Sampling and any others, which go along; a row that
    cannot be done has an `error` in place of `completion`.

    Finished rows are kept in OUT.part until all are there; OUT appears at once. Raises ValueError for files that
    cannot be used, EngineDied where the engine died twice.
    """
    content = _read(prompts, out)
    key = hashlib.sha256(json.dumps([content, model, sampling], sort_keys=True).encode()).hexdigest()
    record_path, lines = out.with_name(f"{out.name}.record.json"), content.splitlines()
    if out.exists() and record_path.exists() and (kept := GeneratedFile.read(record_path)).key == key:
        logger.info("%s is there already, made by %s of the same prompts: kept", out, model)
        return kept.model_copy(update={"made": 0, "tokens": 0, "seconds": 0.0})
    part = Part(out.with_name(f"{out.name}.part"), key=key)
    left = [number for number in range(len(lines)) if number not in part.rows]
    if part.rows:
        logger.info("%d of %d rows are done already: going on with the others", len(part.rows), len(lines))
    tokens, seconds = _make_rows(open_engine, lines, left, sampling, part=part, show=show) if left else (0, 0.0)
    rows = [part.rows[number] for number in range(len(lines))]
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
    part.path.unlink(missing_ok=True)
    return record


def _make_rows(
    open_engine: Callable[[], Engine],
    lines: list[str],
    left: list[int],
    sampling: dict[str, Any],
    *,
    part: Part,
    show: Callable[[int, int, float], None],
) -> tuple[int, float]:
    """Tokens, and seconds without those that the engine took to start."""
    engine, tokens = open_engine(), 0
    began = time.monotonic()
    try:
        for number, row in _rows(engine, lines, left, sampling):
            part.add(number, row)
            tokens += row.get("tokens", 0)
            show(len(part.rows), len(lines), tokens / (time.monotonic() - began))
        return tokens, time.monotonic() - began
    finally:
        engine.close()
        part.close()


def _read(prompts: Path, out: Path) -> str:
    if out.resolve() == prompts.resolve():
        raise ValueError(f"--prompts and --out are the same file, {prompts}: give --out another name")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    try:
        return prompts.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--prompts {prompts} cannot be read: {error}") from None


class Part:
    """Rows as they are done, in any order, in a file that outlives us; begun anew where it is of something else."""

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
                logger.warning("%s is of other prompts, settings or another model: beginning anew", path)
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
    """As they are done. The longest are begun first, so that none of them is left alone at the end."""
    asked = {number: _parsed(lines[number]) for number in left}

    def length(number: int) -> tuple[int, int]:
        row = asked[number]
        return row.get("new_tokens", sampling.get("new_tokens", 0)) if "error" not in row else 0, len(lines[number])

    pool = ThreadPoolExecutor(max(1, min(engine.concurrent, len(left))), thread_name_prefix="rows")
    try:
        futures = {
            pool.submit(_completed, engine, asked[number], sampling): number
            for number in sorted(left, key=length, reverse=True)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _parsed(line: str) -> dict[str, Any]:
    """The line's row, or one with an error."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return {"line": line, "error": f"no JSON: {error}"}
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        return {"line": line, "error": 'no JSON object with a text "prompt"'}
    for name in ("new_tokens", "top_k", "seed"):
        if not isinstance(row.get(name, 0), int):
            return {**row, "error": f"{name} = {row[name]!r} is no whole number"}
    return row


def _completed(engine: Engine, row: dict[str, Any], sampling: dict[str, Any], *, again: bool = True) -> dict[str, Any]:
    if "error" in row:
        return row
    how = {**sampling, **{name: value for name, value in row.items() if name in SAMPLING}}
    try:
        stream = engine.stream(row["prompt"], **how)
        completion = "".join(stream)
    except EngineDied:  # no fault of the row's
        if not again or not engine.wait_ready(RESTART_S):
            raise
        return _completed(engine, row, sampling, again=False)
    except (ValueError, TypeError) as error:
        return {**row, "error": str(error)}
    return {
        **row,
        "completion": completion,
        "tokens": stream.new_tokens,
        "finish_reason": stream.finish_reason,
    }
