"""The tokens of a long document, which is read in pieces and cut between chunks, are those of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tasks.data.corpus import prepare_corpus
from tests.support.text_cases import HELLOS
from tests.support.tokenizer_cases import TOKENIZERS, sentencepiece_over_words
from training.config.data import DataConfig
from training.shards.stream import TokenStream


def tokens_of(home: Path, source: Path, tokenizer: Path, **fields: Any) -> list[int]:
    config = {"path": str(source), "tokenizer": {"kind": "pretrained", "path": str(tokenizer)}, "split": "all"}
    folder, _ = prepare_corpus(DataConfig.model_validate(config | fields), tokens_home=home / "tokens")
    stream = TokenStream(folder, "validation")
    return stream.read(0, len(stream) - 1).tolist()  # without the end token


@pytest.mark.parametrize("border", ["", "\n", " "], ids=["lines", "blank lines", "words"])
@pytest.mark.parametrize("name", [*TOKENIZERS, "sentencepiece_over_words"])
def test_pieces_have_the_tokens_of_the_whole(
    tmp_path: Path, name: str, border: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.data.readers.documents.LONGEST_PIECE", 1000)
    monkeypatch.setattr("tasks.data.readers.documents.BORDER_WINDOW", 500)
    make = {**TOKENIZERS, "sentencepiece_over_words": sentencepiece_over_words}[name]
    tokenizer = make(tmp_path / "tokenizer")
    text = border.join(text.replace("\n", " ") if border == " " else text for text in HELLOS).strip()
    source = tmp_path / "long.jsonl"
    source.write_text(json.dumps({"text": text}))
    whole = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert tokens_of(tmp_path, source, tokenizer) == whole


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unigram", "byte_level_with_space"))]
)
def test_chunks_have_the_tokens_of_the_whole(tmp_path: Path, name: str) -> None:
    tokenizer = TOKENIZERS[name](tmp_path / "tokenizer")
    text = "".join(HELLOS) * 120
    source = tmp_path / "long.txt"
    source.write_text(text)
    assert len(text) > 1.5 * 2**20
    whole = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert tokens_of(tmp_path, source, tokenizer, shard_mib=1) == whole
