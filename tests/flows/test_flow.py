"""The decorator of our flows: parameters take the types of the function, and a stop is Cancelled in Prefect."""

from __future__ import annotations

import inspect
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.exceptions import ParameterTypeError
from prefect.states import State
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError as RefusedBySchema
from prefect.utilities.schema_tools.validation import validate

from flows.cli.command import main
from flows.compare import compare
from flows.nightly import pretrain_nightly
from flows.prefect_ui.flow import shardline_flow
from flows.pretrain import pretrain
from flows.promote import promote
from flows.stages.training import choose_run
from tasks.runs.errors import RunStopped
from tasks.tracking.mlflow_run import TrackedRun
from tasks.workspace.locks import owned
from tests.support.configs import tiny_config
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


WITH_PASSWORD: dict[str, dict[str, Any]] = {
    "store": {"url": "s3://key:hunter2@bucket"},
    "data": {"sources": [{"path": "https://example.org/x?X-Amz-Signature=hunter2"}]},
    "trainer": {"module": "mine", "args": ["--database=postgresql://me:hunter2@db"]},
    "launch": {"nccl": {"NCCL_NET": "tcp://me:hunter2@host"}},
}


@pytest.mark.parametrize(
    "flow", [pretrain, *(pytest.param(each, marks=pytest.mark.slow) for each in (pretrain_nightly, compare))]
)
def test_a_form_with_a_password_in_a_url_is_refused_by_the_deployment(flow: Flow[..., object]) -> None:
    """By the schema with which Prefect's server checks a form before it stores anything."""
    schema = parameter_schema(flow).model_dump_for_openapi()
    strategies = {"strategies": ["ddp"]} if flow is compare else {}
    usual = {"config": {"name": "verses", "data": {"path": "s3://bucket/x"}}}
    validate(usual | strategies, schema, raise_on_error=True)
    for section, content in WITH_PASSWORD.items():
        with pytest.raises(RefusedBySchema, match=rf"config\.{section}\..*a URL with credentials"):
            validate({"config": {section: content}} | strategies, schema, raise_on_error=True)


def test_parameters_with_a_password_are_refused_before_a_flow_run_is_made_and_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # nothing is there, and nobody asks it
    monkeypatch.setattr(logging.getLogger("prefect"), "propagate", True)
    asked: list[tuple[Any, dict[str, Any]]] = [
        (pretrain, {"config": {section: WITH_PASSWORD[section]}}) for section in WITH_PASSWORD
    ]
    asked += [(pretrain, {"config": {}, "run_id": "s3://key:hunter2@bucket/runs/verses-1"})]
    asked += [(promote, {"model": "verses", "overrides": ["rollout.servers=[http://me:hunter2@host]"]})]
    for flow, parameters in asked:
        with pytest.raises(ParameterTypeError, match="contains credentials") as refused:
            flow(**parameters)
        assert "hunter2" not in str(refused.value)
    assert "Parameter validation failed for flow 'Pretrain'" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("overrides", [(), ("train.steps=5",), ("train.stpes=5",)])
def test_to_resume_a_run_that_is_running_says_where_it_runs_since_when_and_how_to_stop_it(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the resume would change."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    folder, config = tmp_path / "verses-1", tiny_config()
    TrackedRun(run_id="verses-1", mlflow_run_id="1", experiment_id="1", begun_with=config).write(folder / "run.json")
    running = (
        rf"run verses-1 is running: pid {os.getpid()} on {socket.gethostname()} has worked on it since 20\d\d-.*; "
    )
    running += r"wait until it is done, or stop it with `.*shardline stop verses-1`"
    with owned(folder):
        assert main(["resume", "verses-1", *overrides]) == 2
        assert re.search(running, capsys.readouterr().err)
        with pytest.raises(ValueError, match=running):
            choose_run("verses-1", config, force=True)
    assert choose_run("verses-1", config, force=False) == ("verses-1", ())


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
