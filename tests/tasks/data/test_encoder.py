"""tiktoken gives the saved tokenizer's tokens, or is not used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tasks.data.encoder import TokensDiffer, choose_library, encode, tiktoken_encoding
from tasks.data.split import Passage
from tasks.data.tokenizer import SavedTokenizer
from tests.support.tiny_corpus import CODE, EMOJI, POEM, prepare, write_json_lines
from training.shards.stream import TokenStream

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LETTERS_ALONE = r"\p{L}+"
TEXTS = {
    "code": CODE * 20,
    "Chinese": POEM * 20,
    "emoji": EMOJI * 20,
    "mixed scripts": "Ωmega и кириллица, עברית ١٢٣ हिन्दी ｆｕｌｌ ½ ⅷ e\u0301\u200d\u00a0x\u3000y " * 20,
    "spaces": f"a{' ' * 5000}b\n\n\n{chr(9) * 300}\r\n{' ' * 3}",
    "one letter": "a" * 5000,
    "apostrophes": "I'll they'RE 'tis d'accord '' 's's " * 20,
    "end token": "before <|endoftext|> after",
    "nothing": "",
}


def trained(folder: Path, change: Callable[[Tokenizer], None] = lambda tokenizer: None) -> SavedTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    change(tokenizer)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CODE, POEM, EMOJI, *TEXTS.values()], trainer)
    end_id = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    file = folder / "tokenizer.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return SavedTokenizer(file, "bpe", "0" * 64, end_id + 1, end_id, None, choose_library(file)[0])


def passages(*texts: str) -> list[Passage]:
    return [Passage("train", text, ends=True, whole=True) for text in texts]


def cuts_words(words: str) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        split = pre_tokenizers.Split(Regex(words), "isolated")
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_words])

    return change


@pytest.mark.parametrize("change", [lambda tokenizer: None, cuts_words(LLAMA_3)], ids=["GPT-2", "Llama 3"])
def test_both_libraries_give_the_same_tokens(tmp_path: Path, change: Callable[[Tokenizer], None]) -> None:
    saved = trained(tmp_path, change)
    assert saved.library == "tiktoken"
    got = encode(saved, passages(*TEXTS.values()))
    expected = encode(replace(saved, library="tokenizers"), passages(*TEXTS.values()))
    assert got[0].tolist() == expected[0].tolist()
    assert got[1:] == expected[1:]
    alone = [encode(saved, passages(text))[0] for text in TEXTS.values()]
    assert np.concatenate(alone).tolist() == got[0].tolist()


@pytest.mark.slow  # 30 s
@pytest.mark.parametrize("change", [lambda tokenizer: None, cuts_words(LLAMA_3)], ids=["GPT-2", "Llama 3"])
def test_every_character_of_unicode_is_cut_alike(tmp_path: Path, change: Callable[[Tokenizer], None]) -> None:
    saved = trained(tmp_path, change)
    slow, fast = Tokenizer.from_file(str(saved.file)), tiktoken_encoding(saved.file)
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
    for first in range(0, len(characters), 4096):
        text = "".join(f"a{c}1 {c}{c}b.{c}.\n" for c in characters[first : first + 4096])
        assert fast.encode_ordinary(text) == slow.encode(text).ids, f"from U+{first:X}"


def normalized(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def with_a_prefix(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_a_token_in_text(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (normalized, "text is normalized first (NFC)"),
        (with_a_prefix, "the tokenizer cuts words in another way than GPT-2 or a single pattern"),
        (with_a_token_in_text, "the tokenizer has added tokens that are not special: '<tool>'"),
    ],
)
def test_other_tokenizers_keep_tokenizers_and_it_is_said(
    tmp_path: Path, change: Callable[[Tokenizer], None], why: str
) -> None:
    saved = trained(tmp_path, change)
    assert choose_library(saved.file) == ("tokenizers", f"tiktoken cannot: {why}")


def edited(saved: SavedTokenizer, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(saved.file.read_bytes())
    change(content["model"])
    path = folder / "edited.json"
    path.write_text(json.dumps(content))
    return path


def test_a_vocabulary_whose_ids_are_not_in_the_order_of_merges_keeps_tokenizers(tmp_path: Path) -> None:
    def swap(model: dict[str, Any]) -> None:
        model["merges"][0], model["merges"][1] = model["merges"][1], model["merges"][0]

    def forget(model: dict[str, Any]) -> None:
        model["merges"].pop()

    saved = trained(tmp_path)
    for change, why in (
        (swap, "merges are not in the order of their IDs"),
        (forget, "has tokens that no merge"),
    ):
        library, reason = choose_library(edited(saved, tmp_path, change))
        assert (library, why in reason) == ("tokenizers", True)
        tiktoken_encoding.cache_clear()


def test_a_vocabulary_that_holds_its_special_tokens_is_taken(tmp_path: Path) -> None:
    """GPT-2's and RoBERTa's do."""
    saved = trained(tmp_path)

    def add(model: dict[str, Any]) -> None:
        model["vocab"]["<|endoftext|>"] = saved.end_id

    assert choose_library(edited(saved, tmp_path, add))[0] == "tiktoken"


def test_text_that_differs_late_in_documents_is_found(tmp_path: Path) -> None:
    saved = trained(tmp_path, cuts_words(r"[^€]+"))
    texts = [f"{'the same header ' * 100}{number} €" for number in range(300)]
    with pytest.raises(TokensDiffer):
        encode(saved, passages(*texts))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_that_differ_are_made_again_by_tokenizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    saved = trained(tmp_path / "letters", cuts_words(LETTERS_ALONE))  # tiktoken drops what the pattern leaves over
    with pytest.raises(TokensDiffer, match="for ' only'"):
        encode(saved, passages("letters only", "letters, 1 number"))
    text = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "letters" / "tokenizer_config.json").write_text(json.dumps(text))
    texts = [f"{'letters ' * 2000}{number} and more" for number in range(100 if processes == 1 else 250)]
    source = write_json_lines(tmp_path / "corpus.jsonl", texts)
    pretrained = {"path": str(tmp_path / "letters"), "vocab_size": 0}
    options: dict[str, Any] = {"kind": "pretrained", "tokenizer": pretrained, "shard_mib": 1}
    with caplog.at_level(logging.WARNING):
        folder, shards = prepare(tmp_path, source, processes=processes, **options)
    assert "tiktoken gives other tokens than tokenizers for" in caplog.text
    slow = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokens = TokenStream(folder, "train").read(0, shards.tokens("train"))
    ends = [0, *(np.flatnonzero(tokens == shards.end_id) + 1)]
    first = tokens[: ends[1] - 1].tolist()
    assert slow.decode(first).strip() in texts
    assert first in [slow.encode(text).ids for text in texts]
    why = (folder / "library.txt").read_text()
    assert why.startswith("tokenizers, since tiktoken gives other tokens than tokenizers for")

    (folder / "manifest.json").unlink()  # as a call that was killed leaves it
    (folder / "00000.done.json").unlink()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again, same = prepare(tmp_path, source, processes=1, **options)
    assert (again, same) == (folder, shards)
    assert "text is encoded by tokenizers, since tiktoken gives other tokens" in caplog.text


def test_stretches_of_another_library_are_made_again(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "corpus.jsonl", [CODE * 100 + str(number) for number in range(40)])
    folder, shards = prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 300})
    assert (folder / "library.txt").read_text() == "tiktoken\n"
    (folder / "manifest.json").unlink()
    (folder / "library.txt").unlink()  # as versions left it that had tokenizers alone
    before = (folder / "00000.done.json").stat().st_mtime_ns
    assert prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 300}) == (folder, shards)
    assert (folder / "00000.done.json").stat().st_mtime_ns > before
