"""Tables and JSON as people have them: what is read, what is lost to a fault, and cures that work."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data import chunks, corpus
from tasks.data.readers.documents import BLOCK_CHARACTERS
from tests.support.text_cases import FOREIGN, STORIES, json_lines, talk, write_articles, write_table
from tests.support.tiny_corpus import all_documents, assert_read, prepare

HUGE = "9" * 5000


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def refusal(tmp_path: Path, source: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match=": ") as refused:
        prepare(tmp_path, source, **options)
    return str(refused.value)


# Tables


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_tsv_has_no_quoting(tmp_path: Path, closed: bool, on_error: str) -> None:
    rows = talk(closed=closed)
    shards = assert_read(rows, tmp_path, write_table(tmp_path / "a.tsv", rows, delimiter="\t"), on_error=on_error)
    assert shards.skipped == 0


def test_a_start_looks_for_quotes_and_cuts_chunks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    for function in (corpus._hint_of_quotes, chunks.cut_chunks):

        def counted(*args: Any, function: Any = function) -> Any:
            calls.append(function.__name__)
            return function(*args)

        monkeypatch.setattr(corpus, function.__name__, counted)
    prepare(tmp_path, write_table(tmp_path / "a.tsv", talk(closed=True), delimiter="\t"))
    assert sorted(calls) == ["_hint_of_quotes", "cut_chunks"]


def test_a_tsv_has_quoting_if_it_is_asked_for(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.tsv", talk(closed=True), delimiter="\t")
    folder, _ = prepare(tmp_path, source, table={"quoting": "csv"})
    assert len(all_documents(folder)) == 38


@pytest.mark.parametrize(
    ("rows", "kept", "lost"),
    [
        (talk(closed=False), 18, 23 - 1),
        ([*talk(closed=False)[:25], *["more"] * 15], 3, 37),
    ],
    ids=["closed in another row", "never closed"],
)
def test_all_rows_that_an_open_quote_swallows_are_counted(
    tmp_path: Path, rows: list[str], kept: int, lost: int
) -> None:
    rows = [row.replace(",", "") for row in rows]
    source = write_table(tmp_path / "a.csv", rows, delimiter=",")
    message = refusal(tmp_path, source)
    assert re.search(r"a\.csv:5: broken row \(.*\), with which \d\d lines are lost", message)
    _, shards = prepare(tmp_path, source, on_error="skip", split="tail")
    assert shards.skipped + shards.documents("train") + shards.documents("validation") >= 40
    assert shards.skipped >= lost
    assert "data.table.quoting=none" in message
    assert_read(rows, tmp_path, source, table={"quoting": "none"})
    assert kept < 40


def test_the_cure_for_open_quotes_is_offered_only_where_it_works(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.csv", talk(closed=False), delimiter=",")  # with a comma inside a quotation
    assert "data.table.quoting" not in refusal(tmp_path, source)


def test_escapes_and_carriage_returns(tmp_path: Path) -> None:
    escaped = write(tmp_path / "a.csv", "text\n" + '"a \\"quoted\\" word"\n' * 30)
    folder, _ = prepare(tmp_path, escaped, table={"escape": "\\"})
    assert set(all_documents(folder)) == {'a "quoted" word'}
    folder, _ = prepare(tmp_path, write(tmp_path / "a.tsv", "id\ttext\n" + "1\ta\rb\n" * 30))
    assert set(all_documents(folder)) == {"a\rb"}


def test_a_fault_in_a_long_array_is_named_by_its_line(tmp_path: Path) -> None:
    rows = [json.dumps({"text": story * 500}) for story in STORIES * 3]
    faulty = [*rows[:100], '{"text": nothing}', *rows[100:]]
    source = write(tmp_path / "a.json", "[\n" + ",\n".join(faulty) + "\n]")
    assert source.stat().st_size > 10 * BLOCK_CHARACTERS, "it is read in parts"
    assert "not valid JSON: line 102: Expecting value" in refusal(tmp_path, source)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = write(tmp_path / "a.csv", "text,text\n" + "a,b\n" * 30)
    assert "a.csv:1: has the column 'text' 2 times" in refusal(tmp_path, table)
    pq.write_table(pa.table([pa.array(STORIES)] * 2, names=["text", "text"]), tmp_path / "a.parquet")
    assert "a.parquet: has the column 'text' 2 times" in refusal(tmp_path, tmp_path / "a.parquet")
    lines = write(tmp_path / "a.jsonl", json_lines(STORIES) + '{"text": "a", "text": "b"}\n')
    assert "a.jsonl:41: not valid JSON (the key 'text' is there twice" in refusal(tmp_path, lines)
    assert prepare(tmp_path, lines, on_error="skip")[1].skipped == 1
    for key in (r"te\u0078t", r"\u0074\u0065\u0078\u0074"):
        escaped = write(tmp_path / "e.jsonl", json_lines(FOREIGN) + f'{{"text": "a", "{key}": "b"}}\n')
        assert "e.jsonl:201: not valid JSON (the key 'text' is there twice" in refusal(tmp_path, escaped)
    accents = write(tmp_path / "g.jsonl", json_lines(STORIES).replace('"text"', r'"\u006e\u00C9t\ud83d\uDE00"'))
    again = accents.read_text() + '{"nÉt😀": "a", "n\\u00c9t\\uD83D\\ude00": "b"}\n'
    assert sorted(all_documents(prepare(tmp_path, accents, column="nÉt😀")[0])) == sorted(STORIES)
    assert "(the key 'nÉt😀' is there twice" in refusal(tmp_path, write(accents, again), column="nÉt😀")
    slashed = json_lines(STORIES).replace('"text"', '"a/b"') + '{"a/b": "a", "a\\/b": "b"}\n'
    assert "(the key 'a/b' is there twice" in refusal(tmp_path, write(tmp_path / "h.jsonl", slashed), column="a/b")
    dotted = write(tmp_path / "d.jsonl", json_lines(STORIES).replace("text", "a.b") + '{"a.b": "a", "a.b": "b"}\n')
    assert "d.jsonl:41: not valid JSON (the key 'a.b' is there twice" in refusal(tmp_path, dotted, column="a.b")
    told = [f'{{"content": {{"text": {json.dumps(story)}}}, "text": 1, "text": 2}}' for story in STORIES]
    again = '{"content": {"text": "a", "text": "b"}}'
    for name, content in {"b.jsonl": "\n".join([*told, again]), "b.json": f"[{','.join([*told, again])}]"}.items():
        source = write(tmp_path / name, content)
        options = {"column": "content.text"}
        assert "(the key 'text' is there twice" in refusal(tmp_path, source, **options)
        folder, shards = prepare(tmp_path, source, on_error="skip", **options)
        assert (shards.skipped, sorted(all_documents(folder))) == (1, sorted(STORIES))


def test_a_file_without_the_column_counts_with_all_its_rows(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    write(root / "a.csv", "a,b\n" + "1,2\n" * 39)
    write(root / "b.jsonl", json_lines(STORIES))
    pq.write_table(pa.table({"x": STORIES}), root / "c.parquet")
    with pa.OSFile(str(root / "d.arrow"), "wb") as file, pa.ipc.new_stream(file, pa.schema({"x": "string"})) as stream:
        stream.write_table(pa.table({"x": STORIES}))
    _, shards = prepare(tmp_path, root, on_error="skip")
    assert shards.skipped == 39 + 40 + 40


# JSON


def test_text_inside_objects_is_read_by_its_path(tmp_path: Path) -> None:
    rows = [{"id": i, "content": {"text": text, "tags": ["a"]}} for i, text in enumerate(STORIES)]
    source = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for column in ("text", "content"):
        cure = refusal(tmp_path, source, column=column).partition("set data.column to one of them that holds text, ")[2]
        assert cure.startswith("'content.text';")
    assert_read(STORIES, tmp_path, source, column="content.text")
    array = write(tmp_path / "a.json", json.dumps(rows))
    assert sorted(all_documents(prepare(tmp_path, array, column="content.text")[0])) == sorted(STORIES)
    flat = write(tmp_path / "b.jsonl", "".join(json.dumps({"content.text": text}) + "\n" for text in STORIES))
    assert sorted(all_documents(prepare(tmp_path, flat, column="content.text")[0])) == sorted(STORIES)


def test_one_object_per_file_is_one_document(tmp_path: Path) -> None:
    assert_read(STORIES, tmp_path, write_articles(tmp_path / "articles"))
    several = write(tmp_path / "a.json", "\n".join(json.dumps({"text": text}, indent=1) for text in STORIES))
    assert sorted(all_documents(prepare(tmp_path, several)[0])) == sorted(STORIES)


def test_a_broken_object_of_several_lines_is_skipped_with_its_place(tmp_path: Path) -> None:
    root = write_articles(tmp_path / "articles")
    write(root / "0003.json", '{\n  "text": "a",\n  "id": }')
    assert re.search(r"0003\.json: cannot be read \(not valid JSON: .* line 3", refusal(tmp_path, root))
    _, shards = prepare(tmp_path, root, on_error="skip")
    assert shards.skipped == 1


def test_json_lines_named_json_stay_json_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.json", '{"text": \n' + json_lines(STORIES))
    assert "a.json:1: not valid JSON" in refusal(tmp_path, source)
    folder, shards = prepare(tmp_path, source, on_error="skip")
    assert shards.skipped == 1
    assert sorted(all_documents(folder)) == sorted(STORIES)


def test_an_integer_of_5000_digits_does_not_hide_its_row(tmp_path: Path) -> None:
    line = f'{{"id": {HUGE}, "text": "beside it"}}'
    for name, content in (
        ("a.jsonl", json_lines(STORIES) + line),
        ("b.json", f"[{line}, {json.dumps({'text': 'x'})}]"),
        ("c.json", line.replace("{", "{\n") + "\n" + line.replace("{", "{\n")),
    ):
        folder, _ = prepare(tmp_path, write(tmp_path / name, content), split="tail", validation_fraction=0.3)
        assert "beside it" in "".join(all_documents(folder)), name
    source = write(tmp_path / "d.jsonl", json_lines(STORIES) + f'{{"text": {HUGE}}}')
    assert re.search(r"d\.jsonl:41: the document is", refusal(tmp_path, source))
    assert prepare(tmp_path, source, on_error="skip")[1].skipped == 1


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "these are chats ('messages')"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "these are chats ('conversations')"),
        ({"prompt": "a", "completion": "b"}, "these are pairs ('prompt' and 'completion')"),
        ({"instruction": "a", "input": "", "output": "b"}, "these are pairs ('instruction' and 'output')"),
        ({"Question": "a", "Answer": "b"}, "these are pairs ('Question' and 'Answer')"),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, "these are pairs ('chosen' and 'rejected')"),
        ({"input_ids": [1, 2, 3]}, "these are tokens ('input_ids'), so it is tokenized already"),
        ({"text": [1, 2, 3]}, "a list of integers (it is tokenized already"),
        ({"text": [{"role": "user", "content": "Hi"}]}, "a list of messages (a chat"),
    ],
)
def test_chats_pairs_and_tokens_are_named_as_such(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    source = write(tmp_path / "a.jsonl", (json.dumps(row) + "\n") * 30)
    assert what in refusal(tmp_path, source)
    pq.write_table(pa.Table.from_pylist([row] * 30), tmp_path / "a.parquet")
    assert what in refusal(tmp_path, tmp_path / "a.parquet")


@pytest.mark.parametrize("rows", [{"text": {"0": "a", "1": "b"}}, {"0": {"text": "a"}, "1": {"text": "b"}}])
def test_tables_of_pandas_offer_no_column_that_would_read_one_row_of_all(tmp_path: Path, rows: dict[str, Any]) -> None:
    problem = refusal(tmp_path, write(tmp_path / "a.json", json.dumps(rows)))
    assert "to_json(FILE, orient='records', lines=True)" in problem
    assert "data.column" not in problem


def test_a_column_is_offered_only_if_it_holds_text(tmp_path: Path) -> None:
    rows = '{"id": 1, "body": "words", "tags": ["a"], "meta": {"lang": "en"}}\n' * 30
    message = refusal(tmp_path, write(tmp_path / "a.jsonl", rows))
    assert "set data.column to one of them that holds text, 'body', 'meta.lang';" in message
    assert "set data.column" not in refusal(tmp_path, write(tmp_path / "b.jsonl", '{"id": 1}\n' * 30))


def test_another_encoding_is_offered_only_where_it_can_help(tmp_path: Path) -> None:
    damaged = tmp_path / "a.jsonl"
    damaged.write_bytes('{"text": "Zoë, naïve \xff café"}\n'.encode().replace(b"\xc3\xbf", b"\xff"))
    assert "data.encoding" not in refusal(tmp_path, damaged)
    pq.write_table(pa.table({"text": [b"\xff\xfe"] * 30}), tmp_path / "a.parquet")
    assert "data.encoding" not in refusal(tmp_path, tmp_path / "a.parquet")


# Parquet


@pytest.mark.parametrize(
    "column",
    [
        pa.array([text.encode() for text in STORIES]),
        pa.array([text.encode() for text in STORIES], pa.large_binary()),
        pa.array(STORIES, pa.large_string()),
        pa.array(STORIES, pa.string_view()),
        pa.array(STORIES).dictionary_encode(),
    ],
    ids=["binary", "large binary", "large string", "string view", "dictionary"],
)
def test_every_way_to_keep_text_in_parquet_is_read(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert_read(STORIES, tmp_path, tmp_path / "a.parquet")


def test_text_inside_structs_is_read_by_its_path(tmp_path: Path) -> None:
    rows = [{"a": {"b": text, "n": i}, "score": i} for i, text in enumerate(STORIES)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    assert "set data.column to one of them that holds text, 'a.b'" in refusal(tmp_path, tmp_path / "a.parquet")
    shards = assert_read(STORIES[10:30], tmp_path, tmp_path / "a.parquet", column="a.b", where="score > 9 and a.n < 30")
    assert shards.filtered == 20


def test_quoted_fields_of_a_tsv_are_hinted_at_unless_they_are_asked_for(tmp_path: Path) -> None:
    rows = "".join(f'{number}\t"he said ""no"" {number}"\n' for number in range(30))
    source = write(tmp_path / "a.tsv", f"id\ttext\n{rows}")
    assert not prepare(tmp_path, source, table={"quoting": "none"})[1].ledger_warnings()
    over_lines = write(tmp_path / "b.tsv", f'id\ttext\n0\t"one\ntwo"\n{rows}')
    assert "data.table.quoting=csv" in refusal(tmp_path, over_lines)
