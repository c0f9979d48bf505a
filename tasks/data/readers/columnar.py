"""Reads parquet and Arrow, and data sets of the hub through `datasets`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tasks.data.readers.documents import Wanted, pieces_of_document
from tasks.data.readers.problems import listed, or_exclude, what_rows_are
from tasks.data.readers.spans import Piece, Place, Span
from tasks.data.readers.spans import num_bytes as size_of
from tasks.data.sources import SkippedDocuments
from training.config.data import DataConfig
from training.facts.cures import Cure
from training.store.urls import store_errors

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_BATCH = 1000


def read_parquet(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    source = span.source
    try:
        with (
            store_errors(source.remote.url) if source.remote else contextlib.nullcontext(),
            source.open_bytes() as opened,
            pyarrow.parquet.ParquetFile(opened) as file,
        ):
            groups = range(file.num_row_groups)[span.start : span.stop]
            first_row = sum(file.metadata.row_group(number).num_rows for number in range(span.start))
            num_rows = sum(file.metadata.row_group(number).num_rows for number in groups)
            size = source.record.num_bytes * num_rows // max(1, file.metadata.num_rows)
            if columns := _columns(span, file.schema_arrow, wanted, skipped, num_rows=num_rows, num_bytes=size):
                tables = file.iter_batches(ROWS_PER_BATCH, row_groups=list(groups), columns=columns)
                yield from _rows(span, tables, wanted, skipped, first_row=first_row)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole parquet file: {error}") from error


def read_arrow(span: Span, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    """Read a stream of record batches, as `save_to_disk` writes it, or a file with a table of contents (Feather)."""
    import pyarrow

    try:
        with span.source.open_unpacked() as opened:
            is_file = opened.peek(6).startswith(b"ARROW1")
            reader = pyarrow.ipc.open_file(opened) if is_file else pyarrow.ipc.open_stream(opened)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            is_lost = skipped.on_error == "skip" and _schema_problem(reader.schema, wanted.column)
            lost = sum(batch.num_rows for batch in batches) if is_lost else 0
            if _columns(span, reader.schema, wanted, skipped, num_rows=lost):
                yield from _rows(span, batches, wanted, skipped)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole Arrow file: {error}") from error


def read_hub(span: Span, data: DataConfig, wanted: Wanted, skipped: SkippedDocuments) -> Iterator[Piece]:
    import pyarrow
    from datasets import load_dataset

    name, config, commit = str(span.source.path), data.hub_config or None, span.source.record.sha256
    rows = load_dataset(name, config, split=data.hub_split, streaming=data.streaming, revision=commit)
    first: dict[str, Any] = (
        {} if rows.features else next(iter(rows), {})
    )  # without a schema, the first row has the columns
    schema = rows.features.arrow_schema if rows.features else pyarrow.Table.from_pylist([first]).schema
    if _columns(span, schema, wanted, skipped, num_rows=0):
        columns = _top_columns(schema, wanted)
        tables = rows.select_columns(columns).with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
        yield from _rows(span, tables, wanted, skipped)


def _columns(
    span: Span,
    schema: pyarrow.Schema,
    wanted: Wanted,
    skipped: SkippedDocuments,
    *,
    num_rows: int,
    num_bytes: int | None = None,
) -> list[str]:
    """Return the columns to read; empty if the column of the text is missing, which is reported to `skipped`.

    `num_rows`, `num_bytes`: that are lost then; 0: unknown; None: all of the file.
    """
    names = schema.names
    others = wanted.where.columns if wanted.where else []
    if wanted.where:
        wanted.where.check_names(names)
    if problem := _schema_problem(schema, wanted.column):
        if skipped.on_error == "skip" or not span.start:
            place = Place(span, 0, "")
            problem += "" if span.source.format == "hub" else or_exclude(place)
            lost = max(1, num_rows)
            skipped.skip_or_raise(place, problem, documents=lost, num_bytes=num_bytes, is_whole_file=True)
        return []
    if missing := [other for other in others if other not in names]:
        raise ValueError(f"{span.source.name} has no column {missing[0]!r} but {listed(names)}: change data.where")
    return list(dict.fromkeys([wanted.column, *others]))


def _top_columns(schema: pyarrow.Schema, wanted: Wanted) -> list[str]:
    top = wanted.column if wanted.column in schema.names else wanted.column.partition(".")[0]
    return list(dict.fromkeys([top, *(wanted.where.columns if wanted.where else [])]))


def _schema_problem(schema: pyarrow.Schema, column: str) -> str:
    names = schema.names
    if names.count(column) > 1:
        return f"has the column {column!r} {names.count(column)} times: rename all but one"
    texts = list(_text_fields(schema))
    if column in names or column in texts:
        return ""
    cure = f"; {Cure.COLUMN(names=listed(texts))}" if texts else ""
    return f"has no column {column!r} but {listed(names)}{what_rows_are(names)}{cure}"


def _text_fields(fields: Iterable[pyarrow.Field], before: str = "") -> Iterator[str]:
    """Yield the paths of the columns, and of the fields inside structs, that hold text or bytes."""
    import pyarrow

    for field in fields:
        if pyarrow.types.is_struct(field.type):
            yield from _text_fields(field.type, f"{before}{field.name}.")
        elif _holds_text(field.type):
            yield before + field.name


def _holds_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in tests) or _holds_bytes(kind)


def _holds_bytes(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    tests = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(kind) for test in tests)


def _rows(
    span: Span,
    tables: Iterable[pyarrow.Table | pyarrow.RecordBatch],
    wanted: Wanted,
    skipped: SkippedDocuments,
    *,
    first_row: int = 0,
) -> Iterator[Piece]:
    others, number = wanted.where.columns if wanted.where else [], first_row
    for table in tables:
        kept: Iterable[dict[str, Any]] = table.select(others).to_pylist() if others else itertools.repeat({})
        for value, row in zip(_values(_column(table, wanted.column)), kept, strict=False):
            number += 1
            place = Place(span, number, "row", size_of(value) if isinstance(value, str) else 0)
            if wanted.keeps(row, place, skipped):
                yield from pieces_of_document(place, value, skipped, beside={wanted.column: value})


def _column(table: pyarrow.Table | pyarrow.RecordBatch, path: str) -> pyarrow.ChunkedArray | pyarrow.Array:
    """Return a column, or a field inside a struct: `content.text`."""
    import pyarrow.compute

    if path in table.schema.names:
        return table.column(path)
    top, *inner = path.split(".")
    return pyarrow.compute.struct_field(table.column(top), inner)


def _values(column: pyarrow.ChunkedArray | pyarrow.Array) -> list[Any]:
    """Decode texts one by one, so that a row of invalid UTF-8 does not make its whole batch fail."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not _holds_text(column.type):
        return column.to_pylist()
    if pyarrow.types.is_fixed_size_binary(column.type):
        column = column.cast(pyarrow.binary())
    raw = column.cast(pyarrow.large_binary()).to_pylist()
    return [value if value is None else value.decode("utf-8", errors="surrogateescape") for value in raw]
