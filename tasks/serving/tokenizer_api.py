"""The model's tokenizer over HTTP, as vLLM serves it: lm-eval's `local-completions` and other clients use it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import model_validator

from tasks.inference.engine import Engine
from tasks.serving.alias_follower import AliasFollower
from tasks.serving.bounds import MAX_IDS, AtMost, RequestBody
from tasks.serving.completions import TextService, unless_disconnected
from tasks.serving.middleware import Refused
from tasks.serving.openai_api import chat_prompt
from tasks.serving.openai_requests import Messages, Name
from training.tokenizer.text_encoder import check_tokens


class _Body(RequestBody):
    model: Name | None = None  # ignored, because a server has one model


class TokenizeRequest(_Body):
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True  # false: without the tokens that begin a document, if the model has such
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    tokens: Annotated[list[int], AtMost(MAX_IDS)]


def add_tokenizer(app: FastAPI, follower: AliasFollower, text: TextService) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
        return await unless_disconnected(request, text.prepare(partial(tokenized, body)))

    def tokenized(body: TokenizeRequest) -> dict[str, Any]:
        with follower.current() as served:
            if body.messages:
                ids = chat_prompt(served, body.messages, text)
            else:
                text.check_prompt(prompt := body.prompt or "")
                named = {} if body.add_special_tokens else _begin_and_end(served.engine)
                ids = named.get(prompt) or served.engine.encoder.encode(prompt, begins=body.add_special_tokens)
            names = [served.engine.tokenizer.id_to_token(token) for token in ids] if body.return_token_strs else None
            return {"tokens": ids, "count": len(ids), "max_model_len": served.engine.context, "token_strs": names}

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        text.check_prompt(body.tokens)
        with follower.current() as served:
            try:
                check_tokens(served.engine.tokenizer, body.tokens)
            except ValueError as error:
                raise Refused(400, str(error)) from None
            return {"prompt": served.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @app.get("/tokenizer_info")
    def tokenizer_info() -> dict[str, Any]:
        """Return special tokens and chat template. A document starts with the token that begins documents, or after the
        one that ends the document before.
        """
        with follower.current() as served:
            names = [*_begin_and_end(served.engine)]
            begin, end = names[0], names[-1]
            try:
                template = served.chat_template.source
            except LookupError:
                template = None
            return {"eos_token": end, "bos_token": begin, "chat_template": template}


def _begin_and_end(engine: Engine) -> dict[str, list[int]]:
    """Return the token after which a document's text begins, and the one that ends it: their IDs by name.

    lm-evaluation-harness asks for these IDs by sending the names that /tokenizer_info gives as prompts of /tokenize.
    """
    ids = [engine.encoder.bos_ids[-1] if engine.encoder.bos_ids else engine.end_ids[0], engine.end_ids[0]]
    return {str(engine.tokenizer.id_to_token(token)): [token] for token in ids}
