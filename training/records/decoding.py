"""The plan of the ranks that generate text, and the messages between them and their owner.

tasks/inference/torch_ranks.py writes the plan and the requests; training/generate.py reads them and answers.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from training.records.record import Record

ROWS = 16  # largest number of sequences in a batch
CHANNEL = "channel"  # the Unix socket beside the plan: each leading rank connects to it, and ends when it is closed


class DecodePlan(Record):
    """decode.json: the model, and how the ranks share it.

    `rows`: sequences in one batch; a pipeline has one batch a stage. `context`: tokens that the model may see.
    """

    folder: str
    parallel: Literal["none", "data", "tensor", "pipeline"]
    degree: int
    device_kind: Literal["cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    context: int
    rows: int = ROWS
    threads_per_rank: int

    @property
    def leaders(self) -> int:
        """Return the ranks that have their own channel."""
        return self.degree if self.parallel == "data" else 1


class DecodeRequest(Record):
    """A request for the text after `ids`; `stop_ids`: the tokens that end it."""

    kind: Literal["request"] = "request"
    number: int
    ids: tuple[int, ...]
    new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_ids: tuple[int, ...]


class CancelRequest(Record):
    kind: Literal["cancel"] = "cancel"
    number: int


class RanksReady(Record):
    """The first message of a leading rank: the model is loaded."""

    kind: Literal["ready"] = "ready"
    rank: int
    device: str
    precision: str
    why: str


class RequestRefused(Record):
    kind: Literal["refused"] = "refused"
    number: int
    why: str


class NewTokens(Record):
    """The result of one step: (request, token) pairs, and the requests that it ended."""

    kind: Literal["tokens"] = "tokens"
    tokens: tuple[tuple[int, int], ...] = ()
    ended: tuple[int, ...] = ()


ToRanks = DecodeRequest | CancelRequest
FromRanks = RanksReady | RequestRefused | NewTokens
_TO_RANKS: TypeAdapter[ToRanks] = TypeAdapter(Annotated[ToRanks, Field(discriminator="kind")])
_FROM_RANKS: TypeAdapter[FromRanks] = TypeAdapter(Annotated[FromRanks, Field(discriminator="kind")])


def to_line(message: ToRanks | FromRanks) -> bytes:
    return message.model_dump_json().encode() + b"\n"


def read_to_ranks(line: bytes) -> ToRanks:
    return _TO_RANKS.validate_json(line)


def read_from_ranks(line: bytes) -> FromRanks:
    return _FROM_RANKS.validate_json(line)
