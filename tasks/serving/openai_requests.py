"""Bodies of OpenAI's completions and chat completions: the fields that work, and the reasons to refuse others.

Fields follow OpenAI's API reference (platform.openai.com/docs/api-reference). A field that the server cannot serve is
refused, never ignored; only labels, which no model sees, have no effect. docs/serving.md has the table.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import ConfigDict, Field, StrictInt, ValidationError, WrapValidator, model_validator

from tasks.serving.bounds import MAX_FIELDS, MAX_IDS, AtMost, RequestBody
from tasks.serving.completions import Prompt
from tasks.serving.middleware import Refused

MAX_CHOICES = 128  # per request, over all its prompts
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_TEXT_PARTS = 1000  # of a message
MAX_BIASES = 10_000
MAX_STOPS = 4
LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # for bills and statistics
NO_TOOLS = "the server calls no tools: describe them in a message, and constrain the reply by response_format"
TOOL_FIELDS = {"tool_calls", "tool_call_id", "function_call"}
# Fields of replies that clients send back with a message, and that no model sees: OpenAI's, litellm's, vLLM's.
ABOUT_REPLIES = {"annotations", "provider_specific_fields", "reasoning_content", "reasoning", "thinking_blocks"}
ONLY_TEXT = "the models read and write text only"
NOTHING_KEPT = "the server keeps neither replies nor prompts"
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Name = Annotated[str, Field(max_length=1000)]
Ids = Annotated[list[StrictInt], AtMost(MAX_IDS)]
Schema = Annotated[dict[str, Any], AtMost(MAX_FIELDS)]


def _or(cure: str) -> WrapValidator:
    """Let one sentence replace pydantic's errors for each type of a union."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(cure) from None

    return WrapValidator(check)


class StreamOptions(RequestBody):
    include_usage: bool | None = False
    include_obfuscation: bool | None = None  # accepted: no padding hides the length of pieces from who sees the wire


class JsonSchema(RequestBody):
    name: str = ""
    description: str = ""
    json_schema: Schema = Field(alias="schema")
    strict: bool | None = None  # the text follows the schema either way


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestBody):
    """vLLM's field of this name, with a JSON schema or a regular expression."""

    json_schema: Schema | None = Field(None, alias="json")
    regex: str | None = None


class SamplingBody(RequestBody):
    """The fields that requests for completions and for chats share."""

    model_config = ConfigDict(extra="allow")  # `check` refuses other fields, with the reason

    refused: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {}  # field -> reason, and values that ask for nothing

    model: Name
    temperature: float | None = Field(1.0, ge=0, le=10)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=0, le=1_000_000, description="Not a field of OpenAI's; other servers have it too.")
    n: int | None = Field(1, ge=1)
    stop: Annotated[
        str | Annotated[list[str], AtMost(MAX_STOPS)] | None,
        _or(f"send a text, or a list of at most {MAX_STOPS} texts"),
    ] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = 0
    frequency_penalty: Penalty | None = 0
    logit_bias: Annotated[dict[int, Bias], AtMost(MAX_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Return how many of the likeliest tokens are listed with each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def shows_logprobs(self) -> bool:
        return self.top_logprobs_wanted is not None

    @property
    def num_candidates(self) -> int:
        """Return the number of texts that are generated for each prompt, of which n are returned."""
        return self.n or 1

    @property
    def wants_usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, new_tokens: int) -> list[dict[str, Any]]:
        """Return the engine's arguments for each text of a prompt; the texts get consecutive seeds."""
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**64
        wanted = {
            "new_tokens": new_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p or 1.0,
            "top_k": self.top_k or 0,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": self.logit_bias or {},
            "logprobs": self.top_logprobs_wanted,
            "grammar": self.grammar(),
        }
        return [wanted | {"seed": seed + number} for number in range(self.num_candidates)]

    def grammar(self) -> dict[str, Any]:
        """Return the schema or expression that the text must follow, as engines take it; {} allows any text.

        Raises Refused for a request with several of them, or of type json_schema without a schema.
        """
        asked: list[dict[str, Any]] = []
        if self.response_format and self.response_format.type == "json_object":
            asked.append({"json": {"type": "object"}})
        elif self.response_format and self.response_format.type == "json_schema":
            if not self.response_format.json_schema:
                raise Refused(400, "response_format has type json_schema but no json_schema: send the schema")
            asked.append({"json": self.response_format.json_schema.json_schema})
        given = self.structured_outputs or StructuredOutputs()
        asked += [{"json": given.json_schema}] if given.json_schema is not None else []
        asked += [{"regex": given.regex}] if given.regex is not None else []
        if len(asked) > 1:
            raise Refused(400, f"the request constrains the text in {len(asked)} ways: send one schema or one regex")
        return asked[0] if asked else {}

    def check(self, *, num_prompts: int) -> None:
        """Raise Refused for a request that this server cannot serve as asked."""
        for name, value in (self.model_extra or {}).items():
            if name in LABELS:
                continue
            if name not in self.refused:
                raise Refused(400, f"{name} is not a field of this request: leave it out")
            why, harmless = self.refused[name]
            if value not in (None, *harmless):
                raise Refused(400, f"{name} is not supported: {why}")
        if self.stream_options and not self.stream:
            raise Refused(400, "stream_options belong to streams: set stream, or leave them out")
        if not 1 <= (count := num_prompts * self.num_candidates) <= MAX_CHOICES:
            raise Refused(400, f"n, best_of and prompt ask for {count} texts: ask for 1 to {MAX_CHOICES}")


class CompletionRequest(SamplingBody):
    refused: ClassVar = {"suffix": ("the models continue texts, they do not fill gaps in them", ("",))}

    prompt: Annotated[
        str | Ids | Annotated[list[str], AtMost(MAX_CHOICES)] | Annotated[list[Ids], AtMost(MAX_CHOICES)],
        _or(f"send a text, the IDs of its tokens, or a list of 1 to {MAX_CHOICES} of either"),
    ] = ""  # a document begins
    max_tokens: int | None = Field(
        16, ge=0, description="0: generate nothing, only echo the prompt with its log-probabilities."
    )
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def prompts(self) -> Sequence[Prompt]:
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast(Sequence[Prompt], [self.prompt] if is_one else self.prompt)

    @property
    def num_candidates(self) -> int:
        return max(self.best_of or 1, self.n or 1)

    @property
    def shows_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Return `logprobs`, or 0 where best_of needs log-probabilities to find the best texts."""
        return 0 if self.logprobs is None and self.num_candidates > (self.n or 1) else self.logprobs

    def check(self, *, num_prompts: int) -> None:
        super().check(num_prompts=num_prompts)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise Refused(
                400, f"best_of = {self.best_of} is below n = {self.n}: best_of counts the texts of which n are returned"
            )
        if self.stream and self.num_candidates > (self.n or 1):
            why = "the best text is known only at the end"
            raise Refused(400, f"best_of cannot be streamed, because {why}: leave out best_of or stream")
        if self.stream and self.echo and self.logprobs is not None:
            raise Refused(400, "echo with logprobs cannot be streamed: set stream to false")


class TextPart(RequestBody):
    type: Literal["text"]
    text: str


class Message(RequestBody):
    """A message of a chat. A reply of the server, or of another one, may be sent back as it came."""

    model_config = ConfigDict(extra="allow")

    role: Name
    content: Annotated[
        str | Annotated[list[TextPart], AtMost(MAX_TEXT_PARTS)] | None,
        _or(f'send a text, or at most {MAX_TEXT_PARTS} parts {{"type": "text", "text": …}}: {ONLY_TEXT}'),
    ] = None
    name: Name | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Message:
        for name, value in (self.model_extra or {}).items():
            if value and name not in ABOUT_REPLIES:
                why = NO_TOOLS if name in TOOL_FIELDS else ONLY_TEXT if name == "audio" else "leave it out"
                raise ValueError(f"{name} is not a field of a message here: {why}")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"the content of a message of role {self.role!r} is missing: send a text")
        return self

    def for_template(self) -> dict[str, str]:
        content = self.content if self.content is not None else self.refusal or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


Messages = Annotated[list[Message], AtMost(MAX_MESSAGES), Field(min_length=1)]


class ChatRequest(SamplingBody):
    refused: ClassVar = {
        **dict.fromkeys(("tools", "functions"), (NO_TOOLS, ([],))),
        **dict.fromkeys(("tool_choice", "function_call"), (NO_TOOLS, ("none",))),
        "parallel_tool_calls": (NO_TOOLS, (False,)),
        "web_search_options": (NO_TOOLS, ()),
        "audio": (ONLY_TEXT, ()),
        "modalities": (ONLY_TEXT, (["text"],)),
        "moderation": ("the server has no moderation model", ()),
        "prediction": ("the engines do not decode speculatively", ()),
        "reasoning_effort": ("the models do not reason before they reply", ("none",)),
        "verbosity": ("the models know no such setting: limit max_completion_tokens", ()),
        "service_tier": ("the server has one tier", ("auto", "default")),
        "store": (NOTHING_KEPT, (False,)),
        **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention"), (NOTHING_KEPT, ())),
    }

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="The older name of max_completion_tokens.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, *, num_prompts: int) -> None:
        super().check(num_prompts=num_prompts)
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: set it to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Refused(400, "max_tokens and max_completion_tokens differ: send one of them")
