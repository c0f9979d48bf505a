"""The launcher's lease on a run's containers: they work while its file changes; once the file is gone, they are killed.

Each attempt has its own lease, so that ranks of an earlier attempt, on a host that was cut off, do not follow a newer
lease: they end by themselves as soon as they see the storage again (training/node/__main__.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from training.records.record import write_atomically

logger = logging.getLogger(__name__)

# Ranks check their lease each second, and are killed within 0.1 s once it is gone.
FENCE_S = 3.0
RENEWALS = 6  # more than once within lease_s, because a file server may be slow
RENEW_EVERY_S = 2.0  # at most: for as long `shardline ps` on another machine waits to see the launcher's life
WATCH_EVERY_S = 0.1
ASKED = "stop-asked"  # file beside an attempt's lease: `shardline stop`, or a resume elsewhere, asks ranks to stop


def withdraw_leases(run_dir: Path, *, keep: Path | None = None) -> bool:
    """Withdraw the leases of all attempts at a run, whoever launched them. Returns whether there were any.

    `keep`: this launcher's lease of the standbys.
    """
    leases = [lease for lease in run_dir.glob("*/*/lease") if lease != keep]
    for lease in leases:
        lease.unlink(missing_ok=True)
    return bool(leases)


def ask_to_stop(run_dir: Path) -> None:
    """Mark that the nodes were asked to end, so that their launcher, if it lives, does not start them again."""
    for lease in run_dir.glob("*/*/lease"):
        with suppress(OSError):  # a full disk; the lease, which is removed next, has the same effect
            lease.with_name(ASKED).touch()


def renewed_leases(patience_s: Mapping[Path, float]) -> set[Path]:
    """Watch leases until each has changed, or its time is over; return those that changed.

    Only a change that this process sees says that a launcher lives: the time of the file is by the storage's clock,
    which may be another one than ours, and which may have been set since.
    """
    before, began, renewed = {lease: _content(lease) for lease in patience_s}, time.monotonic(), set[Path]()
    while True:
        waited_s = time.monotonic() - began
        renewed |= {lease for lease in before if (now := _content(lease)) is not None and now != before[lease]}
        if all(waited_s >= patience_s[lease] for lease in before if lease not in renewed):
            return renewed
        time.sleep(WATCH_EVERY_S)


def _content(lease: Path) -> tuple[bytes, int] | None:
    try:
        with lease.open("rb") as file:  # opened each time, because NFS answers a stat from its cache
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


class Lease:
    """A file that a thread renews until the context ends; then the lease is withdrawn."""

    def __init__(self, path: Path, *, lease_s: float) -> None:
        self.path, self.every_s = path, min(RENEW_EVERY_S, lease_s / RENEWALS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        write_atomically(self.path, "0\n")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.withdraw()

    def withdraw(self) -> None:
        """Remove the lease. Ranks that still live on hosts that see the storage are killed within seconds."""
        self._over.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def _renew(self) -> None:
        count = 0
        while not self._over.wait(self.every_s):
            count += 1
            try:
                with self.path.open("r+b") as file:  # never make the file again: a withdrawn lease stays withdrawn
                    file.write(f"{count}\n".encode())
            except FileNotFoundError:
                logger.warning("another launcher has withdrawn the lease %s and continues this run", self.path)
                return
            except OSError as error:
                logger.warning("could not renew the lease %s (%s)", self.path, error)
