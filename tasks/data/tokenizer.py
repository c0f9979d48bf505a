"""The tokenizer of a corpus: trained on it, pretrained, of characters or of bytes. It is saved beside the shards."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.encoder import SavedTokenizer, choose_library, load_tokenizer
from tasks.store.local_copy import local_copy
from tasks.workspace.bounded_process import BoundedTemplate
from training.config.data import TokenizerConfig
from training.facts.cures import Cure
from training.records.record import sha256_file
from training.records.text_encoding import TextEncoding
from training.tokenizer.pretrained import PretrainedTokenizer, open_pretrained, save
from training.tokenizer.text_encoder import special_tokens_of, tokens_around

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

log = logging.getLogger(__name__)

END = "<|endoftext|>"
MASK = "<|mask|>"
LONGEST_WORD = 256  # bytes: of 200 kB in one word a BPE learns for minutes, of the same in pieces for 0.3 s
LONG_SPACE = re.compile(rf"\s{{{LONGEST_WORD // 4},}}")


@dataclass(frozen=True)
class Specials:
    """The special tokens that training needs; `mask` is set only for masked models."""

    end: str
    mask: str | None


def load_pretrained(config: TokenizerConfig) -> PretrainedTokenizer | None:
    """Return the tokenizer of kind=pretrained, otherwise None.

    Raises ValueError, with the cure, if it cannot be used.
    """
    if config.kind != "pretrained":
        return None
    path = local_copy(config.path, field="data.tokenizer.path")
    loaded = open_pretrained(path, name=f"data.tokenizer.path={config.path}")
    size = _vocab_size(loaded.tokenizer)
    if config.vocab_size and config.vocab_size != size:
        raise ValueError(
            f"data.tokenizer.path={config.path} has {size:,} tokens, data.tokenizer.vocab_size expects "
            f"{config.vocab_size}: {Cure.VOCAB_SIZE(size=size)}"
        )
    return loaded


def special_tokens(pretrained: PretrainedTokenizer | None, *, masked: bool) -> Specials:
    """Return the special tokens. Raises ValueError if a pretrained tokenizer lacks one that is needed."""
    if pretrained is None:
        return Specials(END, MASK if masked else None)
    path, names = pretrained.path, pretrained.config
    end, mask = names.get("eos_token") or names.get("sep_token"), names.get("mask_token")
    if end is None:
        raise ValueError(
            f"data.tokenizer.path={path} has neither an end token (eos_token) nor a sep_token, so nothing could mark "
            f"where a document ends: {Cure.END_TOKEN}"
        )
    if masked and mask is None:
        raise ValueError(
            f"data.tokenizer.path={path} has no mask_token, which a masked model needs: set one in its "
            "tokenizer_config.json, or choose another tokenizer or model.architecture"
        )
    return Specials(end, mask if masked else None)


def text_encoding(
    config: TokenizerConfig, pretrained: PretrainedTokenizer | None, specials: Specials, *, continued: bool
) -> TextEncoding:
    """Return the rule by which text becomes tokens. `continued`: a pretrained model is trained further or evaluated.

    Raises ValueError, with the cure, for data.tokenizer.bos=yes with a tokenizer that has no such token.
    """
    rule = config.special_tokens_in_text
    if pretrained is None:
        own = tuple(token for token in (specials.end, specials.mask) if token)
        return TextEncoding(
            rule=rule,
            special_tokens=own if rule == "all" else (),
            bos=(specials.end,) if config.bos == "yes" else (),
        )
    special: tuple[str, ...] = ()
    if rule == "template":
        special = written_by_template(pretrained)
    elif rule == "all":
        special = special_tokens_of(pretrained.tokenizer)
    return TextEncoding(rule=rule, special_tokens=special, bos=_bos(config, pretrained, continued=continued))


def written_by_template(pretrained: PretrainedTokenizer) -> tuple[str, ...]:
    """Return the special tokens that the tokenizer's chat template writes; none if it has no template.

    Raises ValueError for a template that cannot be read.
    """
    if not pretrained.chat_template:
        return ()
    special = special_tokens_of(pretrained.tokenizer)
    try:
        return BoundedTemplate(pretrained.chat_template, pretrained.names).written(special)
    except ValueError as error:
        raise ValueError(f"data.tokenizer.path={pretrained.path}: {error}") from None


def _bos(config: TokenizerConfig, pretrained: PretrainedTokenizer, *, continued: bool) -> tuple[str, ...]:
    """Return the tokens with which each document begins."""
    if config.bos == "no" or (config.bos == "auto" and not continued):
        return ()
    before, _ = tokens_around(pretrained.tokenizer)
    if before or config.bos == "auto":
        return before
    if not (bos := pretrained.config.get("bos_token")):
        raise ValueError(
            f"data.tokenizer.bos=yes: the tokenizer of {config.path} has no bos_token: set one in its "
            f"tokenizer_config.json, or {Cure.NO_BOS}"
        )
    return (bos,)


def content_hash(pretrained: PretrainedTokenizer | None) -> str:
    """Return the hash of a pretrained tokenizer, for the fingerprint; others depend on corpus and config only."""
    return hashlib.sha256(pretrained.tokenizer.to_str().encode()).hexdigest() if pretrained else ""


def save_tokenizer(
    folder: Path,
    config: TokenizerConfig,
    *,
    pretrained: PretrainedTokenizer | None,
    specials: Specials,
    encoding: TextEncoding,
    train_texts: Sequence[Iterable[str]],
    all_texts: Iterable[str],
) -> SavedTokenizer:
    """Make FOLDER/tokenizer/, which `tokenizers` and `transformers` can load, unless it exists.

    `train_texts`, samples by corpus, are read for kind=bpe only, `all_texts` for kind=characters only: a character that
    validation alone has would otherwise be unknown.
    """
    target = folder / "tokenizer"
    if not target.exists():
        aside = folder / ".tokenizer.part"
        shutil.rmtree(aside, ignore_errors=True)
        if pretrained:
            save(pretrained.tokenizer, pretrained.config, aside)
        else:
            made = _make(config, specials, train_texts=train_texts, all_texts=all_texts)
            names = dict.fromkeys(
                ("bos_token", "eos_token", "pad_token"), specials.end
            )  # it also starts texts and pads
            save(made, names | ({"mask_token": specials.mask} if specials.mask else {}), aside)
        aside.rename(target)
    return _described(target / "tokenizer.json", config, specials, encoding)


def _make(
    config: TokenizerConfig, specials: Specials, *, train_texts: Sequence[Iterable[str]], all_texts: Iterable[str]
) -> Tokenizer:
    match config.kind:
        case "characters":
            tokenizer = _characters(all_texts)
        case "bytes":
            tokenizer = _byte_level({byte: index for index, byte in enumerate(_byte_alphabet())})
        case _:
            tokenizer = _trained(config, specials, train_texts)
    tokenizer.add_special_tokens([token for token in (specials.end, specials.mask) if token])
    return tokenizer


def _trained(config: TokenizerConfig, specials: Specials, texts: Sequence[Iterable[str]]) -> Tokenizer:
    from tokenizers import pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    num_specials = 2 if specials.mask else 1
    tokenizer = _byte_level({})
    trainer = BpeTrainer(
        vocab_size=config.bpe_size - num_specials,  # special tokens come last, so that bytes and merges keep their IDs
        initial_alphabet=_byte_alphabet(),
        show_progress=False,
    )
    words = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    tokenizer.train_from_iterator(_noting_long_words(itertools.chain.from_iterable(texts), words), trainer)
    tokenizer.pre_tokenizer = words
    size = tokenizer.get_vocab_size() + num_specials
    if size < config.bpe_size:
        log.warning(
            "the corpus yields a vocabulary of %d, not %d: every word is already one token", size, config.bpe_size
        )
    return tokenizer


def _noting_long_words(texts: Iterable[str], words: PreTokenizer) -> Iterator[str]:
    """Yield the texts; log the first of their words that is cut for learning. `words`: cuts a text into words."""
    is_said = False
    for text in texts:
        yield text
        runs = itertools.chain(text.split(), LONG_SPACE.findall(text)) if not is_said else ()
        long = (run for run in runs if 4 * len(run) > LONGEST_WORD)  # a character has 4 bytes at most
        if found := next((r for r in long if any(len(w) > LONGEST_WORD for w, _ in words.pre_tokenize_str(r))), ""):
            is_said = True
            log.info(
                "the BPE learns from pieces of %d bytes of longer words, such as the one in %.40r…: tokens are shorter",
                LONGEST_WORD,
                found,
            )


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _byte_level(vocab: dict[str, int]) -> Tokenizer:
    """Return a BPE over the 256 bytes, still without merges: it can encode every text, and decodes to the same text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _characters(texts: Iterable[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    tokenizer = Tokenizer(models.WordLevel({character: index for index, character in enumerate(sorted(alphabet))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _described(file: Path, config: TokenizerConfig, specials: Specials, encoding: TextEncoding) -> SavedTokenizer:
    tokenizer = load_tokenizer(str(file))
    library, why = choose_library(file, encoding.special_tokens)
    log.info("text is encoded by %s: %s", library, why)
    vocab_size = _vocab_size(tokenizer)
    origin = f"pretrained {Path(config.path).name}" if config.kind == "pretrained" else config.kind
    end_id = tokenizer.token_to_id(specials.end)
    mask_id = tokenizer.token_to_id(specials.mask) if specials.mask else None
    assert end_id is not None, f"{specials.end} is not in {file}"
    name = f"{origin}, {vocab_size:,} tokens"
    return SavedTokenizer(file, name, sha256_file(file), vocab_size, end_id, mask_id, library, encoding)


def _vocab_size(tokenizer: Tokenizer) -> int:
    """Return the rows that an embedding needs: the highest ID + 1, more than the number of tokens if IDs have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
