"""Whose turn it is to move a model's aliases: one at a time, over all machines that share the registry.

MLflow's tags know no compare-and-set, but one tag a contender and reading all of them is enough: whoever wants the turn
first writes that it tries, then looks; who sees another that tries or holds steps back. Two that write at once see each
other, so both step back, and try again after times drawn by chance (the flags of Dekker's and Lamport's algorithms).
A contender whose process is gone is swept away: at once where it can be seen, else once its beat has not changed for
LEASE_S by the clock of the one who looks, so that clocks need not agree.
"""

from __future__ import annotations

import getpass
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from tasks.registry.tags import TAG
from tasks.workspace.processes import is_local, local_process, process_key
from training.records.record import Record

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

PREFIX = f"{TAG}turn."
LEASE_S, BEATS = 60.0, 6
LOOK_S = 0.2


class Flag(Record):
    """A tag of the registered model. `urgent`: a person wants a version back; who holds the turn gives way."""

    state: Literal["waiting", "trying", "holding"]
    who: str
    what: str
    process: str
    urgent: bool
    beat: int


class TurnLost(RuntimeError):
    """Others took us for dead, or somebody urgent asks for the turn."""


def who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Sight:
    """Which contenders live, as one who looks at their flags over and over can tell."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}  # key -> its value, and since when it is that

    def living(self, tags: Mapping[str, str]) -> dict[str, Flag]:
        """Key -> flag, of a registered model's tags."""
        flags = {key: Flag.model_validate_json(value) for key, value in tags.items() if key.startswith(PREFIX)}
        return {key: flag for key, flag in flags.items() if not self._is_dead(key, tags[key], flag)}

    def _is_dead(self, key: str, value: str, flag: Flag) -> bool:
        if is_local(flag.process) and local_process(flag.process) is None:
            return True
        known, since = self._seen.get(key, ("", 0.0))
        if known != value:
            self._seen[key] = (value, time.monotonic())
            return False
        return time.monotonic() > since + LEASE_S


class Turn:
    """To be had from `turn`. `check` before every move."""

    def __init__(self, client: MlflowClient, name: str, *, what: str, by: str, urgent: bool) -> None:
        self.who = by
        self.client, self.name, self.key = client, name, f"{PREFIX}{uuid.uuid4().hex[:12]}"
        self._flag = Flag(state="waiting", who=by, what=what, process=process_key(os.getpid()), urgent=urgent, beat=0)
        self._sight = Sight()
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="turn", daemon=True)

    def check(self) -> None:
        """Raises TurnLost if the turn is not ours any more. Between this and a move are milliseconds."""
        flags = self._others()
        if self.key not in self._tags:
            raise TurnLost(
                f"another took over {self.name}, as this process was silent for {LEASE_S:.0f} s: run it again"
            )
        for flag in flags:
            if flag.state == "holding" or self._goes_first(flag):
                raise TurnLost(f"{flag.who} takes over: {flag.what}")

    def take(self) -> None:
        """Wait for the turn, however long the one before takes."""
        self._write()
        self._beating.start()
        told = ""
        while True:
            busy = next((flag for flag in self._others() if flag.state != "waiting" or self._goes_first(flag)), None)
            if busy is None:
                self._write(state="trying")
                if all(flag.state == "waiting" for flag in self._others()):
                    self._write(state="holding")
                    return
                self._write(state="waiting")
                time.sleep(random.uniform(0.02, 0.2))
                continue
            if busy.state == "holding" and told != busy.process:
                told = busy.process
                logger.info("waiting for %s: %s", busy.who, busy.what)
            time.sleep(LOOK_S)

    def leave(self) -> None:
        self._over.set()
        if self._beating.is_alive():
            self._beating.join()
        try:
            self.client.delete_registered_model_tag(self.name, self.key)
        except Exception as error:
            logger.warning("%s will look taken for up to %.0f s (%s)", self.name, LEASE_S, error)

    def _goes_first(self, flag: Flag) -> bool:
        return flag.urgent and not self._flag.urgent

    def _others(self) -> list[Flag]:
        """The contenders that live; those that do not are swept away."""
        self._tags = dict(self.client.get_registered_model(self.name).tags)
        living = self._sight.living(self._tags)
        for key in self._tags:
            if key.startswith(PREFIX) and key not in living and key != self.key:
                flag = Flag.model_validate_json(self._tags[key])
                logger.warning("%s was interrupted: %s", flag.who, flag.what)
                self.client.delete_registered_model_tag(self.name, key)
        return [flag for key, flag in living.items() if key != self.key]

    def _write(self, **changes: object) -> None:
        with self._writing:
            self._flag = self._flag.model_copy(update=changes)
            self.client.set_registered_model_tag(self.name, self.key, self._flag.model_dump_json())

    def _beat(self) -> None:
        while not self._over.wait(LEASE_S / BEATS):
            try:
                if self.key not in self.client.get_registered_model(self.name).tags:
                    return  # swept away: `check` says so
                self._write(beat=self._flag.beat + 1)
            except Exception as error:
                logger.debug("no beat for %s (%s)", self.name, error)


@contextmanager
def turn(client: MlflowClient, name: str, *, what: str, by: str = "", urgent: bool = False) -> Iterator[Turn]:
    """Hold the turn on `name`'s aliases; waits for whoever has it. `urgent`: whoever has it gives way."""
    mine = Turn(client, name, what=what, by=by or who(), urgent=urgent)
    try:
        mine.take()
        yield mine
    finally:
        mine.leave()
