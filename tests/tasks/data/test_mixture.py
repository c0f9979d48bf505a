"""Several corpora become one mixture of shards."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tasks.data.corpus import prepare_corpus
from training.config.data import DataConfig
from training.records.token_shards import TokenShards
from training.shards.format import SPLITS
from training.shards.sources import held_out_sources
from training.shards.stream import TokenStream

TEXTS = {
    "verses": [f"verse {n}: the moon, the river, the moon" for n in range(120)],
    "code": [f"def function_{n}(x):\n    return x + {n}" for n in range(80)],
}


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    for name, texts in TEXTS.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return [{"path": str(tmp_path / f"{name}.jsonl")} for name in TEXTS]


def prepare(home: Path, sources: list[dict[str, Any]], **data: Any) -> tuple[Path, TokenShards]:
    config = {"tokenizer": {"kind": "bpe", "vocab_size": 400}, "processes": 1} | data
    return prepare_corpus(DataConfig.model_validate(config | {"sources": sources}), tokens_home=home / "tokens")


def texts(folder: Path, split: Any, part: int) -> list[str]:
    """The documents of one source, from its tokens."""
    stream = TokenStream(folder, split)
    start, stop = stream.parts[part]
    tokens, end_id = stream.read(start, stop), stream.manifest.end_id
    ends = np.flatnonzero(tokens == end_id)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    return [tokenizer.decode(each[each != end_id].tolist()) for each in np.split(tokens, ends + 1) if len(each)]


def test_each_source_has_its_own_tokens_of_one_tokenizer(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    folder, shards = prepare(tmp_path, sources)
    assert shards.parts == ("verses", "code")
    assert [file.name for file in shards.sources] == ["verses/verses.jsonl", "code/code.jsonl"]
    for part, name in enumerate(TEXTS):
        found = [text for split in SPLITS for text in texts(folder, split, part)]
        assert sorted(found) == sorted(TEXTS[name])
    held_out = held_out_sources(shards)
    assert held_out is not None
    assert set(held_out.names) == set(TEXTS)
    assert held_out.ends[-1] == shards.tokens("validation")


def test_weights_and_phases_change_no_token(
    tmp_path: Path, sources: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, shards = prepare(tmp_path, [source | {"weight": 1} for source in sources])
    heavier = [sources[0] | {"weight": 5}, sources[1] | {"weight": 1}]
    caplog.set_level("INFO")
    assert prepare(tmp_path, heavier, phases=[{"from_step": 9, "weights": {"code": 1}}]) == (folder, shards)
    assert "the corpus is not tokenized again" in caplog.text


def test_a_source_that_a_pretrained_tokenizer_had_before_is_not_tokenized_again(
    tmp_path: Path, sources: list[dict[str, Any]]
) -> None:
    """As night after night: one more source beside those there were."""
    first, _ = prepare(tmp_path, sources[:1])
    tokenizer = {"kind": "pretrained", "path": str(first / "tokenizer")}
    alone, _ = prepare_corpus(
        DataConfig.model_validate({"path": sources[0]["path"], "tokenizer": tokenizer, "processes": 1}),
        tokens_home=tmp_path / "tokens",
    )
    times = {path: path.stat().st_mtime_ns for path in alone.rglob("*.bin")}
    folder, shards = prepare(tmp_path, sources, tokenizer=tokenizer)
    assert {path: path.stat().st_mtime_ns for path in alone.rglob("*.bin")} == times
    assert {shard.name.split("/")[1] for shard in shards.shards if shard.part == 0} == {alone.name}
    assert sorted(text for split in SPLITS for text in texts(folder, split, 1)) == sorted(TEXTS["code"])


def test_a_source_whose_shards_are_damaged_is_mended_alone(
    tmp_path: Path, sources: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, shards = prepare(tmp_path, sources)
    damaged = next(folder / f"{shard.name}.bin" for shard in shards.shards if shard.part == 1)
    whole = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*.bin")}
    damaged.write_bytes(b"cut")
    assert prepare(tmp_path, sources) == (folder, shards)
    changed = {path for path, time in whole.items() if path.stat().st_mtime_ns != time}
    assert {path.parent.parent for path in changed} == {damaged.resolve().parent.parent}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(r"is not the file that was written.*deleting the file and making it again", warning)


@pytest.mark.parametrize("lost", ["tokenizer", "manifest.json"])
def test_a_mixture_without_its_tokenizer_or_manifest_is_made_whole(
    tmp_path: Path, sources: list[dict[str, Any]], lost: str
) -> None:
    folder, shards = prepare(tmp_path, sources)
    shutil.rmtree(folder / lost) if lost == "tokenizer" else (folder / lost).unlink()
    assert prepare(tmp_path, sources) == (folder, shards)


def test_a_text_of_an_earlier_source_is_left_out_of_a_later_one(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    copied = tmp_path / "copied.jsonl"
    copied.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS["verses"][:30], *TEXTS["code"]]))
    both = [sources[0], {"path": str(copied)}]
    _, shards = prepare(tmp_path, both, deduplicate="exact")
    assert shards.repeated == 30
    folder, turned = prepare(tmp_path, both[::-1], deduplicate="exact")
    assert turned.repeated == 30
    assert sorted(text for split in SPLITS for text in texts(folder, split, 1)) == sorted(TEXTS["verses"][30:])


def test_a_source_has_settings_of_its_own(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    (tmp_path / "words.txt").write_bytes("\n".join(f"größer {n}" for n in range(60)).encode("latin-1"))
    own = {"path": str(tmp_path / "words.txt"), "name": "german", "text_unit": "line", "encoding": "latin-1"}
    folder, shards = prepare(tmp_path, [*sources, own])
    assert shards.parts == ("verses", "code", "german")
    found = [text for split in SPLITS for text in texts(folder, split, 2)]
    assert sorted(found) == sorted(f"größer {n}" for n in range(60))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"path": "a", "sources": [{"path": "b"}]}, r"data.path = a and data.sources .* both name the corpus"),
        ({"sources": [{"path": "x/a.txt"}, {"path": "y/a.md"}]}, r"several are called a: give each of them a `name`"),
        ({"sources": [{"path": "a", "weight": 1, "epochs": 2}]}, r"a has weight = 1 and epochs = 2.*leave one out"),
        (
            {"sources": [{"path": "a", "weight": 1}], "phases": [{"from_step": 2, "weights": {"b": 1}}]},
            r"b is none of data.sources \(a\)",
        ),
        (
            {"sources": [{"path": "a"}], "phases": [{"from_step": 2, "weights": {"a": 1}}]},
            r"data.phases change weights, and a has none",
        ),
        (
            {
                "sources": [{"path": "a", "weight": 1}],
                "phases": [{"from_step": 5, "weights": {"a": 1}}, {"from_step": 2, "weights": {"a": 1}}],
            },
            r"must follow each other",
        ),
        (
            {
                "sources": [{"path": "a", "weight": 1}],
                "phases": [{"from_step": 5, "from_share": 0.5, "weights": {"a": 1}}],
            },
            r"begins at from_step or at from_share",
        ),
        (
            {"sources": [{"path": "a", "weight": 1}], "phases": [{"from_step": 5, "weights": {"a": 0}}]},
            r"not all at least 0 with one above it",
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DataConfig.model_validate(data)
