"""A stranger's tokenizer: one that panics, has a special token of hundreds of characters, or is no tokenizer at all."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from tasks.data.tokenizer import load_pretrained
from tests.support.tokenizer_cases import chatml
from training.config.data import TokenizerConfig
from training.records.text_encoding import NOTHING_SPECIAL
from training.tokenizer.text_encoder import TextEncoder, open_tokenizer, pattern_of, tokens_around

SLOW = Regex(r"(?:a|aa)+\d")  # gives up after ten million steps, and panics
TEXT = "a" * 60


def spoiled(folder: Path, part: str) -> Path:
    """A tokenizer of which one part tries too long."""
    file = chatml(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    if part == "pre_tokenizer":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SLOW, "isolated")
    elif part == "normalizer":
        tokenizer.normalizer = normalizers.Replace(SLOW, "b")
    else:
        tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(SLOW, "b")])
    tokenizer.save(str(file))
    return folder


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_tokenizer_that_panics_is_an_ordinary_error(part: str, tmp_path: Path) -> None:
    encoder = TextEncoder(spoiled(tmp_path / "t", part), NOTHING_SPECIAL.model_dump())
    assert encoder.encode("b")
    with pytest.raises(ValueError, match=r"the tokenizer fails at this text .*retry-limit"):
        encoder.encode(TEXT)
    with pytest.raises(ValueError, match="the tokenizer fails"):
        encoder.tokenizer.encode_batch_fast([TEXT, "b"])
    with pytest.raises(ValueError, match="the tokenizer fails"):
        encoder.encode_chat(TEXT, guard="\U000f0000")


def test_a_decoder_that_panics_ends_no_thread_in_silence(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(spoiled(tmp_path / "t", "decoder") / "tokenizer.json", None)
    (token,) = tokenizer.encode("a", add_special_tokens=False).ids
    ended: list[str] = []

    def work() -> None:
        try:
            tokenizer.decode([token] * 60)
        except Exception as error:  # as each thread that serves catches it
            ended.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
    assert "the tokenizer fails" in ended[0]


def test_a_tokenizer_that_panics_at_every_text_is_refused_at_the_first(tmp_path: Path) -> None:
    file = spoiled(tmp_path / "t", "pre_tokenizer") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.normalizer = normalizers.Replace(Regex("[\\s\\S]"), TEXT)
    with pytest.raises(ValueError, match="the tokenizer fails"):
        tokens_around(tokenizer)


@pytest.mark.parametrize("length", [257, 900, 100_000])
def test_a_special_token_of_hundreds_of_characters_is_refused_with_its_file(length: int, tmp_path: Path) -> None:
    folder = chatml(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<" + "x" * (length - 2) + ">"])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = rf"its special token '<x+'… has {length:,} characters"
    with pytest.raises(ValueError, match=rf"tokenizer\.json cannot be read as a tokenizer \({words}"):
        open_tokenizer(folder / "tokenizer.json", None)
    with pytest.raises(ValueError, match=rf"data\.tokenizer\.path=.*{words}"):
        load_pretrained(TokenizerConfig(kind="pretrained", path=str(folder)))


def test_a_pattern_of_tokens_that_begin_alike_is_no_deeper_than_python_goes() -> None:
    chain = ["a" * number for number in range(1, 257)]

    def at_depth(number: int) -> str:
        if number:
            return at_depth(number - 1)
        found = pattern_of(chain).match("a" * 300)
        assert found
        return found[0]

    assert at_depth(300) == "a" * 256


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"[" * 100_000, b'{"version": "1.0", "model": ' + b'{"a":' * 100_000, b"\xff\xfe"],
    ids=["empty", "list", "object", "deep", "deep model", "binary"],
)
def test_what_is_no_tokenizer_is_refused_with_its_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        open_tokenizer(file, None)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        open_tokenizer(file, ("a",))


@pytest.mark.parametrize(
    "field", ["tokenizer_class", "eos_token", "added_tokens_decoder", "extra_special_tokens", "chat_template"]
)
@pytest.mark.parametrize("value", [1, [1], {"a": {"b": 1}}, True, [{"name": 1}]], ids=str)
def test_wrong_types_in_tokenizer_config_are_taken_or_refused(field: str, value: object, tmp_path: Path) -> None:
    folder = chatml(tmp_path / "t")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused = ""
    try:
        loaded = load_pretrained(TokenizerConfig(kind="pretrained", path=str(folder)))
        assert loaded
        assert isinstance(loaded.chat_template, str)
    except ValueError as error:
        refused = str(error)
    assert not refused or f"data.tokenizer.path={folder}" in refused
