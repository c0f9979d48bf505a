"""data.tokenizer.special_tokens_in_text and bos: what becomes of special tokens in a corpus, and of its address."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tasks.data.corpus import prepare_corpus
from tests.support.tiny_corpus import estimated, write_json_lines
from tests.support.tokenizer_cases import TURNS, chatml, llama
from training.config.data import DataConfig
from training.records.token_shards import TokenShards
from training.shards.stream import TokenStream

RULES = ("none", "template", "all")
WORDS = [f"Text number {number} without any marker." for number in range(40)]


def shards_of(
    home: Path, source: Path, tokenizer: Path | None, *, continued: bool = False, **rule: str
) -> tuple[Path, TokenShards]:
    kind = {"kind": "pretrained", "path": str(tokenizer)} if tokenizer else {"kind": "bytes"}
    data = DataConfig.model_validate({"path": str(source), "tokenizer": kind | rule})
    return prepare_corpus(data, tokens_home=home / "tokens", continued=continued)


def all_tokens(folder: Path) -> list[int]:
    streams = [TokenStream(folder, "train"), TokenStream(folder, "validation")]
    return [token for stream in streams for token in stream.read(0, len(stream)).tolist()]


@pytest.mark.parametrize(("rule", "special"), [("none", ()), ("template", (1, 2)), ("all", (0, 1, 2))])
def test_special_tokens_in_a_corpus_are_special_by_the_rule(
    tmp_path: Path, rule: str, special: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = chatml(tmp_path / "chatml")
    source = write_json_lines(tmp_path / "chats.jsonl", [f"{turn}<|endoftext|>{turn}" for turn in TURNS])
    with caplog.at_level(logging.WARNING):
        folder, shards = shards_of(tmp_path, source, tokenizer, special_tokens_in_text=rule)
    tokens = all_tokens(folder)
    each = len(TURNS)
    written = {0: each, 1: 4 * each, 2: 4 * each}  # in the corpus; each document ends with one more <|im_end|>
    for token, times in written.items():
        assert tokens.count(token) == (times if token in special else 0) + (each if token == shards.end_id else 0)
    taken = sum(written[token] for token in special)
    assert (shards.special_as_tokens, shards.special_as_text) == (taken, 9 * each - taken)
    assert shards.text_encoding is not None
    assert shards.text_encoding.rule == rule
    expected = f"text: holds {9 * each:,} strings that are special tokens of the tokenizer: {taken:,} became special"
    assert expected in caplog.text
    assert expected in "\n".join(shards.ledger_warnings())
    settings = {"kind": "pretrained", "path": str(tokenizer), "special_tokens_in_text": rule}
    before = estimated({"path": str(source), "tokenizer": settings})
    assert expected in "\n".join(before.lines()), "as a plan says it beforehand"


def test_both_libraries_encode_by_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, source = chatml(tmp_path / "chatml"), write_json_lines(tmp_path / "chats.jsonl", TURNS)
    fast, _ = shards_of(tmp_path / "fast", source, tokenizer)
    assert (fast / "library.txt").read_text() == "gigatoken\n"
    monkeypatch.setattr("tasks.data.tokenizer.choose_library", lambda *_: ("tokenizers", "the test asks for it"))
    slow, _ = shards_of(tmp_path / "slow", source, tokenizer)
    assert all_tokens(fast) == all_tokens(slow)


ROLES = "{% for m in messages %}<{{ '|' + m.role + '|>' }}{{ m.content + eos_token }}{% endfor %}"


def test_a_template_may_put_its_markers_together(tmp_path: Path) -> None:
    tokenizer = chatml(tmp_path / "roles", template=ROLES)
    file = tokenizer / "tokenizer.json"
    loaded = Tokenizer.from_file(str(file))
    loaded.add_special_tokens(["<|user|>", "<|assistant|>", "<|tool|>"])
    loaded.save(str(file))
    source = write_json_lines(tmp_path / "words.jsonl", WORDS)
    _, shards = shards_of(tmp_path, source, tokenizer)
    assert shards.text_encoding.special_tokens == ("<|im_end|>", "<|user|>", "<|assistant|>")


def test_each_rule_has_shards_of_its_own(tmp_path: Path) -> None:
    tokenizer, source = chatml(tmp_path / "chatml"), write_json_lines(tmp_path / "chats.jsonl", TURNS)
    made = {rule: shards_of(tmp_path, source, tokenizer, special_tokens_in_text=rule) for rule in RULES}
    assert len({folder for folder, _ in made.values()}) == 3
    assert all(shards.text_encoding.rule == rule for rule, (_, shards) in made.items())
    broken = chatml(tmp_path / "broken", template="{{")
    shards_of(tmp_path, source, broken, special_tokens_in_text="all")  # its template is not needed


def test_shards_of_another_rule_are_refused_in_a_mixture(tmp_path: Path) -> None:
    tokenizer = chatml(tmp_path / "chatml")
    source = write_json_lines(tmp_path / "chats.jsonl", TURNS)
    folder, _ = shards_of(tmp_path, source, tokenizer, special_tokens_in_text="none")
    sources = [{"path": f"shards:{folder}", "name": "old"}, {"path": str(source), "name": "new"}]
    config: dict[str, Any] = {"sources": sources, "tokenizer": {"kind": "pretrained", "path": str(tokenizer)}}
    with pytest.raises(ValueError, match=r"tokens of old were made by another rule .*special_tokens_in_text=none"):
        prepare_corpus(DataConfig.model_validate(config), tokens_home=tmp_path / "tokens")
    config["tokenizer"]["special_tokens_in_text"] = "none"
    _, shards = prepare_corpus(DataConfig.model_validate(config), tokens_home=tmp_path / "tokens")
    assert shards.special_as_tokens == 0


@pytest.mark.parametrize(
    ("bos", "continued", "begins"), [("auto", False, 0), ("auto", True, 1), ("yes", False, 1), ("no", True, 0)]
)
def test_documents_begin_as_the_tokenizer_of_a_continued_model_does_it(
    tmp_path: Path, bos: str, continued: bool, begins: int
) -> None:
    tokenizer = llama(tmp_path / "llama")
    texts = [*WORDS, "<s>[user] It has its own.</s>"]
    source = write_json_lines(tmp_path / "words.jsonl", texts)
    folder, shards = shards_of(tmp_path, source, tokenizer, continued=continued, bos=bos)
    documents = []
    for split in ("train", "validation"):
        stream = TokenStream(folder, split)  # type: ignore[arg-type]
        bounds = stream.document_bounds().tolist()
        documents += [stream.read(a, b).tolist() for a, b in itertools.pairwise(bounds)]
    assert len(documents) == len(texts)
    assert sum(document.count(1) for document in documents) == begins * len(WORDS) + 1
    assert all(document[0] == 1 for document in documents) == bool(begins)
    assert shards.text_encoding.bos == (("<s>",) if begins else ())


def test_a_tokenizer_without_such_a_token_is_refused(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "words.jsonl", WORDS)
    with pytest.raises(ValueError, match=r"data.tokenizer.bos=yes: the tokenizer of .* has no bos_token: set one"):
        shards_of(tmp_path, source, chatml(tmp_path / "chatml"), bos="yes")
