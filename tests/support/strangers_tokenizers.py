"""Tokenizers whose tokenizer.json makes other tokens than the class that their folder names."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.tokenizer.pretrained import SAMPLES

END = "<|endoftext|>"
BY_THREES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # OLMo 2's
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> Tokenizer:
    """A byte-level BPE of words as a pattern finds them."""
    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(made, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, **_own(END)))


def without_space() -> Tokenizer:
    """As Yi has it: a BPE with the bytes of what it lacks, and no space before a text."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    own = ("<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)))
    return _trained(made, trainers.BpeTrainer(vocab_size=420, **_own(*own)))


def cased() -> Tokenizer:
    """As a cased BERT has it."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False, strip_accents=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return _trained(made, trainers.WordPieceTrainer(vocab_size=300, **_own("[UNK]", "[CLS]", "[SEP]", "[MASK]", END)))


def pieces() -> Tokenizer:
    """A Unigram that keeps case and puts no space before a text."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    return _trained(made, trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", **_own("<unk>", END)))


def _own(*tokens: str) -> dict[str, Any]:
    return {"special_tokens": list(tokens), "show_progress": False}


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer


def _learned_once(make: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """Returns a copy of what is trained at the first call: a hundred classes are tried with each tokenizer."""
    saved = functools.cache(lambda: make().to_str())
    return lambda: Tokenizer.from_str(saved())


STRANGERS: Mapping[str, Callable[[], Tokenizer]] = {
    "by threes": _learned_once(lambda: split_by(BY_THREES)),
    "o200k": _learned_once(lambda: split_by(O200K)),
    "without space": _learned_once(without_space),
    "cased": _learned_once(cased),
    "pieces": _learned_once(pieces),
}


def written(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END} | config))
    return folder
