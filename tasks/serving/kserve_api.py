"""KServe's Open Inference Protocol, version 2, over HTTP, which Triton and MLServer serve too.

A request has a BYTES tensor `prompt` [n] and sampling parameters; the reply has a BYTES tensor `text` [n]. The client
chooses whether tensors are JSON or follow the JSON as bytes (the protocol's binary tensor data extension):
github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.serving.alias_follower import AliasFollower
from tasks.serving.completions import Completion, TextService, unless_disconnected
from tasks.serving.middleware import Refused

HEADER = "inference-header-content-length"
MAX_PROMPTS = 128
OUTPUTS = {"text": "BYTES", "finish_reason": "BYTES", "tokens": "INT64"}


class SamplingParameters(BaseModel):
    """Our sampling parameters of a request; other parameters belong to the protocol and are ignored."""

    model_config = ConfigDict(extra="ignore")

    new_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.8, ge=0, le=10)
    top_k: int = Field(50, ge=0, le=1_000_000)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(1337, ge=0, lt=2**64)


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
        content, prompts, sampling = _read(await request.body(), request.headers.get(HEADER))
        with follower.current() as served:
            # Prompts of one request get consecutive seeds, so that equal prompts get different texts.
            wanted = [(prompt, sampling | {"seed": sampling["seed"] + i}) for i, prompt in enumerate(prompts)]
            completions = await unless_disconnected(request, text.write_all(served, wanted))
            head = {"model_name": served.name, "model_version": str(served.version)}
        return _reply(head | ({"id": content["id"]} if "id" in content else {}), content, completions)


def _read(body: bytes, header_length: str | None) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Return the request's JSON, its prompts and its sampling. Raises Refused with the reason."""
    try:
        length = int(header_length) if header_length else len(body)
        asked = json.loads(body[:length])
        [given] = asked["inputs"]
        name, kind, shape = given["name"], given["datatype"], given["shape"]
        size = given.get("parameters", {}).get("binary_data_size")
        data = given["data"] if size is None else _strings(body[length : length + int(size)])
        sampling = SamplingParameters.model_validate(asked.get("parameters", {})).model_dump()
        prompts = [str(prompt) for prompt in np.array(data, dtype=object).reshape(-1)]
    except ValidationError as error:
        lines = [f"parameters.{problem['loc'][0]}: {problem['msg']}" for problem in error.errors()]
        raise Refused(400, "; ".join(lines)) from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        why = f"{type(error).__name__}: {error}"
        raise Refused(400, f"the request must have one BYTES tensor named `prompt` ({why})") from None
    if (name, kind) != ("prompt", "BYTES") or int(np.prod(shape)) != len(prompts):
        raise Refused(
            400,
            f"{kind} tensor {name} {shape} has {len(prompts)} elements: send BYTES tensor `prompt` [n] with n elements",
        )
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise Refused(400, f"the request has {len(prompts)} prompts: send 1 to {MAX_PROMPTS}")
    if unknown := {output["name"] for output in asked.get("outputs", [])} - OUTPUTS.keys():
        raise Refused(
            400, f"this server has no output {', '.join(sorted(unknown))}: its outputs are {', '.join(OUTPUTS)}"
        )
    return asked, prompts, sampling


def _strings(data: bytes) -> list[str]:
    """Return the elements of a BYTES tensor; each is preceded by its length, 4 bytes, little-endian."""
    found, position = [], 0
    while position < len(data):
        (length,) = struct.unpack_from("<I", data, position)
        position += 4 + length
        if position > len(data):
            raise ValueError("the binary data ends within an element")
        found.append(data[position - length : position].decode())
    return found


def _reply(head: dict[str, Any], asked: dict[str, Any], written: list[Completion]) -> Response:
    """Build the requested outputs (all, if none is named), as JSON or as bytes after the JSON, as the client asked."""
    columns: dict[str, list[Any]] = {
        "text": [one.text for one in written],
        "finish_reason": [one.finish_reason for one in written],
        "tokens": [one.new_tokens for one in written],
    }
    all_binary = bool(asked.get("parameters", {}).get("binary_data_output", False))
    wanted = asked.get("outputs") or [{"name": name} for name in OUTPUTS]
    outputs, tail = [], b""
    for output in wanted:
        name = output["name"]
        described: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": [len(written)]}
        if output.get("parameters", {}).get("binary_data", all_binary):
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
