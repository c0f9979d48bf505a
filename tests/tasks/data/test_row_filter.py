"""data.where: which rows become documents; and datatrove's output as a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tasks.data.row_filter import RowFilter
from tasks.data.sources import check_paths
from tests.support.tiny_corpus import assert_refused, prepare
from training.config.data import DataConfig
from training.records.token_shards import TokenShards

ROWS = [
    {
        "text": f"document {n}",
        "score": n / 100,
        "metadata": {"lang": "en" if n % 2 else "de", "tags": ["a", "b"][n % 2 :]},
    }
    for n in range(100)
]


def write_rows(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "json":
            path.write_text(json.dumps(rows))
        case "csv":
            path.write_text("text,score\n" + "".join(f"{row['text']},{row['score']}\n" for row in rows))
        case _:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def documents(shards: TokenShards) -> int:
    return sum(shard.documents for shard in shards.shards)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_are_chosen_by_an_expression_over_nested_columns(tmp_path: Path, kind: str) -> None:
    source = write_rows(tmp_path, kind)
    where = "score >= 0.5 and metadata.lang == 'en' and 'b' in metadata.tags"
    folder, shards = prepare(tmp_path, source, where=where)
    assert (documents(shards), shards.filtered) == (25, 75)
    assert prepare(tmp_path, source)[0] != folder
    assert prepare(tmp_path, source)[1].filtered == 0


def test_columns_of_csv_are_text(tmp_path: Path) -> None:
    source = write_rows(tmp_path, "csv")
    assert documents(prepare(tmp_path, source, where="score|float > 0.895")[1]) == 10
    assert_refused(
        r"rows\.csv:2: data\.where=score > 0\.5 has no value here: '>' not supported",
        tmp_path,
        source,
        where="score > 0.5",
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_is_not_there_is_an_error_and_no_empty_corpus(tmp_path: Path, kind: str) -> None:
    assert_refused(r"quality", tmp_path, write_rows(tmp_path, kind), where="quality > 0.5")


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    assert_refused(r"a\.txt is plain text, it has no columns", tmp_path, tmp_path / "a.txt", where="score > 1")


@pytest.mark.parametrize("where", ["score >", "a b", "{% if x %}", "score > 1 }}{{ 2"])
def test_what_is_no_expression_is_refused_before_anything_is_read(tmp_path: Path, where: str) -> None:
    with pytest.raises(ValueError, match="is not an expression"):
        check_paths(DataConfig(path=str(write_rows(tmp_path, "jsonl")), where=where))


def test_an_expression_reaches_nothing_but_the_row() -> None:
    with pytest.raises(ValueError, match="has no value here"):
        RowFilter("text.__class__.__mro__[1].__subclasses__()").keeps({"text": "x"})


NAMES_OF_JINJA = "range dict namespace cycler joiner lipsum self loop caller context result super varargs is in if and"
NAMES_OF_METHODS = "row column items keys get upper float odd environment kwargs missing"


@pytest.mark.parametrize("name", [*NAMES_OF_JINJA.split(), *NAMES_OF_METHODS.split()])
def test_a_column_has_its_value_whatever_it_is_called(name: str) -> None:
    rows = [{"text": "x", name: value} for value in ("bad", "good")]
    assert [RowFilter(f"{name} != 'bad'").keeps(row) for row in rows] == [False, True]
    assert [RowFilter(f"meta.{name} != 'bad'").keeps({"meta": row}) for row in rows] == [False, True]
    assert [RowFilter("text == 'x'").keeps(row) for row in rows] == [True, True]
    for row in ({"text": "x"}, {}):
        with pytest.raises(ValueError, match=f"there is no '{name}'"):
            RowFilter(f"{name} != 'bad'").keeps(row)


@pytest.mark.parametrize("name", ["my score", "a.b", "true", "none", "not", "self", "2nd", ""])
def test_a_column_whose_name_is_no_word_is_named_by_a_text(name: str) -> None:
    where = RowFilter(f"'{name}'|column|length > 3 and text is defined")
    assert [where.keeps({"text": "x", name: value}) for value in ("bad", "good")] == [False, True]
    assert where.columns == sorted([name, "text"])
    with pytest.raises(ValueError, match=f"'{name}'.column is that column" if not name.isidentifier() else "score"):
        RowFilter("score > 1").keeps({name: 1})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_constant_that_is_a_column_too_is_refused(tmp_path: Path, kind: str) -> None:
    rows = [{"text": f"document {n}", "none": "bad" if n % 2 else "good"} for n in range(40)]
    source = write_rows(tmp_path, kind, rows)
    refused = r"none, which is a constant and a column here: write 'none'\|column"
    assert_refused(refused, tmp_path, source, where="none != 'bad'")
    assert documents(prepare(tmp_path, source, where="'none'|column != 'bad'")[1]) == 20


def test_a_method_is_called_and_is_no_value() -> None:
    assert RowFilter("text.upper() == 'X' and meta.get('items') == 3").keeps({"text": "x", "meta": {"items": 3}})
    for where in ("text.upper != 'x'", "meta.items != 'x'"):
        with pytest.raises(ValueError, match="has no value here: there is no"):
            RowFilter(where).keeps({"text": "x", "meta": {}})


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["JsonlWriter", "ParquetWriter"])
def test_the_output_of_datatrove_is_a_source(tmp_path: Path, writer: str) -> None:
    """Its filters decide, or write what they found into columns that data.where reads."""
    pytest.importorskip("datatrove")
    from datatrove.data import Document, DocumentsPipeline
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline import writers
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader

    class Count:
        """Writes the number of words into each document's metadata."""

        name, type = "count", "stat"

        def __call__(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
            for document in data:
                assert isinstance(document, Document)
                document.metadata["words"] = len(document.text.split())
                yield document

    raw = tmp_path / "raw"
    raw.mkdir()
    rows = [{"text": " ".join(["word"] * n), "id": str(n), "lang": "en" if n % 3 else "fr"} for n in range(1, 90)]
    (raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pipeline = [
        JsonlReader(str(raw)),
        LambdaFilter(lambda document: document.metadata["lang"] == "en"),
        Count(),
        getattr(writers, writer)(str(tmp_path / "clean")),
    ]
    LocalPipelineExecutor(pipeline=pipeline, logging_dir=str(tmp_path / "logs")).run()
    _, shards = prepare(tmp_path, tmp_path / "clean", where="metadata.words >= 30")
    english = [n for n in range(1, 90) if n % 3]
    assert documents(shards) == sum(n >= 30 for n in english)
    assert shards.filtered == sum(n < 30 for n in english)
