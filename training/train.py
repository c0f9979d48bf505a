"""The training program: `torchrun … -m training.train runs/ID/plan.json`, on every rank.

Reads the plan and the token shards; leaves metrics.jsonl, checkpoints/ and result.json in the run folder.
Started again, it goes on from the newest whole checkpoint.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from training.checkpoint.retention import prune
from training.checkpoint.saver import Saver
from training.inference.samples import SampleLog
from training.monitoring.meter import Meter
from training.monitoring.profiler import Profiler
from training.monitoring.system_metrics import record_system_metrics
from training.records.plan import RunPlan
from training.runtime.process import process_group
from training.runtime.watchdog import hang_watchdog
from training.tracking import metrics_log, mlflow_sender
from training.tracking import rows as metrics_log_rows
from training.tracking.stop_rules import StopRules
from training.trainer.finish import result
from training.trainer.loop import _agreed, train
from training.trainer.rebalance import Rebalancer
from training.trainer.state import restore

logger = logging.getLogger(__name__)


def main(plan_path: Path) -> None:
    """Train the plan; result.json is written last, whole."""
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    with hang_watchdog(plan, run_dir) as watchdog, process_group(plan) as rank:
        state = restore(plan, rank=rank, run_dir=run_dir)
        log, rows = None, []
        if rank.is_metrics_rank:
            for path in metrics_log_rows.row_files(run_dir):
                mlflow_sender.forget_after(path, state.start)
            rows = metrics_log_rows.read_rows(run_dir / metrics_log_rows.METRICS)
            uri = os.environ.get("MLFLOW_TRACKING_URI", "")
            log = metrics_log.MetricsLog(run_dir, tracking_uri=uri, mlflow_run_id=plan.mlflow_run_id)
            if not any("trainable_parameters" in row for row in rows):
                log.write(0, trainable_parameters=state.trainable_parameters)
        tokens = state.resumed.tokens if state.resumed is not None else 0
        meter = Meter(plan, rank=rank, start=state.start, tokens=tokens, rows=rows)
        meter.follow(state.loader.plan)
        rebalancer = Rebalancer(plan, loader=state.loader, meter=meter, log=log, run_dir=run_dir)
        profiler = Profiler(plan, meter=meter, log=log, run_dir=run_dir, on_split=rebalancer.look)
        samples = SampleLog(plan, run_dir, start=state.start, writes=rank.is_metrics_rank)
        with Saver(run_dir, plan=plan, strategy=state.strategy, model=state.model, rank=rank) as saver:
            stop_rules = _agreed(StopRules(plan, rows, decides=rank.is_metrics_rank))
            with record_system_metrics(run_dir, meter=meter):
                stopped_by = train(
                    state,
                    meter=meter,
                    profiler=profiler,
                    log=log,
                    stop_rules=stop_rules,
                    saver=saver,
                    watchdog=watchdog,
                    samples=samples,
                )
        if log is not None:
            log.close()
            result(state, meter=meter, stopped_by=stopped_by).write(run_dir / "result.json")
            with suppress(OSError):  # what only an older result.json pointed at; the run is done either way
                prune(run_dir, plan.config.checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
