"""The program that generates text with transformers: `python -m training.generate FOLDER --uds SOCKET --context N`.

It answers over a Unix socket with the part of vLLM's API that tasks/inference/completions_engine.py uses: /health, and
/v1/completions with token IDs in and out.
"""

from __future__ import annotations

import argparse
import json
import logging
import socketserver
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.inference.sampling import SamplingParams
from training.inference.whole_model import Decoder, TokenChoice, decoder_of
from training.models.pretrained import auto_class_of, load_pretrained
from training.runtime.onednn import prefer_onednn

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
        prefer_onednn()
    precision, why = _precision(options.precision, device)
    model = load_pretrained(auto_class_of("causal"), Path(options.folder), dtype=DTYPES[precision]).eval().to(device)
    decoder = decoder_of(model, context=options.context)
    vocab_size = model.config.get_text_config().vocab_size
    about = {"rows": decoder.rows, "device": str(device), "how": f"{precision} ({why}), {decoder.how}"}
    with Server(options.uds, decoder, vocab_size=vocab_size, about=about) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        decoder.wait()
    sys.exit("RuntimeError: no more texts can be decoded, for the reason above")


def _precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """Return the wanted precision, or the best that the device computes fast; and why."""
    if wanted != "auto":
        return wanted, "inference.precision"
    if device.type == "cpu":
        return "fp32", "on CPUs"
    capability = torch.cuda.get_device_capability(device)
    chosen = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    return chosen, f"compute capability {capability[0]}.{capability[1]}: bf16 from 8.0 on, fp16 from 7.0 on"


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self, path: str, decoder: Decoder, *, vocab_size: int, about: dict[str, Any]) -> None:
        self.decoder, self.vocab_size, self.about = decoder, vocab_size, about
        super().__init__(path, Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: the server that asks has logs of its own."""

    def do_GET(self) -> None:
        self._answer(200, self.server.about)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, vocab_size = asked["prompt"], self.server.vocab_size
        if not ids or not all(0 <= token < vocab_size for token in ids):
            why = (
                f"the prompt has token IDs from {min(ids, default=None)} to {max(ids, default=None)}, but the model "
                f"has {vocab_size} tokens: use the tokenizer in the model's own folder"
            )
            return self._answer(400, {"error": {"message": why}})
        random = np.random.default_rng(asked["seed"])
        random.bit_generator.advance(asked["made"])  # type: ignore[attr-defined]  # one number was drawn for each
        choice = TokenChoice(SamplingParams(asked["temperature"], asked["top_k"], asked["top_p"]), random)
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the client has left, which ends the text
            try:
                self.server.decoder.decode(
                    ids, choice, new_tokens=asked["max_tokens"], end_ids=asked["stop_token_ids"], emit=self._emit
                )
                self._send({"choices": [{"finish_reason": "length"}]})
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                raise
            except Exception as error:
                logger.exception("a text ended with an error")
                self._send({"error": {"message": f"{type(error).__name__}: {error}", "code": 500}})

    def _emit(self, token: int) -> None:
        self._send({"choices": [{"token_ids": [token]}]})

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--uds", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--precision", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--threads", type=int, default=1)
    main(parser.parse_args())
