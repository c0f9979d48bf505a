"""Replies in OpenAI's form: completions and chat completions, whole or in parts, with log-probabilities."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from tasks.inference.onnx_generator import INCOMPLETE, Detokenizer, TokenLogprob
from tasks.serving.alias_follower import ServedVersion

Placed = tuple[int, TokenLogprob]  # the character at which a token's text begins, and the token


class TokenOffsets:
    """Tells, as tokens arrive, at which character of the text after `before` each of them begins."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self.count = 0
        self._text, self._end = Detokenizer(tokenizer, before), 0
        self._waiting: deque[Placed] = deque()

    def add(self, scored: Iterable[TokenLogprob]) -> None:
        for one in scored:
            self._waiting.append((self._end, one))
            self._end += len(self._text.push(one.token))
            self.count += 1

    def take(self, until: int | None = None) -> list[Placed]:
        """Return the tokens not yet taken that begin before the character `until`, or all."""
        taken = []
        while self._waiting and (until is None or self._waiting[0][0] < until):
            taken.append(self._waiting.popleft())
        return taken


class CompletionReply:
    """Replies to /v1/completions."""

    kind, id_prefix, part_kind = "text_completion", "cmpl", "text_completion"

    def __init__(self, served: ServedVersion) -> None:
        self.texts, self.id = served.token_texts, f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.head = {
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": f"version-{served.version}",
        }

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, **self.head, "choices": choices, **more}

    def part(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.whole(choices, **more), "object": self.part_kind}

    def beginning(self, index: int) -> list[dict[str, Any]]:
        """Return the choices that a stream sends before the first piece of a text."""
        return []

    def choice(self, index: int, text: str, reason: str | None, tokens: Sequence[Placed] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    piece = choice

    def _logprobs(self, tokens: Sequence[Placed] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "tokens": [self.texts[one.token] for _, one in tokens],
            "token_logprobs": [one.logprob for _, one in tokens],
            "top_logprobs": [None if one.logprob is None else self._likeliest(one) for _, one in tokens],
            "text_offset": [offset for offset, _ in tokens],
        }

    def _likeliest(self, one: TokenLogprob) -> dict[str, float]:
        """Return log-probabilities by text, with the token's own, as OpenAI does; for equal texts the highest one."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob or 0.0)):
            found.setdefault(self.texts[token], logprob)
        return found


class ChatReply(CompletionReply):
    """Replies to /v1/chat/completions."""

    kind, id_prefix, part_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def beginning(self, index: int) -> list[dict[str, Any]]:
        return [self._choice(index, None, None, "delta", {"role": "assistant", "content": ""})]

    def choice(self, index: int, text: str, reason: str | None, tokens: Sequence[Placed] | None) -> dict[str, Any]:
        return self._choice(index, reason, tokens, "message", {"role": "assistant", "content": text, "refusal": None})

    def piece(self, index: int, text: str, reason: str | None, tokens: Sequence[Placed] | None) -> dict[str, Any]:
        return self._choice(index, reason, tokens, "delta", {"content": text} if text else {})

    def _choice(
        self, index: int, reason: str | None, tokens: Sequence[Placed] | None, name: str, content: dict[str, Any]
    ) -> dict[str, Any]:
        return {"index": index, name: content, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[Placed] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*each) for each in one.top]}
            for _, one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.texts[token]
        return {"token": text, "logprob": logprob, "bytes": None if INCOMPLETE in text else list(text.encode())}


def usage(prompt_tokens: Sequence[int], new_tokens: Sequence[int], *, per_prompt: int) -> dict[str, int]:
    """Return the numbers of tokens; a prompt counts once, however many texts continue it."""
    prompt, new = sum(prompt_tokens[::per_prompt]), sum(new_tokens)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
