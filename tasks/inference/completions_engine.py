"""An engine in a process of its own, which is asked as vLLM is: token IDs go in and out, and become text here.

Requests follow https://docs.vllm.ai/en/v0.28.0/serving/online_serving/openai_compatible_server/ (the Completions API,
its sampling and extra parameters) and https://docs.vllm.ai/en/latest/features/structured_outputs/ (0.12 or newer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.inference.engine_process import EngineProcess, Reply
from tasks.inference.onnx_generator import Grammars, Sampling, TextStream, TokenLogprob, open_export, shortened

MODEL = "model"  # what the process calls the version that it serves; clients see the registered name
AS_ID = "token_id:"  # prefix of the tokens that vLLM writes with return_tokens_as_token_ids


class CompletionsEngine:
    """The part of an engine that is the same for vLLM and for our own program of transformers."""

    grammars: Grammars | None = None
    process: EngineProcess
    longest: int  # tokens of a request's prompt and new text together

    def __init__(self, folder: Path) -> None:
        self.context, self.end_ids, self.encoder = open_export(folder)
        self.tokenizer = self.encoder.tokenizer

    @property
    def ready(self) -> bool:
        return self.process.ready

    def wait_ready(self, timeout_s: float) -> bool:
        return self.process.wait_ready(timeout_s)

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> str:
        return self.stream(prompt, **sampling).read()

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> TextStream:
        """Start a text, like TextGenerator.stream; also raises EngineDied, in this call or during reading."""
        params = Sampling(**sampling)
        prompt_ids = self.encoder.encode(prompt) or [self.end_ids[0]]
        self.check(params, len(prompt_ids))
        new_ids = NewIds(self, prompt_ids, params)
        stream = TextStream(self.tokenizer, prompt_ids, new_ids, params)
        stream.logprobs = new_ids.logprobs
        return stream

    def check(self, params: Sampling, prompt_tokens: int) -> None:
        """Raise ValueError for requests that the process would not handle as our documentation says."""

    def request(self, ids: Sequence[int], params: Sampling, *, made: int) -> dict[str, Any]:
        """Return the body of a request to continue `ids`, after `made` new tokens of the same text."""
        return completion_request(ids, params, end_ids=self.end_ids, made=made)

    def close(self) -> None:
        self.process.close()


def completion_request(
    ids: Sequence[int], params: Sampling, *, end_ids: Sequence[int], made: int = 0
) -> dict[str, Any]:
    """Return the body of a request to continue `ids`. `made`: the number of new tokens that were generated before.

    Stop texts are not sent: they may span several tokens, and only this process decodes tokens to text.
    """
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": list(ids),
        "stream": True,
        "return_token_ids": True,
        "max_tokens": params.new_tokens - made,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,  # 0 means all tokens, in vLLM too
        "seed": (params.seed + made) % 2**63,
        "ignore_eos": not params.stop_at_end,
        "stop_token_ids": list(end_ids) if params.stop_at_end else [],
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.grammar:
        body["structured_outputs"] = dict(params.grammar)
    return body


class NewIds(Iterator[int]):
    """Iterates over the token IDs of one text as they arrive; `close` cancels the text, from any thread.

    The process ends a text when the context is full. Then another request continues from the last half of the context,
    as the other engines do.
    """

    def __init__(self, engine: CompletionsEngine, prompt_ids: list[int], params: Sampling) -> None:
        self.engine, self.params = engine, params
        self.logprobs: list[TokenLogprob] = []
        self._closed, self._made = False, 0
        self._seen = prompt_ids[-(engine.longest - 1) :]  # leaves room for one new token
        self._reply = self._open() if params.new_tokens else None
        self._tokens = self._follow()

    def __next__(self) -> int:
        return next(self._tokens)

    def close(self) -> None:
        self._closed = True
        if self._reply:
            self._reply.cancel()

    def __del__(self) -> None:  # cancels a text that nobody read to its end
        if getattr(self, "_reply", None):
            self.close()

    def _open(self) -> Reply:
        body = self.engine.request(self._seen, self.params, made=self._made)
        body["max_tokens"] = min(body["max_tokens"], self.engine.longest - len(self._seen))
        reply = self.engine.process.open(body)
        if self.params.grammar:
            reply.wait_accepted()
        return reply

    def _follow(self) -> Iterator[int]:
        while self._reply and not self._closed:
            reason = None
            while (event := self._reply.next_event()) is not None:
                choice: Any = next(iter(event["choices"]), None)  # type: ignore[call-overload]
                if choice is None:  # an event with the usage only
                    continue
                reason = choice.get("finish_reason") or reason
                ids = choice.get("token_ids") or []
                if self.params.logprobs is not None:
                    self.logprobs += read_logprobs(choice, ids, top=self.params.logprobs)
                for token in ids:
                    if token in self.engine.end_ids and self.params.stop_at_end:
                        return
                    self._made += 1
                    self._seen.append(token)
                    yield token
            if reason != "length" or self._made >= self.params.new_tokens or self._closed:
                return
            self._seen = shortened(self._seen, self.engine.context)
            self._reply = self._open()


def read_logprobs(choice: Any, ids: Sequence[int], *, top: int) -> list[TokenLogprob]:
    """Return the log-probabilities in a choice, without tokens beyond the `top` likeliest, which vLLM may add."""
    found = choice["logprobs"]
    scored = []
    for token, logprob, likeliest in zip(ids, found["token_logprobs"], found["top_logprobs"], strict=True):
        of_ids = {int(name.removeprefix(AS_ID)): value for name, value in (likeliest or {}).items()}
        ordered = sorted(of_ids.items(), key=lambda each: -each[1])[:top]
        scored.append(TokenLogprob(token, logprob, tuple(ordered)))
    return scored
