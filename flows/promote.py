"""From challenger to champion: judged by its gates, approved, switched on every server, watched; or taken back.

Can be interrupted anywhere: the next promotion of the model first finishes, or takes back, what this one began.
"""

from __future__ import annotations

from prefect import flow

from flows.prefect_ui.hooks import began
from flows.stages import promotion as stages
from training.records.results import RegisteredModel


@flow(name="Promote", flow_run_name="promote {model}", on_running=[began], validate_parameters=True)
def promote(
    model: str, version: int | None = None, force: bool = False, overrides: tuple[str, ...] = (), by: str = ""
) -> RegisteredModel:
    """Put a version in the champion's place, if its gates let it, and take it back if it does badly there.

    version: default the challenger. force: past the gates. overrides: gates.x=y, rollout.x=y. by: who asks.
    """
    request = stages.asked(model, version=version, force=force, overrides=overrides, by=by)
    with stages.turn_of(request) as mine:
        if finished := stages.settle(request, mine):
            return finished
        case = stages.judge(request)
    if case.passed and case.terms.gates.approval != "none":
        case = stages.approve(request, case)
    with stages.turn_of(request) as mine:
        return stages.roll_out(request, case, mine)
