"""Nightly training: continue the champion on new text of the corpus folder, or say why there is nothing to do."""

from __future__ import annotations

import datetime
import logging
from typing import Any

from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows.prefect_ui.artifacts import show_markdown
from flows.prefect_ui.flow import shardline_flow
from flows.presets import with_overrides
from flows.pretrain import pretrain
from flows.stages.job_checks import check_job
from tasks.data.night import find_new_text
from tasks.display.markdown import escape_markdown
from tasks.workspace.paths import tracking_uri
from training.config.credentials import PublicText
from training.config.run import RunConfig

logger = logging.getLogger(__name__)


def night_name() -> str:
    """Return the flow run's name: the model, and the date on which the run is due, in this machine's time zone."""
    config: RunConfig = flow_run.parameters["config"]
    due: datetime.datetime = flow_run.scheduled_start_time
    return f"{config.name}, {due.astimezone():%Y-%m-%d}"


@shardline_flow("Pretrain nightly", run_name=night_name)
def pretrain_nightly(
    config: RunConfig,
    min_new_mib: float = 0.0,
    replay: float = 0.25,
    max_slices: int = 50,
    overrides: tuple[PublicText, ...] = (),
) -> Any:
    """Continue the champion of `config`'s model on the text of data.path that it has not seen; skip if there is none.

    Args:
        config: As for pretrain; its data.path is the folder that grows.
        min_new_mib: Skip a night with less new text than this, in MiB.
        replay: Share of the night's tokens that come from the text of earlier nights.
        max_slices: Maximum number of earlier nights that are replayed and compared.
        overrides: Changes of any fields, as on the command line: section.field=value, such as train.context=512.
    """
    config = with_overrides(config, overrides)
    check_job(config)
    night = find_new_text(
        config, min_new_mib=min_new_mib, replay=replay, max_slices=max_slices, tracking_uri=tracking_uri()
    )
    logger.info(night.why)
    show_markdown(escape_markdown(night.why), key="new-text", description="New text in the corpus")
    if night.config is None:
        skipped: State[Any] = Completed(name="Skipped", message=night.why)
        return skipped
    return pretrain(night.config)
