"""The prompts of samples that no config names: the first words of held-out documents."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.config.run import RunConfig
from training.records.text_encoding import NOTHING_SPECIAL
from training.shards.stream import TokenStream
from training.tokenizer.text_encoder import TextEncoder

OF_STDLIB = ("def ", "import ", "class ")
DOCUMENTS = 3  # that give a prompt each
WORDS = 4
CHARACTERS = 32  # at most, of a prompt: not every script has spaces
FIRST_TOKENS = 64  # of a document, in which its first words are looked for
SEARCHED_TOKENS = 2**16  # of each source, in which documents begin


def sample_prompts(config: RunConfig, shards_dir: Path) -> tuple[str, ...]:
    """Return `evaluation.prompts`; for `auto`, words of Python for the standard library, otherwise of held-out text."""
    if config.evaluation.prompts != "auto":
        return config.evaluation.prompts
    encoder = TextEncoder(shards_dir / "tokenizer", NOTHING_SPECIAL.model_dump())
    kept = []
    for prompt in OF_STDLIB if config.data.path == "stdlib" else _first_words(shards_dir, encoder.tokenizer):
        with contextlib.suppress(ValueError):  # a character that is not in the vocabulary
            encoder.encode(prompt)
            kept.append(prompt)
    return tuple(kept) or ("",)


def _first_words(shards_dir: Path, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the first words of a few documents of the validation split; of a mixture, of its first sources."""
    stream = TokenStream(shards_dir, "validation")
    parts = [(start, stop) for start, stop in stream.parts if start < stop]
    starts_mid_word = stream.manifest.split_rule.startswith("tail")
    prompts = []
    for start, stop in parts[:DOCUMENTS]:
        upto = min(stop, start + SEARCHED_TOKENS)
        begins = start + np.flatnonzero(np.diff(stream.document_ids(start, upto), prepend=-1))
        chosen = np.linspace(0, len(begins), max(1, DOCUMENTS // len(parts)), endpoint=False).astype(int)
        for begin in dict.fromkeys(begins[chosen].tolist()):
            end, tokens = stream.manifest.end_id, stream.read(begin, min(stop, begin + FIRST_TOKENS)).tolist()
            tokens = tokens[tokens[:1] == [end] :]  # some documents begin with the token that ends others
            if end in tokens:
                tokens = tokens[: tokens.index(end)]
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            prompts.append(_words(text, starts_mid_word=starts_mid_word and begin == start))
    return tuple(dict.fromkeys(filter(None, prompts)))


def _words(text: str, *, starts_mid_word: bool) -> str:
    """Return the first words of the text's first line."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "").replace("\ufffd", "")
    words = line.split()
    words = words[1:] if starts_mid_word and len(words) > WORDS else words
    kept = words[:1]
    for word in words[1:WORDS]:
        if len(" ".join([*kept, word])) > CHARACTERS:
            break
        kept.append(word)
    return " ".join(kept)[:CHARACTERS]
