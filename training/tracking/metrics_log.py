"""The log of metrics: rows are appended to runs/ID/metrics.jsonl, and a background thread sends them to MLflow.

The training loop only appends a line. The thread sends all rows after an offset that it keeps beside the file, so that
an MLflow outage or a kill loses nothing: the next start, or the flow at its end, sends the rest. A row that was sent
just before a kill may be sent twice; MLflow drops identical ones. System metrics, in system/MACHINE.jsonl, are sent in
the same way, and text samples, in samples.jsonl, as one table.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from training.tracking.mlflow_sender import Sender
from training.tracking.redaction import without_credentials
from training.tracking.rows import METRICS, RowLog

logger = logging.getLogger(__name__)

SEND_EVERY_S = 2.0
STALL = "log_stall_ms"


class MetricsLog(RowLog):
    """The metrics rank's log, with the thread that sends the run's rows and samples; it never raises into the loop.

    The first row of each step has, as `log_stall_ms`, the longest that a write since the last step delayed the loop.
    """

    def __init__(self, run_dir: Path, *, tracking_uri: str, mlflow_run_id: str) -> None:
        super().__init__(run_dir / METRICS)
        self.stall_ms, self.step = 0.0, -1
        self.closing = threading.Event()
        self.sender: threading.Thread | None = None
        if tracking_uri and mlflow_run_id:
            import mlflow  # noqa: F401  # 0.7 s, in which a thread would make each step wait 5 ms and more for it

            sender = Sender(run_dir, tracking_uri=tracking_uri, mlflow_run_id=mlflow_run_id)
            self.sender = threading.Thread(target=self._send_until_closed, args=(sender,), daemon=True)
            self.sender.start()

    def write(self, step: int, **values: float) -> None:
        began = time.perf_counter()
        if step != self.step:
            values[STALL], self.stall_ms, self.step = self.stall_ms, 0.0, step
        super().write(step, **values)
        self.stall_ms = max(self.stall_ms, 1000 * (time.perf_counter() - began))

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Wait up to `timeout_s` for the sender; the flow sends the rest."""
        super().close()
        self.closing.set()
        if self.sender is not None:
            self.sender.join(timeout_s)

    def _send_until_closed(self, sender: Sender) -> None:
        closing = False
        while not closing:
            closing = self.closing.wait(SEND_EVERY_S)
            try:
                sender.send()
            except Exception as error:
                why = without_credentials(str(error), uri=sender.tracking_uri)
                logger.warning("MLflow did not accept metrics (%s); they are kept in %s and sent again", why, self.path)
