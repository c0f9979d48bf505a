"""A running `shardline serve` for tests, and a registry with a champion."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.support.mlflow_store import Store
from tests.support.tiny_run import SAMPLES

CODE = """
import json
import resource
import sys
from pathlib import Path
from tasks.serving.server import serve
from training.config.serving import ServeConfig
if files := int(sys.argv[5]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
try:
    config = ServeConfig.model_validate(json.loads(sys.argv[4]))
    serve(sys.argv[1], port=0, tracking_uri=sys.argv[2], servers_dir=Path(sys.argv[3]), config=config)
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def server(
    store: Store, ref: str = "tiny@champion", *, inference: dict[str, Any] | None = None, files: int = 0, **limits: Any
) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A client of a running server. Its socket listens before it prints, so the first request waits until it is up.

    `files`: how many files it may open; 0: as many as this process.
    """
    config = json.dumps({"serving": {"poll_s": 0.1, **limits}, "inference": inference or {}})
    command = [sys.executable, "-c", CODE, ref, store.uri, str(store.folder / "servers"), config, str(files)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert " at http://" in line, line + process.stdout.read()
        tried = process.stdout.readline()
        assert tried.startswith("try: curl http://")
        if ref.startswith("tiny@"):
            assert f'"prompt": "{SAMPLES[1].prompt}"' in tried, "a request with words of the held-out text"
        with httpx.Client(base_url=line.split(" at ")[1].strip(), timeout=60) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()
