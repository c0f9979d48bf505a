"""What a flow run that a deployment started is about: by its form, its schedule, Prefect's command line or its API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from pydantic import ValidationError

from flows.prefect_ui.tell import tell_prefect
from flows.presets import laid_over, presets, shape_of
from training.config.run import RunConfig


def whole_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flow run's parameters with `config` laid over that of its deployment, so that it may be a part of one:
    `prefect deployment run Pretrain/quickstart --param config='{"train": {"steps": 20}}'`.

    The run keeps the whole config as its own, so that a Retry is of the same one, whatever its deployment has then.
    A flow that another flow called, and one without a deployment, has its config whole.
    """
    given, run_id = parameters.get("config"), flow_run.id
    if not isinstance(given, dict) or not run_id or FlowRunContext.get() is not None:
        return dict(parameters)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(str(run_id)))
        if run.deployment_id is None:
            return dict(parameters)
        deployment = client.read_deployment(run.deployment_id)
        config = laid_over(deployment.parameters.get("config", {}), given, shape=shape_of(RunConfig))
        if not config.get("preset") and deployment.name in presets():
            config["preset"] = deployment.name
        try:
            config = RunConfig.model_validate(config).model_dump(mode="json")
        except ValidationError:  # which Prefect's validation says
            return {**parameters, "config": config}
        if config != given:
            keep = partial(client.update_flow_run, run.id, parameters={**run.parameters, "config": config})
            tell_prefect("the run's whole config", keep)
    return {**parameters, "config": config}
