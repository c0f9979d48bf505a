"""gigatoken gives the saved tokenizer's tokens, or is not used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tasks.data import encoder
from tasks.data.encoder import TokensDiffer, choose_library, encode, forget_words, new_gigatoken
from tasks.data.split import Passage
from tasks.data.tokenizer import SavedTokenizer
from tests.support.text_cases import as_sentencepiece
from tests.support.tiny_corpus import CODE, EMOJI, POEM, prepare, write_json_lines
from training.shards.stream import TokenStream

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_3 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# Unicode 16 composes two of each; the library tokenizers has older tables.
NEW_IN_NFC = {"\U000113c2", "\U0001611e", "\U00016d67"}
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


Change = Callable[[Tokenizer], None]


def nothing(tokenizer: Tokenizer) -> None:
    """Leave it as GPT-2's."""


def trained(folder: Path, change: Change = nothing, *, then: Change = nothing) -> SavedTokenizer:
    """A tokenizer that is changed before its training, and once more after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    change(tokenizer)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if change is sentencepiece else []
    trainer = trainers.BpeTrainer(
        vocab_size=600 + len(own), initial_alphabet=[] if own else alphabet, special_tokens=own, show_progress=False
    )
    tokenizer.train_from_iterator([CODE, POEM, EMOJI, *TEXTS.values()], trainer)
    end_id = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    then(tokenizer)
    file = folder / "tokenizer.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return SavedTokenizer(file, "bpe", "0" * 64, end_id + 1, end_id, None, choose_library(file)[0])


def passages(*texts: str) -> list[Passage]:
    return [Passage("train", text, ends=True, whole=True) for text in texts]


def cuts_words(words: str) -> Change:
    def change(tokenizer: Tokenizer) -> None:
        split = pre_tokenizers.Split(Regex(words), "isolated")
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_words])

    return change


def qwen(tokenizer: Tokenizer) -> None:
    cuts_words(QWEN_3)(tokenizer)
    tokenizer.normalizer = normalizers.NFC()


def with_tokens_in_text(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("    ", special=False)])


def with_tokens_at_the_ends(tokenizer: Tokenizer) -> None:
    """As Llama's, which begins each encoded text with a token; a part of a document must not get it."""
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def sentencepiece(tokenizer: Tokenizer) -> None:
    """As Llama 2's and Mistral's: characters, and bytes for those that are not in the vocabulary."""
    tokenizer.model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer.pre_tokenizer = None
    as_sentencepiece(tokenizer)


KINDS = {
    "GPT-2": (nothing, nothing),
    "Llama 3": (cuts_words(LLAMA_3), nothing),
    "Qwen 3": (qwen, nothing),
    "tokens in text": (nothing, with_tokens_in_text),
    "tokens at the ends": (nothing, with_tokens_at_the_ends),
    "SentencePiece": (sentencepiece, nothing),
}


@pytest.mark.parametrize(("change", "then"), KINDS.values(), ids=KINDS)
def test_both_libraries_give_the_same_tokens(
    tmp_path: Path, change: Change, then: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = trained(tmp_path, change, then=then)
    assert saved.library == "gigatoken"
    got = encode(saved, passages(*TEXTS.values()))
    expected = encode(replace(saved, library="tokenizers"), passages(*TEXTS.values()))
    assert got[0].tolist() == expected[0].tolist()
    assert got[1:] == expected[1:]
    forget_words()
    monkeypatch.setattr(encoder, "ENCODER_CHARACTERS", 1000)
    begun = list[object]()

    def begin(*how: Any) -> Any:
        begun.append(new_gigatoken(*how))
        return begun[-1]

    monkeypatch.setattr(encoder, "new_gigatoken", begin)
    alone = [encode(saved, passages(text))[0] for text in TEXTS.values()]
    assert np.concatenate(alone).tolist() == got[0].tolist()
    long = sum(len(text) > 1000 for text in TEXTS.values())
    assert len(begun) >= long > 1, "what it remembers is bounded: after each long text another one encodes"


def test_parts_of_documents_get_no_end_token(tmp_path: Path) -> None:
    saved = trained(tmp_path)
    parts = [
        Passage("train", CODE, ends=False, whole=False),
        Passage("train", "", ends=True, whole=True),
        Passage("train", POEM, ends=True, whole=False),
    ]
    tokens, ends, lengths = encode(saved, parts)
    assert np.flatnonzero(tokens == saved.end_id).tolist() == [lengths[0]]
    assert ends == [lengths[0] + 1, len(tokens)]
    assert (lengths[1], sum(lengths)) == (1, len(tokens))


def test_one_piece_does_not_part_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spaced(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)

    saved = replace(trained(tmp_path, spaced), library="tokenizers")
    first, second = CODE[:300], CODE[300:]
    pieces = [
        Passage("train", first, ends=False, whole=False, after=second[:50]),
        Passage("train", second, ends=True, whole=True, begins=False, before=first[-50:]),
    ]
    sizes, real = list[int](), encoder._encode

    def counted(saved: SavedTokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        sizes.append(len(texts))
        return real(saved, texts)

    monkeypatch.setattr(encoder, "_encode", counted)
    tokens, _, _ = encode(saved, [*passages(CODE, POEM), *pieces, *passages(POEM)])
    documents = [encode(saved, passages(text))[0] for text in (CODE, POEM, CODE, POEM)]
    assert tokens.tolist() == np.concatenate(documents).tolist()
    assert sizes[:-4] == [5, 1]


@pytest.mark.slow  # 10 s
@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "Qwen 3"])
def test_every_character_of_unicode_is_cut_alike(tmp_path: Path, kind: str) -> None:
    saved = trained(tmp_path, *KINDS[kind][:1])
    slow, fast = Tokenizer.from_file(str(saved.file)), new_gigatoken(saved.file)
    # planes 4 to 13 have no characters, 15 and 16 private ones: every 64th of them
    codes = [*range(0x40000), *range(0x40000, 0xE0000, 64), *range(0xE0000, 0xF0000), *range(0xF0000, 0x110000, 64)]
    characters = [chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF]
    if kind == "Qwen 3":
        characters = [character for character in characters if character not in NEW_IN_NFC]
    for first in range(0, len(characters), 4096):
        text = "".join(f"a{c}1 {c}{c}b.{c}.\n" for c in characters[first : first + 4096])
        assert fast.encode(text).tolist() == slow.encode(text).ids, f"from U+{first:X}"


def words_and_all_else(tokenizer: Tokenizer) -> None:
    cuts_words(r"\w+|\W+")(tokenizer)


def with_a_token_for_whole_words(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("cat", single_word=True)])


def of_characters(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def by_chance(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.BPE(dropout=0.1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (words_and_all_else, "no fast pretokenizer for"),
        (of_characters, "the tokenizer is a BPE of characters, not a BPE of bytes"),
        (with_a_token_for_whole_words, "the tokenizer has tokens that are taken as whole words only: 'cat'"),
        (by_chance, "the tokenizer drops merges by chance (dropout 0.1)"),
    ],
)
def test_other_tokenizers_keep_tokenizers_and_it_is_said(tmp_path: Path, change: Change, why: str) -> None:
    library, reason = choose_library(trained(tmp_path, change).file)
    assert library == "tokenizers"
    assert reason.startswith("gigatoken cannot: ")
    assert why in reason


def edited(saved: SavedTokenizer, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(saved.file.read_bytes())
    change(content["model"])
    path = folder / "edited.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("turned", [0, 100])
def test_merges_in_another_order_than_their_ids_give_the_same_tokens(tmp_path: Path, turned: int) -> None:
    def swap(model: dict[str, Any]) -> None:
        merges = model["merges"]
        merges[turned], merges[turned + 1] = merges[turned + 1], merges[turned]

    saved = trained(tmp_path)
    saved = replace(saved, file=edited(saved, tmp_path, swap))
    got = encode(saved, passages(*TEXTS.values()))
    assert got[0].tolist() == encode(replace(saved, library="tokenizers"), passages(*TEXTS.values()))[0].tolist()


def test_a_vocabulary_that_holds_its_special_tokens_is_taken(tmp_path: Path) -> None:
    """GPT-2's and RoBERTa's do."""
    saved = trained(tmp_path)

    def add(model: dict[str, Any]) -> None:
        model["vocab"]["<|endoftext|>"] = saved.end_id

    assert choose_library(edited(saved, tmp_path, add))[0] == "gigatoken"


def test_text_that_differs_late_in_documents_is_found(tmp_path: Path) -> None:
    saved, new = trained(tmp_path, qwen), 2 * min(NEW_IN_NFC)
    texts = [f"{'the same header ' * 100}{number} {new * 100}" for number in range(300)]
    with pytest.raises(TokensDiffer):
        encode(saved, passages(*texts))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_that_differ_are_made_again_by_tokenizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    new = 2 * min(NEW_IN_NFC)
    saved = trained(tmp_path / "letters", qwen)
    with pytest.raises(TokensDiffer, match=r"for '.* 1 number'"):
        encode(saved, passages("letters only", f"letters{new} 1 number"))
    text = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "letters" / "tokenizer_config.json").write_text(json.dumps(text))
    line = f"{20 * 'letters '}{new} "
    texts = [f"{100 * line}{number}" for number in range(100 if processes == 1 else 250)]
    source = write_json_lines(tmp_path / "corpus.jsonl", texts)
    pretrained = {"path": str(tmp_path / "letters"), "vocab_size": 0}
    options: dict[str, Any] = {"kind": "pretrained", "tokenizer": pretrained, "shard_mib": 1}
    with caplog.at_level(logging.WARNING):
        folder, shards = prepare(tmp_path, source, processes=processes, **options)
    assert "gigatoken gives other tokens than tokenizers for" in caplog.text
    slow = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokens = TokenStream(folder, "train").read(0, shards.tokens("train"))
    ends = [0, *(np.flatnonzero(tokens == shards.end_id) + 1)]
    first = tokens[: ends[1] - 1].tolist()
    assert slow.decode(first).strip() in texts
    assert first in [slow.encode(text).ids for text in texts]
    why = (folder / "library.txt").read_text()
    assert why.startswith("tokenizers, since gigatoken gives other tokens than tokenizers for")

    (folder / "manifest.json").unlink()  # as a call that was killed leaves it
    (folder / "00000.done.json").unlink()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again, same = prepare(tmp_path, source, processes=1, **options)
    assert (again, same) == (folder, shards)
    assert "text is encoded by tokenizers, since gigatoken gives other tokens" in caplog.text


def test_stretches_of_another_library_are_made_again(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "corpus.jsonl", [CODE * 100 + str(number) for number in range(40)])
    folder, shards = prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 300})
    assert (folder / "library.txt").read_text() == "gigatoken\n"
    (folder / "manifest.json").unlink()
    (folder / "library.txt").unlink()  # as versions left it that had tokenizers alone
    before = (folder / "00000.done.json").stat().st_mtime_ns
    assert prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 300}) == (folder, shards)
    assert (folder / "00000.done.json").stat().st_mtime_ns > before
