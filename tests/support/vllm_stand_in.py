"""`vllm serve` for tests: a process with the part of vLLM's command line and HTTP API that Shardline uses.

It follows the pages that vllm_engine.py and completions_engine.py name, and refuses every option and field that it does
not know. Its model is the export's own, by ONNX Runtime, so that its text can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tasks.inference.onnx_generator import Sampling, TextGenerator, TokenChooser, TokenLogprob
from tests.support.repository import REPO

LOG = "VLLM_STAND_IN_LOG"  # a file: the command and environment, then each request, as JSON lines
FAILS = "VLLM_STAND_IN_FAILS"  # ends with this error instead of starting
SAMPLING = {"temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "logprobs"}
FIELDS = SAMPLING | {
    *("model", "prompt", "stream", "max_tokens", "echo", "return_token_ids", "return_tokens_as_token_ids"),
    *("ignore_eos", "stop_token_ids", "logit_bias", "structured_outputs"),
}


def install(folder: Path) -> Path:
    """Makes the program `vllm`; returns the folder for PATH."""
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    path = f"import sys\nsys.path.insert(0, {str(REPO)!r})\n"
    program.write_text(f"#!{sys.executable} -P\n{path}from tests.support.vllm_stand_in import main\nmain()\n")
    program.chmod(0o755)
    return program.parent


def note(content: dict[str, Any]) -> None:
    with Path(os.environ[LOG]).open("a") as log:
        log.write(json.dumps(content) + "\n")


def noted(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def requests(log: Path) -> list[dict[str, Any]]:
    """Return the bodies of all requests, in order."""
    return [each["body"] for each in noted(log) if "body" in each]


class Server(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True
    request_queue_size = 100

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = TextGenerator(options.model, threads=1)
        super().__init__(options.uds, Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)  # type: ignore[arg-type]
        self.server_name, self.server_port = "vllm", 0


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Says nothing, as with --disable-uvicorn-access-log."""

    def address_string(self) -> str:
        return "a Unix socket"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note({"path": self.path, "body": body})
        if unknown := body.keys() - FIELDS:
            return self.refuse(f"unknown fields {sorted(unknown)}")
        if body["model"] != self.server.options.served_model_name:
            return self.refuse(f"The model `{body['model']}` does not exist.")
        limit, needed = self.server.options.max_model_len, len(body["prompt"]) + max(1, body["max_tokens"])
        if needed > limit:
            return self.refuse(f"This model's maximum context length is {limit} tokens, not {needed}")
        if not body["prompt"]:
            return self.refuse("Either prompt or prompt_embeds must be provided and non-empty.")
        if body["temperature"] > 2:
            return self.refuse(f"temperature must be at most 2, got {body['temperature']}.")
        try:
            texts = self.echoed(body) if body.get("echo") else self.made(body)
        except ValueError as error:
            if "structured_outputs" in body:  # vLLM compiles a grammar after it has sent the status
                return self.send_refusal(str(error))
            return self.refuse(str(error))
        if body["stream"]:
            self.send_events(texts)
        else:
            [choice] = texts
            self.answer(200, {"choices": [choice]})

    def echoed(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert body["max_tokens"] == 0
        scores = self.server.model.score(body["prompt"], top=body["logprobs"])
        yield {"index": 0, "text": "", "logprobs": as_logprobs(scores), "finish_reason": "length"}

    def made(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        asked = {name: body[name] for name in SAMPLING & body.keys()}
        bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
        chooser = self.server.model.chooser(
            Sampling(
                **asked,
                new_tokens=body["max_tokens"],
                stop_at_end=False,
                logit_bias=bias,
                grammar=body.get("structured_outputs", {}),
            )
        )
        return self.pieces(body, chooser)

    def pieces(self, body: dict[str, Any], chooser: TokenChooser) -> Iterator[dict[str, Any]]:
        """One token each, like vLLM's: the one that stops a text is among them."""
        left, ends = body["max_tokens"], {*body["stop_token_ids"]}
        if not body["ignore_eos"]:
            ends.add(self.server.model.end_ids[0])
        for token in self.server.model._new_ids(list(body["prompt"]), chooser):
            left -= 1
            reason = "stop" if token in ends else None if left else "length"
            scored = as_logprobs(chooser.logprobs[-1:]) if body.get("logprobs") is not None else None
            yield {"index": 0, "text": "", "token_ids": [token], "logprobs": scored, "finish_reason": reason}
            if reason:
                return

    def send_refusal(self, message: str) -> None:
        self.begin_events()
        self.send_event(json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}}))
        self.send_event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_events(self, choices: Iterator[dict[str, Any]]) -> None:
        self.begin_events()
        try:
            for choice in choices:
                self.send_event(json.dumps({"object": "text_completion", "choices": [choice]}))
            self.send_event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            note({"aborted": True})
            self.close_connection = True

    def send_event(self, content: str) -> None:
        event = f"data: {content}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def refuse(self, message: str) -> None:
        self.answer(400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})

    def answer(self, status: int, content: Any) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def as_logprobs(scores: list[TokenLogprob]) -> dict[str, Any]:
    """The token itself comes first, then the likeliest, as in vLLM."""
    top: list[dict[str, float] | None] = []
    for one in scores:
        listed = dict([(one.token, one.logprob), *one.top])
        top.append(None if one.logprob is None else {f"token_id:{token}": value for token, value in listed.items()})
    return {
        "tokens": [f"token_id:{one.token}" for one in scores],
        "token_logprobs": [one.logprob for one in scores],
        "top_logprobs": top,
        "text_offset": [0] * len(scores),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    serve = parser.add_subparsers(required=True).add_parser("serve", allow_abbrev=False)
    serve.add_argument("model")
    for option in ("uds", "served-model-name", "structured-outputs-config"):
        serve.add_argument(f"--{option}", required=True)
    serve.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"])
    serve.add_argument("--generation-config", choices=["vllm"], required=True)
    serve.add_argument("--load-format", choices=["safetensors"], required=True)
    for option in ("max-model-len", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
        serve.add_argument(f"--{option}", type=int)
    serve.add_argument("--gpu-memory-utilization", type=float)
    serve.add_argument("--disable-uvicorn-access-log", action="store_true")
    options = parser.parse_args()
    json.loads(options.structured_outputs_config)
    note({"pid": os.getpid(), "command": sys.argv[1:], "environment": dict(os.environ)})
    if options.dtype == "auto":
        print("INFO 01-01 00:00:00 [model.py:1] Downcasting torch.float32 to torch.bfloat16.", flush=True)
    if FAILS in os.environ:
        sys.exit(f"RuntimeError: {os.environ[FAILS]}")
    Server(options).serve_forever()
