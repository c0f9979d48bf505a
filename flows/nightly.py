"""Nightly training: continue the champion on new text of the corpus folder, or say why there is nothing to do."""

from __future__ import annotations

from typing import Any

from prefect.states import Completed, State

from flows.prefect_ui.artifacts import show_markdown
from flows.prefect_ui.flow import shardline_flow
from flows.pretrain import pretrain
from tasks.data.night import find_new_text
from tasks.display.markdown import escape_markdown
from tasks.workspace.paths import tracking_uri
from training.config.run import RunConfig


@shardline_flow("Pretrain nightly", run_name="{config.name}, what is new")
def pretrain_nightly(config: RunConfig, min_new_mib: float = 0.0, replay: float = 0.25, max_slices: int = 50) -> Any:
    """Continue the champion of `config`'s model on the text of data.path that it has not seen; skip if there is none.

    config: as for pretrain; its data.path is the folder that grows. min_new_mib: skip a night with less new text.
    replay: share of the night's tokens that come from the text of earlier nights. max_slices: most earlier nights
    that are replayed and compared.
    """
    night = find_new_text(
        config, min_new_mib=min_new_mib, replay=replay, max_slices=max_slices, tracking_uri=tracking_uri()
    )
    show_markdown(escape_markdown(night.why), key="new-text", description="New text in the corpus")
    if night.config is None:
        skipped: State[Any] = Completed(name="Skipped", message=night.why)
        return skipped
    return pretrain(night.config)
