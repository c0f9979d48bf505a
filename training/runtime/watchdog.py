"""Writes the Python stack of every rank to runs/ID/stacks/ when no step is made for too long.

faulthandler writes them from its own thread, which needs no interpreter lock, so a blocked rank (except by SIGSTOP)
still shows where it is. A collective fails after parallel.timeout_s; the stacks are written a little earlier. They are
also written on SIGUSR1, and when NCCL's watchdog aborts the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from training.records.plan import RunPlan

WRITE_AT = 0.9  # share of the timeout, so that the collective still waits
HEARTBEAT_EVERY_S = 1.0  # arming starts a thread, which takes 0.14 ms
RECORDED_COLLECTIVES = 2000  # the newest, in NCCL's flight recorder; a step of an 8B model has some 200


class Watchdog:
    """Writes the stacks unless `heartbeat` is called in time; armed from the start."""

    def __init__(self, file: IO[str], *, timeout_s: float) -> None:
        self.file, self.patience_s = file, WRITE_AT * timeout_s - HEARTBEAT_EVERY_S / 2
        self.due = 0.0
        self.heartbeat()

    def heartbeat(self) -> None:
        """Note a step, and arm again.

        Earlier stacks then came from a long validation or compilation, not from a hang.
        """
        now = time.monotonic()
        if now >= self.due:
            self.due = now + HEARTBEAT_EVERY_S
            faulthandler.dump_traceback_later(self.patience_s, repeat=True, file=self.file)
            if self.has_written():
                self.file.truncate(0)

    def has_written(self) -> bool:
        return os.fstat(self.file.fileno()).st_size > 0


@contextmanager
def hang_watchdog(plan: RunPlan, run_dir: Path) -> Iterator[Watchdog]:
    """Watch a rank; enter this before the process group is made. Errors say where the stacks are."""
    folder, rank = run_dir / "stacks", int(os.environ.get("RANK", "0"))
    folder.mkdir(exist_ok=True)
    _record_collectives(plan, folder)
    path = folder / f"rank-{rank}.txt"
    path.write_text("")  # stacks of an earlier attempt
    with path.open("a") as file:
        faulthandler.enable(file)  # on SIGABRT and similar signals
        faulthandler.register(signal.SIGUSR1, file)
        watchdog = Watchdog(file, timeout_s=plan.config.parallel.timeout_s)
        try:
            yield watchdog
        except Exception as error:
            if watchdog.has_written():
                error.add_note(
                    f"No step was made for {watchdog.patience_s:.0f} s: the ranks' Python stacks are in {folder}"
                )
            raise
        else:
            watchdog.file.truncate(0)
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()
            if not watchdog.has_written():
                path.unlink()
                with suppress(OSError):  # another rank has written stacks
                    folder.rmdir()


def _record_collectives(plan: RunPlan, folder: Path) -> None:
    """Turn on NCCL's flight recorder: the collectives that each rank began, dumped by NCCL's watchdog on a timeout.

    To be read by `python -m torch.distributed.flight_recorder.fr_trace` (its pickles: trust the folder).
    """
    if plan.device_kind == "cuda":
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-rank-"))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
