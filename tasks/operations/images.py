"""`shardline image`: builds the training image with the daemon that `docker` uses, and pushes it to a registry."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from infra import images
from infra.hosts import connect
from infra.images import OnLine
from infra.images import copy_sources as copy_sources  # for the stack, whose room does not import infra
from training.tracking.progress import SAY_EVERY_S, Ticker

logger = logging.getLogger(__name__)

BUILD_S = 3600.0  # a step may print nothing while pip resolves, or while a base image of 10 GB is pulled
PUSH_S = 600.0


def build_image(
    name: str,
    *,
    base_image: str = "",
    build_args: Sequence[str] = (),
    wheels: str = "",
    ca: str = "",
    network: str = "",
) -> str:
    """Build infra/train.Dockerfile as `name`; return the image's ID. `build_args` are NAME=VALUE.

    Raises ValueError for wrong arguments, HostError if the build fails.
    """
    if wrong := [argument for argument in build_args if "=" not in argument]:
        raise ValueError(f"--build-arg {wrong[0]}: write it as NAME=VALUE")
    for option, path in (("--wheels", wheels), ("--ca", ca)):
        if path and not Path(path).exists():
            raise ValueError(f"{option} {path} does not exist")
    found = sorted(Path(wheels).glob("*.whl")) if wheels else []
    if wheels and not found:
        raise ValueError(f"--wheels {wheels} holds no .whl file")
    with (
        closing(connect(images.local_daemon(), timeout_s=BUILD_S)) as client,
        _log_lines(f"building {name}") as on_line,
    ):
        return images.build(
            client,
            tag=name,
            base_image=base_image,
            build_args=dict(argument.split("=", 1) for argument in build_args),
            wheels=found,
            ca=Path(ca) if ca else None,
            network=network,
            timeout_s=BUILD_S,
            on_line=on_line,
        )


def push_image(name: str) -> str:
    """Push the image to the registry in its name; return NAME@sha256:… for launch.image.

    Raises ValueError for a name without a registry, HostError if the push fails.
    """
    images.split_name(name)  # check this first, before a daemon is asked
    lines = _log_lines(f"pushing {name}")
    with closing(connect(images.local_daemon(), timeout_s=PUSH_S)) as client, lines as on_line:
        return images.push(client, name, on_line=on_line)


@contextmanager
def _log_lines(title: str) -> Iterator[OnLine]:
    """Yield a function that logs the daemon's lines; during silence, log every 15 s the step and for how long."""
    began = newest = time.monotonic()
    step = ""

    def on_line(text: str) -> None:
        nonlocal newest, step
        newest = time.monotonic()
        if found := re.match(r"Step (\d+)/(\d+)", text):
            step = f" step {found[1]} of {found[2]},"
        logger.info("%s", text)

    def silence() -> str:
        now = time.monotonic()
        if now - newest < SAY_EVERY_S:
            return ""
        return f"{title}:{step} no output for {now - newest:,.0f} s, {now - began:,.0f} s so far"

    with Ticker(silence, logger.info):
        yield on_line
