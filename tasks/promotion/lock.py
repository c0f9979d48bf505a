"""The lock on a model's aliases: one promotion or rollback at a time, over all machines that share the registry.

MLflow's tags have no compare-and-set, so each contender writes one tag of its own and reads those of the others. A
contender first writes that it tries, then reads; if it sees another one that tries or holds, it withdraws. Two that
write at the same moment see each other, both withdraw, and try again after random delays (as in Dekker's and Lamport's
algorithms).

A dead holder's tag is removed at once if its process ran on this machine; otherwise when its heartbeat has not changed
for LEASE_S on the observer's clock, so that clocks need not agree.
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
from tasks.workspace.processes import has_ended, process_key
from training.records.record import Record

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

PREFIX = f"{TAG}turn."
LEASE_S, HEARTBEATS_PER_LEASE = 60.0, 6
POLL_S = 0.2


class LockTag(Record):
    """One contender's tag of the registered model."""

    state: Literal["waiting", "trying", "holding"]
    """Whether the contender waits for the lock, tries to take it, or holds it."""
    who: str
    """User and host of the contender, as USER@HOST."""
    what: str
    """What the contender wants to do, for those who wait."""
    process: str
    """Key of the contender's process, which differs from that of a later process with the same PID."""
    urgent: bool
    """Whether it is a rollback, to which a promotion yields the lock."""
    heartbeat: int
    """Counter that grows while the contender lives; one that stands still for LEASE_S counts as dead."""


class LockLost(RuntimeError):
    """Another contender removed this process's tag because its heartbeat stopped, or a rollback asks for the lock."""


def current_user() -> str:
    """Return USER@HOST, which is recorded with a promotion."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class LivenessTracker:
    """Finds out which contenders are alive, by reading their tags repeatedly."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}  # key -> its value, and the time when this value was first read

    def living(self, tags: Mapping[str, str]) -> dict[str, LockTag]:
        """Return key -> lock tag of every living contender, from all tags of a registered model."""
        found = {key: LockTag.parse(value.encode(), where=key) for key, value in tags.items() if key.startswith(PREFIX)}
        return {key: tag for key, tag in found.items() if not self._is_dead(key, tags[key], tag)}

    def _is_dead(self, key: str, value: str, tag: LockTag) -> bool:
        if has_ended(tag.process):
            return True
        known, since = self._seen.get(key, ("", 0.0))
        if known != value:
            self._seen[key] = (value, time.monotonic())
            return False
        return time.monotonic() > since + LEASE_S


class PromotionLock:
    """The lock inside `promotion_lock`. Call `check` before each change of an alias."""

    def __init__(self, client: MlflowClient, name: str, *, what: str, by: str, urgent: bool) -> None:
        self.who = by
        self.client, self.name, self.key = client, name, f"{PREFIX}{uuid.uuid4().hex[:12]}"
        self._tag = LockTag(
            state="waiting", who=by, what=what, process=process_key(os.getpid()), urgent=urgent, heartbeat=0
        )
        self._liveness = LivenessTracker()
        self._writing = threading.Lock()
        self._released = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_alive, name="promotion-lock", daemon=True)

    def check(self) -> None:
        """Raise LockLost if this process no longer holds the lock. The change must follow within milliseconds."""
        others = self._others()
        if self.key not in self._tags:
            raise LockLost(
                f"another process took the lock on {self.name}, as this one wrote no heartbeat for {LEASE_S:.0f} s: "
                "run the command again"
            )
        for tag in others:
            if tag.state == "holding" or self._goes_first(tag):
                cure = "run the command again when it is done"
                raise LockLost(f"{tag.who} takes over the lock on {self.name}: {tag.what}; {cure}")

    def acquire(self) -> None:
        """Wait for the lock, however long its holder needs."""
        self._write()
        self._heartbeat.start()
        reported = ""
        while True:
            blocking = next((tag for tag in self._others() if tag.state != "waiting" or self._goes_first(tag)), None)
            if blocking is None:
                self._write(state="trying")
                if all(tag.state == "waiting" for tag in self._others()):
                    self._write(state="holding")
                    return
                self._write(state="waiting")
                time.sleep(random.uniform(0.02, 0.2))
                continue
            if blocking.state == "holding" and reported != blocking.process:
                reported = blocking.process
                logger.info("waiting for the lock on %s, which %s holds: %s", self.name, blocking.who, blocking.what)
            time.sleep(POLL_S)

    def release(self) -> None:
        self._released.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        try:
            self.client.delete_registered_model_tag(self.name, self.key)
        except Exception as error:
            logger.warning("could not release the lock on %s; it expires in %.0f s (%s)", self.name, LEASE_S, error)

    def _goes_first(self, tag: LockTag) -> bool:
        return tag.urgent and not self._tag.urgent

    def _others(self) -> list[LockTag]:
        """Return the tags of the other living contenders; remove the tags of dead ones."""
        self._tags = dict(self.client.get_registered_model(self.name).tags)
        living = self._liveness.living(self._tags)
        for key in self._tags:
            if key.startswith(PREFIX) and key not in living and key != self.key:
                dead = LockTag.parse(self._tags[key].encode(), where=key)
                logger.warning("removed the lock of a dead process: %s, %s", dead.who, dead.what)
                self.client.delete_registered_model_tag(self.name, key)
        return [tag for key, tag in living.items() if key != self.key]

    def _write(self, **changes: object) -> None:
        with self._writing:
            self._tag = self._tag.model_copy(update=changes)
            self.client.set_registered_model_tag(self.name, self.key, self._tag.content().decode())

    def _keep_alive(self) -> None:
        while not self._released.wait(LEASE_S / HEARTBEATS_PER_LEASE):
            try:
                if self.key not in self.client.get_registered_model(self.name).tags:
                    return  # another contender removed it: `check` raises LockLost
                self._write(heartbeat=self._tag.heartbeat + 1)
            except Exception as error:
                logger.debug("could not write the heartbeat of the lock on %s (%s)", self.name, error)


@contextmanager
def promotion_lock(
    client: MlflowClient, name: str, *, what: str, by: str = "", urgent: bool = False
) -> Iterator[PromotionLock]:
    """Hold the lock on `name`'s aliases; wait for its holder. `urgent`: a holder that is not urgent gives it up."""
    lock = PromotionLock(client, name, what=what, by=by or current_user(), urgent=urgent)
    try:
        lock.acquire()
        yield lock
    finally:
        lock.release()
