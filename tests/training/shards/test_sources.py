"""What held-out tokens are counted by: files, or folders of them, and never more than a table can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.manifests import write_manifest
from tests.support.tiny_corpus import prepare
from training.records.token_shards import Shard, SourceFile, Stretch, TokenShards
from training.shards.sources import MAX_SOURCES, held_out_sources, source_names
from training.shards.stream import TokenStream


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["notes.txt"], ["notes.txt"]),
        (["a/1.txt", "b/1.txt"], ["a/1.txt", "b/1.txt"]),
        (["owner/set/train"], ["owner/set/train"]),
        ([f"shard-{n}.parquet" for n in range(40)], [f"shard-{n}.parquet" for n in range(40)]),
        ([f"{'wiki' if n % 2 else 'code'}/{n}.txt" for n in range(40)], ["code", "wiki"] * 20),
        ([f"data/{'wiki/en' if n % 2 else 'code'}/{n}.txt" for n in range(40)], ["data/code", "data/wiki"] * 20),
        ([*(f"code/{n}.py" for n in range(20)), "readme.md"], [*["code"] * 20, "(top)"]),
    ],
)
def test_few_files_are_sources_many_are_counted_by_folder(files: list[str], expected: list[str]) -> None:
    assert source_names(files) == expected


def test_beyond_the_largest_sources_the_rest_is_one_row(tmp_path: Path) -> None:
    files = [SourceFile(name=f"{n:02d}.txt", num_bytes=1, sha256="0") for n in range(40)]
    stretches = tuple(Stretch(source=n, tokens=100 + n, text_bytes=2 * n) for n in range(40))
    shard = Shard(
        name="validation/0", split="validation", tokens=1, documents=1, text_bytes=1, sha256="", stretches=stretches
    )
    write_manifest(tmp_path, [shard], vocab_size=2, end_id=0, sources=tuple(files))
    found = held_out_sources(TokenShards.read(tmp_path / "manifest.json"))
    assert len(found.names) == MAX_SOURCES
    assert found.names[:2] == ("39.txt", "38.txt")
    assert found.names[-1] == "others (25)"
    assert sum(found.text_bytes) == sum(2 * n for n in range(40))
    positions = np.arange(sum(100 + n for n in range(40)))
    assert np.bincount(found.of(positions)).tolist() == [*range(139, 124, -1), sum(range(100, 125))]


@pytest.mark.parametrize("split", ["documents", "tail"])
def test_each_held_out_token_leads_back_to_the_file_it_was_read_from(split: str, tmp_path: Path) -> None:
    """With bytes as tokens: the text of each source's tokens is the text of its files."""
    for name, letter in (("poems/a.txt", "a"), ("poems/b.txt", "b"), ("prose.txt", "c")):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text("\n\n".join(letter * (5 + n % 7) for n in range(60)))
    settings: dict[str, Any] = {"text_unit": "paragraph", "split": split, "validation_fraction": 0.5}
    folder, manifest = prepare(tmp_path, tmp_path / "corpus", **settings)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    sources = held_out_sources(manifest)
    stream = TokenStream(folder, "validation")
    tokens, numbers = stream.read(0, len(stream)), sources.of(np.arange(len(stream)))
    assert len(sources.names) == (3 if split == "documents" else 2)
    for number, name in enumerate(sources.names):
        text = tokenizer.decode(tokens[numbers == number].tolist(), skip_special_tokens=True)
        assert set(text) == {{"poems/a.txt": "a", "poems/b.txt": "b", "prose.txt": "c"}[name]}
        assert len(text) == sources.text_bytes[number]
