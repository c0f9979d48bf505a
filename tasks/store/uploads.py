"""Copies a run to the store while it trains: a thread copies its shards, then each checkpoint and the records.

A store that does not answer delays the copies, but never training: failed copies are tried again until they succeed,
and the log says from when to when the store was away.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from tasks.store.runs import RunOnStore, run_url
from tasks.store.shards import upload_shards
from tasks.store.transfer import write_bytes
from training.config.run import RunConfig
from training.records.checkpoint import damage, finished_checkpoints, reading
from training.store.urls import check_url

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # between checks for a new checkpoint
LONGEST_PAUSE_S = 60.0  # between two tries
END_PATIENCE_S = 120.0  # longest wait at the end of a run while no file is copied; a quarter of it if the run failed
REFUSED = (PermissionError, FileNotFoundError)  # errors that waiting cannot cure: wrong credentials, no such bucket


class Uploads:
    """A context that copies inside it, and at its end until everything is copied.

    `behind`: files that were not copied.
    """

    def __init__(self, config: RunConfig, run_dir: Path, shards_dir: Path) -> None:
        self.config, self.run_dir, self.shards_dir = config, run_dir, shards_dir
        self.run = RunOnStore(run_url(config.store, run_dir.name), run_dir)
        self.behind = ""
        self._sent: set[int] = set()
        self._ending, self._given_up = threading.Event(), threading.Event()
        self._progress_at = time.monotonic()
        # The copied context names the Prefect run that owns the log.
        work = partial(contextvars.copy_context().run, self._work)
        self._thread = threading.Thread(target=work, name="uploads", daemon=True)

    def __enter__(self) -> Uploads:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until everything is copied, or until no file was copied for too long."""
        patience_s = END_PATIENCE_S if error is None else END_PATIENCE_S / 4
        self._progress_at = time.monotonic()
        self._ending.set()
        while self._thread.is_alive() and time.monotonic() - self._progress_at < patience_s:
            self._thread.join(1.0)
        self._given_up.set()
        if self._thread.is_alive():
            self.behind = f"nothing could be copied to {self.run.url} for {patience_s:.0f} s"
            logger.error(
                "%s: the newest checkpoint may be on this machine only; `shardline resume %s` here copies it",
                self.behind,
                self.run_dir.name,
            )

    def _work(self) -> None:
        self._patiently(lambda: upload_shards(self.config.store, self.shards_dir))
        self._patiently(lambda: self._sent.update(self.run.steps()))
        while True:
            ending = self._ending.is_set()  # cleared before the check, so that a later checkpoint is not missed
            todo = [folder for folder in finished_checkpoints(self.run_dir) if int(folder.name) not in self._sent]
            if todo:
                newest = todo[-1]
                self._patiently(lambda folder=newest: self._send(folder))  # type: ignore[misc]
            elif ending:
                self._patiently(lambda: self.run.send_records(results=True))
                return
            else:
                self._ending.wait(LOOK_EVERY_S)
            if self._given_up.is_set():
                return

    def _send(self, folder: Path) -> None:
        began, step = time.perf_counter(), int(folder.name)
        try:
            with reading(folder):  # so that it is not deleted meanwhile
                if fault := damage(folder, hashes=False):
                    logger.warning("checkpoint %s is incomplete (%s): it is not copied", folder, fault)
                    self._sent.add(step)
                    return
                num_bytes = self.run.send_checkpoint(folder)
        except FileNotFoundError as error:
            if folder.exists():
                raise
            logger.info("checkpoint %s was deleted before it was copied (%s)", folder, error)
            self._sent.add(step)
            return
        self._sent.add(step)
        self._progress_at = time.monotonic()
        seconds = time.perf_counter() - began
        logger.info(
            "copied the checkpoint of step %d to %s: %.1f MB in %.1f s", step, self.run.url, num_bytes / 1e6, seconds
        )
        self.run.prune(self.config)

    def _patiently(self, action: Callable[[], None]) -> None:
        """Repeat `action` until it succeeds, or until the run has ended and waits no longer."""
        away_since = 0.0
        for attempt in itertools.count():
            try:
                action()
            except Exception as error:
                if not away_since:
                    away_since = time.monotonic()
                    logger.warning(
                        "could not copy to %s (%s: %s): training continues, and the copy is tried again",
                        self.run.url,
                        type(error).__name__,
                        error,
                    )
                if self._given_up.wait(min(2.0**attempt, LONGEST_PAUSE_S)):
                    return
            else:
                self._progress_at = time.monotonic()
                if away_since:
                    logger.info("%s accepts copies again, after %.0f s", self.run.url, time.monotonic() - away_since)
                return


def check_store(config: RunConfig, run_id: str) -> None:
    """Raise ValueError if the store refuses this run (wrong credentials, no bucket), but not if it does not answer."""
    if not config.store.url:
        return
    check_url(config.store.url, field="store.url")
    url = run_url(config.store, run_id)
    try:
        write_bytes(f"{url}/.writable", b"")
    except REFUSED as error:
        raise ValueError(
            f"store.url = {config.store.url} refuses a file ({type(error).__name__}: {error}): check the bucket's name "
            "and the credentials that the store's library finds"
        ) from error
    except OSError as error:
        if "credentials" in str(error).lower():
            raise ValueError(
                f"store.url = {config.store.url}: {error}: give the store's library credentials"
            ) from error
        logger.warning("store.url = %s does not answer (%s): copies will be made later", config.store.url, error)
