"""The decorator of our flows: parameters take the types of the function, and a stop is Cancelled in Prefect."""

from __future__ import annotations

import inspect

import pytest
from prefect import Flow
from prefect.states import State

from flows.compare import compare
from flows.nightly import pretrain_nightly
from flows.prefect_ui.flow import shardline_flow
from flows.pretrain import pretrain
from flows.promote import promote
from tasks.runs.errors import RunStopped
from training.config.run import RunConfig


@pytest.mark.parametrize("flow", [pretrain, pretrain_nightly, compare])
def test_a_form_of_the_config_becomes_the_config(flow: Flow[..., object]) -> None:
    parameters = {"config": {"name": "verses"}} | ({"strategies": ["ddp"]} if flow is compare else {})
    assert flow.validate_parameters(parameters)["config"] == RunConfig(name="verses")


def test_a_flows_version_changes_with_its_own_file() -> None:
    """People see in Prefect by it which of two runs had other code."""
    flows = [flow for flow in (pretrain, pretrain_nightly, compare, promote) if isinstance(flow, Flow)]
    assert len({flow.version for flow in flows}) == 4


def test_wrong_parameters_are_refused() -> None:
    assert isinstance(promote, Flow)
    assert promote.validate_parameters({"model": "verses", "version": "3"})["version"] == 3
    with pytest.raises(Exception, match="version"):
        promote.validate_parameters({"model": "verses", "version": "the best"})


def test_a_stop_ends_a_flow_as_cancelled() -> None:
    @shardline_flow("Stopped", run_name="stopped")
    def stopped(step: int) -> int:
        """Stop."""
        raise RunStopped(f"at step {step}")

    assert isinstance(stopped, Flow)
    assert (stopped.name, inspect.getdoc(stopped)) == ("Stopped", "Stop.")
    state = stopped.fn(3)
    assert isinstance(state, State)
    assert (state.is_cancelled(), state.message) == (True, "at step 3")
