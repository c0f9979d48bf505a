from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.strangers_tokenizers import STRANGERS, written
from tests.support.tiny_corpus import (
    CODE,
    DOCUMENTS,
    EMOJI,
    POEM,
    all_documents,
    assert_refused,
    contents,
    decoded,
    prepare,
    write_json_lines,
)
from training.shards.stream import TokenStream


@pytest.mark.parametrize("kind", ["bpe", "characters", "bytes"])
@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_transformers_loads_the_saved_tokenizer(tmp_path: Path, kind: str, objective: str) -> None:
    from transformers import AutoTokenizer

    text = POEM + CODE + EMOJI
    source = write_json_lines(tmp_path / "corpus.jsonl", DOCUMENTS)
    folder, shards = prepare(tmp_path, source, kind=kind, tokenizer={"vocab_size": 320}, objective=objective)
    ours = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert theirs(text).input_ids == ours.encode(text).ids
    assert theirs.decode(theirs(text).input_ids) == ours.decode(ours.encode(text).ids) == text
    assert theirs.eos_token_id == shards.end_id == ours.token_to_id("<|endoftext|>")
    assert len(theirs) == shards.vocab_size
    assert shards.mask_id == (theirs.mask_token_id if objective == "masked" else None)
    assert (shards.mask_id is None) == (objective == "causal")


def test_a_trained_vocabulary_has_the_size_asked_for_and_is_the_same_each_time(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "corpus.jsonl", DOCUMENTS)
    first, shards = prepare(tmp_path / "1", source, kind="bpe", tokenizer={"vocab_size": 300})
    second, again = prepare(tmp_path / "2", source, kind="bpe", tokenizer={"vocab_size": 300})
    assert shards.vocab_size == 300
    assert shards == again
    assert contents(first) == contents(second)


def test_characters_know_those_of_the_validation_split_too(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("abc" * 30 + "xyz")
    folder, shards = prepare(tmp_path, source, kind="characters")
    assert shards.vocab_size == 7
    assert decoded(folder)["validation"][0].endswith("xyz")


def test_a_saved_tokenizer_can_be_used_on_another_corpus(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "corpus.jsonl", DOCUMENTS)
    trained, shards = prepare(tmp_path, source, kind="bpe", tokenizer={"vocab_size": 300})
    other = write_json_lines(tmp_path / "other.jsonl", [f"{text}!" for text in DOCUMENTS])
    path = {"path": str(trained / "tokenizer"), "vocab_size": 0}
    folder, loaded = prepare(tmp_path, other, kind="pretrained", tokenizer=path)
    assert (loaded.vocab_size, loaded.end_id) == (300, shards.end_id)
    assert sorted(all_documents(folder)) == sorted(f"{text}!" for text in DOCUMENTS)
    assert_refused(
        r"has 300 tokens, .* expects 4096: set data.tokenizer.vocab_size to 300",
        tmp_path,
        other,
        kind="pretrained",
        tokenizer=path | {"vocab_size": 4096},
    )
    assert_refused(
        "has no mask_token, which a masked model needs",
        tmp_path,
        other,
        kind="pretrained",
        tokenizer=path,
        objective="masked",
    )
    config = trained / "tokenizer" / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert_refused(
        r"has neither an end token \(eos_token\) nor a sep_token", tmp_path, other, kind="pretrained", tokenizer=path
    )
    assert_refused(
        r"no tokenizer can be loaded from there",
        tmp_path,
        other,
        kind="pretrained",
        tokenizer={"path": str(tmp_path / "nowhere")},
    )


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "LlamaTokenizer", "BertTokenizer", "CTRLTokenizer"])
def test_shards_have_the_tokens_of_tokenizer_json_whatever_its_class(tmp_path: Path, tokenizer_class: str) -> None:
    """Its class would cut digits, words or case otherwise."""
    texts = [f"Note {number} SAYS hello, {number * 7919} times.\n\nAnd: {number}-{number}(x)" for number in range(60)]
    kind = {"BertTokenizer": "cased", "LlamaTokenizer": "without space"}.get(tokenizer_class, "by threes")
    made = STRANGERS[kind]()
    written(tmp_path / "theirs", made, tokenizer_class=tokenizer_class)
    source = write_json_lines(tmp_path / "corpus.jsonl", texts)
    folder, shards = prepare(tmp_path, source, kind="pretrained", tokenizer={"path": str(tmp_path / "theirs")})
    end = made.token_to_id("<|endoftext|>")
    expected = sorted([*made.encode(text, add_special_tokens=False).ids, end] for text in texts)
    found: list[list[int]] = [[]]
    for split in ("train", "validation"):
        for token in TokenStream(folder, split).read(0, shards.tokens(split)).tolist():
            found[-1].append(token)
            if token == end:
                found.append([])
    assert sorted(found[:-1]) == expected
