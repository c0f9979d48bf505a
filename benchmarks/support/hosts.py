"""Docker hosts on this machine, for benchmarks that need several hosts."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support.workload import write_corpus
from tests.support.rig.rig import Rig, why_no_rig


@contextmanager
def docker_hosts() -> Iterator[Rig]:
    """Start the hosts, and remove them after the block. Without root or Docker, exit with code 2 and the reason."""
    if reason := why_no_rig():
        print(f"cannot start Docker hosts to measure on: {reason}", file=sys.stderr)
        sys.exit(2)
    logging.getLogger().setLevel(logging.ERROR)
    rig = Rig()
    try:
        rig.up()
        yield rig
    finally:
        rig.down()


@contextmanager
def home_and_tokens(rig: Rig, *, vocab_size: int) -> Iterator[tuple[Path, Path]]:
    """Make a SHARDLINE_HOME that all hosts see, without a tracking server, and a folder of token shards; yield both."""
    home = rig.make_home()
    os.environ |= {"SHARDLINE_HOME": str(home), "MLFLOW_TRACKING_URI": ""}
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        write_corpus(shards, vocab_size=vocab_size)
        yield home, shards
