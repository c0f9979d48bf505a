"""Makes a challenger champion: gates, approval, the switch on every server, a watch; a rollback if that fails.

It may be interrupted anywhere: the next promotion of the model first finishes or undoes an interrupted one.
"""

from __future__ import annotations

from flows.prefect_ui.flow import shardline_flow
from flows.stages import promotion as stages
from training.config.credentials import PublicText
from training.records.results import RegisteredModel


@shardline_flow("Promote", run_name="promote {model}")
def promote(
    model: str, version: int | None = None, force: bool = False, overrides: tuple[PublicText, ...] = (), by: str = ""
) -> RegisteredModel:
    """Make a version champion if its gates pass, and roll it back if its servers fail or slow down.

    Args:
        model: Name of the model in the registry.
        version: Number of the version; without one, the challenger.
        force: Skip the gates.
        overrides: Changes of the gates and the rollout: gates.field=value, rollout.field=value.
        by: Who asks for the promotion, for the record.
    """
    request = stages.read_request(model, version=version, force=force, overrides=overrides, by=by)
    with stages.locked(request) as lock:
        if finished := stages.finish_interrupted(request, lock):
            return finished
        case = stages.judge(request)
    if case.passed and case.terms.gates.approval != "none":
        case = stages.approve(request, case)
    with stages.locked(request) as lock:
        return stages.roll_out(request, case, lock)
