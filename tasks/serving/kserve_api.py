"""KServe's Open Inference Protocol, version 2, over HTTP, which Triton and MLServer serve too.

A request has a BYTES tensor `prompt` [n] and sampling parameters; the reply has a BYTES tensor `text` [n]. The client
chooses whether tensors are JSON or follow the JSON as bytes (the protocol's binary tensor data extension):
github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import ConfigDict, Field, ValidationError, model_validator

from tasks.serving.alias_follower import AliasFollower
from tasks.serving.bounds import AtMost, RequestBody
from tasks.serving.completions import Completion, TextService, unless_disconnected
from tasks.serving.middleware import Refused

HEADER = "inference-header-content-length"
MAX_PROMPTS = 128
Strings = Annotated[list[str], AtMost(MAX_PROMPTS)]
Rows = Annotated[list[Strings], AtMost(MAX_PROMPTS)]
OUTPUTS = {"text": "BYTES", "finish_reason": "BYTES", "tokens": "INT64"}


class _Body(RequestBody):
    model_config = ConfigDict(extra="ignore", strict=True)  # other fields belong to the protocol and its extensions


class RequestParameters(_Body):
    """Our sampling parameters, and whether outputs that do not say otherwise are bytes."""

    new_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.8, ge=0, le=10)
    top_k: int = Field(50, ge=0, le=1_000_000)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(1337, ge=0, lt=2**64)
    binary_data_output: bool = False


class InputParameters(_Body):
    binary_data_size: int | None = Field(None, ge=0)


class InputTensor(_Body):
    """The prompts, in JSON or as bytes after it."""

    name: Literal["prompt"]
    datatype: Literal["BYTES"]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], AtMost(2), Field(min_length=1)]
    parameters: InputParameters = InputParameters()
    data: Strings | Rows | None = None  # row by row, if the tensor has two axes

    @model_validator(mode="after")
    def _once(self) -> InputTensor:
        if (self.data is None) == (self.parameters.binary_data_size is None):
            raise ValueError("send either data or the parameter binary_data_size with the bytes after the JSON")
        return self

    def prompts(self, after_json: bytes) -> list[str]:
        """Return the elements. Raises ValueError if there are not as many as the shape says."""
        if self.data is None:
            found = _strings(after_json, size=self.parameters.binary_data_size or 0)
        else:
            rows = [[row] if isinstance(row, str) else row for row in self.data]
            found = [prompt for row in rows for prompt in row]
        if math.prod(self.shape) != len(found) or not 1 <= len(found) <= MAX_PROMPTS:
            raise ValueError(f"shape {self.shape} has {len(found)} elements: send [n] with n, 1 to {MAX_PROMPTS}")
        return found


class OutputParameters(_Body):
    binary_data: bool | None = None


class RequestedOutput(_Body):
    name: Literal["text", "finish_reason", "tokens"]
    parameters: OutputParameters = OutputParameters()


class InferRequest(_Body):
    """The JSON of a request."""

    id: str | None = None
    inputs: Annotated[list[InputTensor], AtMost(1), Field(min_length=1)]
    outputs: Annotated[list[RequestedOutput], AtMost(len(OUTPUTS)), Field(default_factory=list)]
    parameters: RequestParameters = RequestParameters()

    @property
    def sampling(self) -> dict[str, Any]:
        return self.parameters.model_dump(exclude={"binary_data_output"})


def add_kserve(app: FastAPI, follower: AliasFollower, text: TextService) -> None:
    @app.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "shardline", "version": "2", "extensions": ["binary_tensor_data"]}

    def check(name: str, version: str | None) -> None:
        served = follower.served
        if name != served.name or version not in (None, str(served.version)):
            wanted = f"{name} version {version}" if version else name
            raise Refused(404, f"this server has no {wanted}: it serves {served.name} version {served.version}")

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def metadata(name: str, version: str | None = None) -> dict[str, Any]:
        check(name, version)
        inputs = [{"name": "prompt", "datatype": "BYTES", "shape": [-1]}]
        outputs = [{"name": output, "datatype": kind, "shape": [-1]} for output, kind in OUTPUTS.items()]
        versions = [str(follower.served.version)]
        return {"name": name, "versions": versions, "platform": "shardline", "inputs": inputs, "outputs": outputs}

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def ready(name: str, version: str | None = None) -> Response:
        check(name, version)
        return Response(status_code=200 if follower.served.engine.ready else 503)

    @app.post("/v2/models/{name}/infer")
    @app.post("/v2/models/{name}/versions/{version}/infer")
    async def infer(request: Request, name: str, version: str | None = None) -> Response:
        check(name, version)
        asked, prompts = _read(await request.body(), request.headers.get(HEADER))
        with follower.current() as served:
            # Prompts of one request get consecutive seeds, so that equal prompts get different texts.
            sampling, seed = asked.sampling, asked.parameters.seed
            wanted = [(prompt, sampling | {"seed": (seed + i) % 2**64}) for i, prompt in enumerate(prompts)]
            completions = await unless_disconnected(request, text.write_all(served, wanted))
            head = {"model_name": served.name, "model_version": str(served.version)}
        return _reply(head | ({"id": asked.id} if asked.id is not None else {}), asked, completions)


def _read(body: bytes, header_length: str | None) -> tuple[InferRequest, list[str]]:
    """Return the request's JSON and its prompts. Raises Refused with the reason."""
    given = header_length or str(len(body))
    length = int(given) if given.isascii() and given.isdecimal() else -1
    if not 0 <= length <= len(body):
        raise Refused(400, f"{HEADER} is {given}, and the body has {len(body)} bytes: send the length of its JSON")
    try:
        asked = InferRequest.model_validate_json(body[:length])
        return asked, asked.inputs[0].prompts(body[length:])
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()]
        why = "; ".join(lines[:5])
    except ValueError as error:
        why = f"inputs.0: {error}"
    raise Refused(400, f"the request must have one BYTES tensor named `prompt` ({why})")


def _strings(data: bytes, *, size: int) -> list[str]:
    """Return the elements of a BYTES tensor; each is preceded by its length, 4 bytes, little-endian."""
    found, position = list[str](), 0
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes follow the JSON, and binary_data_size is {size}")
    while position < size and len(found) <= MAX_PROMPTS:
        if position + 4 > size:
            raise ValueError("the binary data ends within an element's length")
        (length,) = struct.unpack_from("<I", data, position)
        position += 4 + length
        if position > size:
            raise ValueError("the binary data ends within an element")
        found.append(data[position - length : position].decode())
    return found


def _reply(head: dict[str, Any], asked: InferRequest, written: list[Completion]) -> Response:
    """Build the requested outputs (all, if none is named), as JSON or as bytes after the JSON, as the client asked."""
    columns: dict[str, list[Any]] = {
        "text": [one.text for one in written],
        "finish_reason": [one.finish_reason for one in written],
        "tokens": [one.new_tokens for one in written],
    }
    wanted: dict[str, bool | None] = {one.name: one.parameters.binary_data for one in asked.outputs}
    outputs, tail = [], b""
    for name, binary in (wanted or dict.fromkeys(OUTPUTS)).items():
        described: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": [len(written)]}
        if asked.parameters.binary_data_output if binary is None else binary:
            data = _binary(columns[name])
            described["parameters"], tail = {"binary_data_size": len(data)}, tail + data
        else:
            described["data"] = columns[name]
        outputs.append(described)
    content = json.dumps({**head, "outputs": outputs}).encode()
    if not tail:
        return Response(content, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(len(content))}
    return Response(content + tail, media_type="application/octet-stream", headers=headers)


def _binary(values: list[Any]) -> bytes:
    if isinstance(values[0], int):
        return np.array(values, dtype="<i8").tobytes()
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)
