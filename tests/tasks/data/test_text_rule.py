"""data.tokenizer.special_tokens_in_text and bos: what becomes of special tokens in a corpus, and of its address."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tasks.data.chunks import Chunk
from tasks.data.corpus import prepare_corpus
from tasks.data.survey import FindWork, find_tokens
from tests.support.tiny_corpus import estimated, write_json_lines
from tests.support.tokenizer_cases import TURNS, chatml, llama
from training.config.data import DataConfig
from training.config.run import RunConfig
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
    assert shards.encoding.special_tokens == ("<|im_end|>", "<|user|>", "<|assistant|>")


def test_the_address_changes_only_where_the_rule_changes_tokens(tmp_path: Path) -> None:
    with_template, without = chatml(tmp_path / "chatml"), chatml(tmp_path / "without", template="")
    words = write_json_lines(tmp_path / "words.jsonl", WORDS)
    chats = write_json_lines(tmp_path / "chats.jsonl", TURNS)

    def address(source: Path, tokenizer: Path | None, rule: str) -> str:
        folder, shards = shards_of(tmp_path, source, tokenizer, special_tokens_in_text=rule)
        assert shards.encoding.rule == rule  # also where another rule made the folder
        return folder.name

    assert len({address(words, with_template, rule) for rule in RULES}) == 1
    assert len({address(words, None, rule) for rule in RULES}) == 1
    assert address(chats, without, "template") == address(chats, without, "none")
    of_chats = {rule: address(chats, with_template, rule) for rule in RULES}
    assert of_chats["all"] == of_chats["template"] != of_chats["none"], "there are the template's markers only"
    for order in (RULES, RULES[::-1]):  # whichever makes shards first
        more = write_json_lines(tmp_path / f"{order[0]} first.jsonl", [*TURNS, "a<|endoftext|>b"])
        assert len({address(more, with_template, rule) for rule in order}) == 3, "each takes other strings for special"
        same = write_json_lines(tmp_path / f"the same {order[0]}.jsonl", [*TURNS, f"{order[0]} was first"])
        made = {rule: address(same, with_template, rule) for rule in order}
        assert made["all"] == made["template"] != made["none"]
    broken = chatml(tmp_path / "broken", template="{{")
    assert address(chats, broken, "all") not in of_chats.values(), "its template is not needed"


def test_the_addresses_of_today_stay(tmp_path: Path) -> None:
    """Shards of a corpus with special tokens, by each rule, are found by the next version."""
    source = write_json_lines(tmp_path / "ends.jsonl", [*WORDS, "a<|endoftext|>b"])
    made = {rule: shards_of(tmp_path, source, None, special_tokens_in_text=rule)[0].name for rule in RULES}
    assert made == {"none": "c678383e04d12d87", "template": "c678383e04d12d87", "all": "d27b0d278aec3b8f"}


class Searches:
    """Counts the chunks in which special tokens are looked for, and keeps the phases that are reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks, self.phases = 0, set[str]()
        monkeypatch.setattr("tasks.data.corpus.find_tokens", self.find)

    def find(self, work: FindWork, chunk: Chunk) -> bool:
        self.chunks += 1
        return find_tokens(work, chunk)

    def report(self, phase: str, done_bytes: int, total_bytes: int | None) -> None:
        self.phases.add(phase)


def test_special_tokens_are_looked_for_once_and_as_far_as_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = Searches(monkeypatch)
    tokenizer = {"kind": "pretrained", "path": str(chatml(tmp_path / "chatml"))}

    def prepare(name: str, texts: list[str]) -> None:
        source = write_json_lines(tmp_path / f"{name}.jsonl", texts)
        fields = {"path": str(source), "tokenizer": tokenizer, "shard_mib": 1, "processes": 1}
        data = DataConfig.model_validate(fields)
        prepare_corpus(data, tokens_home=tmp_path / "tokens", progress=searches.report)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    long = [text * 500 for text in WORDS] * 6  # 4 chunks
    for name, texts, expected in (("words", long, 4), ("chats", [*TURNS, *long], 1)):
        with monkeypatch.context() as interrupted:
            interrupted.setattr("tasks.data.corpus._tokenize", interrupt)
            with pytest.raises(KeyboardInterrupt):
                prepare(name, texts)
        assert "special tokens" in searches.phases
        assert searches.chunks == expected
        searches.chunks, searches.phases = 0, set()
        prepare(name, texts)
        assert searches.chunks == 0


def test_the_tokens_of_a_drawn_corpus_tell_of_its_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = Searches(monkeypatch)
    texts = [f"{text}<|endoftext|>" * 1200 for text in WORDS]
    rule = {"kind": "bpe", "vocab_size": 300, "sample_mib": 1, "special_tokens_in_text": "all"}
    source = write_json_lines(tmp_path / "long.jsonl", texts)
    data = DataConfig.model_validate({"path": str(source), "tokenizer": rule})
    made, _ = prepare_corpus(data, tokens_home=tmp_path / "tokens")
    assert searches.chunks == 1
    shutil.rmtree(tmp_path / "tokens" / ".special_tokens", ignore_errors=True)
    assert prepare_corpus(data, tokens_home=tmp_path / "tokens")[0] == made
    assert searches.chunks == 1


def test_shards_of_an_older_version_are_found_unless_the_rule_changes_their_tokens(tmp_path: Path) -> None:
    tokenizer = chatml(tmp_path / "chatml")
    for name, texts in (("words", WORDS), ("chats", TURNS)):
        source = write_json_lines(tmp_path / f"{name}.jsonl", texts)
        folder, shards = shards_of(tmp_path, source, tokenizer, special_tokens_in_text="none")
        without = {"text_encoding", "special_as_tokens", "special_as_text"}
        (folder / "manifest.json").write_text(shards.model_dump_json(exclude=without))
        again, found = shards_of(tmp_path, source, tokenizer)
        assert (again == folder) == (name == "words")
        assert found.encoding.rule == "template"
        assert shards_of(tmp_path, source, tokenizer, special_tokens_in_text="none")[0] == folder


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


def test_the_manifest_of_a_mixture_records_the_rule_of_the_mixture(tmp_path: Path) -> None:
    """Its first source was tokenized under another rule, which gave the same tokens."""
    tokenizer = chatml(tmp_path / "chatml")
    words, chats = (
        write_json_lines(tmp_path / name, texts) for name, texts in (("a.jsonl", WORDS), ("b.jsonl", TURNS))
    )
    shards_of(tmp_path, words, tokenizer, special_tokens_in_text="none")
    sources = [{"path": str(words), "name": "words"}, {"path": str(chats), "name": "chats"}]
    config = {"sources": sources, "tokenizer": {"kind": "pretrained", "path": str(tokenizer)}}
    folder, shards = prepare_corpus(DataConfig.model_validate(config), tokens_home=tmp_path / "tokens")
    assert shards.encoding.rule == "template"
    assert TokenShards.read(folder / "manifest.json").text_encoding == shards.text_encoding


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
    assert shards.encoding.bos == (("<s>",) if begins else ())


def test_a_tokenizer_without_such_a_token_is_refused(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "words.jsonl", WORDS)
    with pytest.raises(ValueError, match=r"data.tokenizer.bos=yes: the tokenizer of .* has no bos_token: set one"):
        shards_of(tmp_path, source, chatml(tmp_path / "chatml"), bos="yes")


def test_a_config_that_an_older_version_recorded_keeps_its_rule() -> None:
    from training.config.credentials import RECORD

    old = RunConfig.model_validate({"data": {"path": "stdlib"}}).model_dump(mode="json")
    for field in ("special_tokens_in_text", "bos"):
        del old["data"]["tokenizer"][field]
    read = RunConfig.model_validate_json(json.dumps(old), context=RECORD).data.tokenizer
    assert (read.special_tokens_in_text, read.bos) == ("none", "no")
    asked = RunConfig.model_validate(old).data.tokenizer
    assert (asked.special_tokens_in_text, asked.bos) == ("template", "auto")
