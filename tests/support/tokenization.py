"""A flow that tokenizes by an engine, in a process of its own that may be killed; a corpus of chunks for it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from tests.support.repository import REPO
from tests.support.tiny_corpus import write_json_lines

DASK = str(Path(sys.executable).parent / "dask")
PROGRAM = """
import sys
from pathlib import Path
from prefect import flow
from flows.stages.engine import engine_of
from tasks.data.corpus import prepare_corpus
from training.config.data import DataConfig

@flow
def tokenize(config: str, home: str) -> None:
    data = DataConfig.model_validate_json(config)
    with engine_of(data) as engine:
        prepare_corpus(data, tokens_home=Path(home), progress=lambda phase, *_: print(phase, flush=True), engine=engine)

if __name__ == "__main__":
    tokenize(*sys.argv[1:])
"""


def write_corpus(folder: Path) -> Path:
    """12 MiB of JSON lines, of which one file is cut between chunks: 13 chunks by `settings`."""
    folder.mkdir(exist_ok=True)
    for name, number in (("a", 5000), ("b", 400), ("c", 1800)):
        texts = [f"{name} {each} " + "some words of a text " * 80 for each in range(number)]
        write_json_lines(folder / f"{name}.jsonl", texts)
    return folder


def settings(corpus: Path, **fields: Any) -> dict[str, Any]:
    return {"path": str(corpus), "shard_mib": 1, "tokenizer": {"kind": "bpe", "vocab_size": 300}} | fields


@dataclass
class Tokenization:
    """`prefect`: URL of a server, which the engine's workers reach too."""

    corpus: Path
    home: Path
    prefect: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def started(self, **fields: Any) -> Iterator[subprocess.Popen[str]]:
        self.home.mkdir(exist_ok=True)
        program = self.home.with_suffix(".py")
        program.write_text(PROGRAM)
        environment = os.environ | {
            "PYTHONPATH": str(REPO),
            "PREFECT_API_URL": f"{self.prefect}/api",
            "PREFECT_HOME": str(self.home.with_suffix(".prefect")),
            **self.environment,
        }
        config = json.dumps(settings(self.corpus, **fields))
        command = [sys.executable, str(program), config, str(self.home)]
        with subprocess.Popen(command, env=environment, text=True, stdout=PIPE, stderr=STDOUT) as process:
            try:
                yield process
            finally:
                process.kill()

    def output(self, **fields: Any) -> str:
        with self.started(**fields) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    @property
    def folder(self) -> Path:
        (folder,) = (path for path in self.home.iterdir() if path.is_dir())
        return folder


def until_tokens(process: subprocess.Popen[str]) -> None:
    """Reads the process's output until its first chunk is done."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if line == "tokens\n":
            return
    raise AssertionError(read)
