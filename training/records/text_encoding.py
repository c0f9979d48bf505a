"""The rule by which text became a model's tokens, for every later use of the model."""

from __future__ import annotations

from typing import Literal

from training.records.record import Record
from training.records.words import counted

SpecialTokensInText = Literal["none", "template", "all"]


class TextEncoding(Record):
    """A rule for special tokens in text and for how documents begin."""

    rule: SpecialTokensInText = "none"
    """Value of data.tokenizer.special_tokens_in_text: which special tokens a text may hold as such."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that the rule takes for special where a text holds them; all others are text."""
    bos: tuple[str, ...] = ()
    """Tokens that stand before each document and prompt; empty for none."""

    @property
    def settings(self) -> dict[str, str]:
        """Return the fields of data.tokenizer that give the same rule with the same tokenizer."""
        return {"special_tokens_in_text": self.rule, "bos": "yes" if self.bos else "no"}

    @property
    def in_words(self) -> str:
        """`special in text: <|im_start|>, <|im_end|> (template); before each document: <s>`."""
        special = ", ".join(self.special_tokens[:8]) + (" …" if len(self.special_tokens) > 8 else "")
        before = f"; before each document: {' '.join(self.bos)}" if self.bos else ""
        return f"special in text: {special or 'nothing'} ({self.rule}){before}"

    def on_special(self, *, as_tokens: int, as_text: int, holder: str = "holds") -> list[str]:
        """Return a sentence about so many special tokens that a text holds, if it does."""
        if not (found := as_tokens + as_text):
            return []
        return [
            f"{holder} {counted(found, 'string')} that are special tokens of the tokenizer: {as_tokens:,} became "
            f"special tokens, {as_text:,} are text like any other ({self.in_words}); "
            "data.tokenizer.special_tokens_in_text=none|template|all chooses"
        ]


NOTHING_SPECIAL = TextEncoding()
