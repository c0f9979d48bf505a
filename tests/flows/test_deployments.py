"""Deployments: what people set on their pages stays, and what Prefect's command line and API start from them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import tzlocal

from flows.presets import load_config
from tests.support.local_servers import LocalServers
from tests.support.observed_run import ObservedRun
from tests.support.waiting import until
from training.config.run import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NIGHTLY, FLOW = "pretrain-nightly", "Pretrain nightly"
NIGHT = {"schedule": {"cron": "30 3 * * *", "timezone": "Europe/Berlin"}, "active": True}


def deployment(servers: LocalServers, name: str) -> dict[str, Any]:
    (found,) = servers.prefect("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
    return dict(found)


def change(servers: LocalServers, path: str, **fields: Any) -> None:
    servers.prefect(path, fields, method="PATCH")


def settings(found: dict[str, Any]) -> dict[str, Any]:
    """What a person can set on its page."""
    schedules = [(each["schedule"].get("cron"), each["active"]) for each in found["schedules"]]
    limit = found["global_concurrency_limit"]
    return {name: found[name] for name in ("parameters", "tags", "description", "paused", "work_queue_name")} | {
        "schedules": sorted(schedules, key=str),
        "limit": limit["limit"] if limit else None,
    }


def test_what_somebody_set_stays_through_down_and_up_until_it_is_reset(servers: LocalServers) -> None:
    user_folder, made = servers.user_folder, deployment(servers, NIGHTLY)
    page, parameters = f"/deployments/{made['id']}", deepcopy(made["parameters"])
    parameters["config"]["data"]["path"], parameters["config"]["name"] = "/srv/corpus", "mynights"
    # What is like the default is not listed: Prefect's form writes all fields.
    parameters["config"]["train"] |= {"beta2": 0.98, "log_every_steps": RunConfig().train.log_every_steps}
    change(servers, page, parameters=parameters, tags=["team"], description="ours", paused=True)
    servers.prefect(f"{page}/schedules", [NIGHT])
    change(servers, f"{page}/schedules/{made['schedules'][0]['id']}", active=True)
    as_set = settings(deployment(servers, NIGHTLY))
    assert (None, True) not in as_set["schedules"]
    assert len(as_set["schedules"]) == 2

    servers.stop()
    servers.start()
    assert settings(deployment(servers, NIGHTLY)) == as_set

    servers.prefect("/work_pools/shardline", method="DELETE")
    parameters["config"]["train"]["no_such_field"] = 1
    parameters["config"]["launch"] = {"hosts": [{"name": "a", "no_such_field": 1}]}
    change(servers, page, enforce_parameter_schema=False)
    change(servers, page, parameters=parameters)
    _, err = user_folder.run("deploy")
    kept = (
        "config.data.path, config.name, config.train.beta2, config.launch.hosts, tags, schedules, description, paused"
    )
    (said,) = [line for line in err.splitlines() if f"{NIGHTLY} keeps" in line]
    assert {*said.partition("in Prefect: ")[2].partition(" (")[0].split(", ")} == {*kept.split(", ")}, said
    assert f"`shardline deploy --reset {NIGHTLY}`" in said
    dropped = "config.train.no_such_field, config.launch.hosts.0.no_such_field"
    assert f"{NIGHTLY} loses settings that this version does not have: {dropped}" in err
    as_set["parameters"]["config"]["launch"] = {"hosts": [{"name": "a"}]}
    assert settings(deployment(servers, NIGHTLY)) == as_set
    assert deployment(servers, NIGHTLY)["work_pool_name"] == "shardline"
    queues = servers.prefect("/work_pools/shardline/queues/filter", {})
    assert {queue["name"]: queue["concurrency_limit"] for queue in queues}["training"] == 1

    assert "there is no deployment 'nightly': choose " in user_folder.run("deploy", "--reset", "nightly", expect=2)[1]
    changed = json.loads(user_folder.run("deploy", "--reset", NIGHTLY, "--json")[0])["deployments"][NIGHTLY]
    assert (changed["kept"], set(kept.split(", ")) <= {*changed["followed"]}) == ([], True)
    assert settings(deployment(servers, NIGHTLY)) == settings(made)


def test_a_night_is_one_of_this_machines_time_zone_and_named_by_its_date(servers: LocalServers) -> None:
    (schedule,) = deployment(servers, NIGHTLY)["schedules"]
    assert schedule["schedule"]["timezone"] == tzlocal.get_localzone_name()
    run = servers.wait(servers.submit(NIGHTLY, config={"name": "nights", "data": {"path": "/nowhere"}}))
    assert run["name"].startswith("nights, 20"), run["name"]


def test_some_fields_are_laid_over_the_deployments_and_its_page_shows_the_log(servers: LocalServers) -> None:
    """By Prefect's own command: what it is not told is the preset's."""
    known = servers.user_folder.run_dirs()
    given = {"data": {"path": str(servers.user_folder.corpus)}, "train": {"steps": 3}}
    overrides = ["data.tokenizer.vocab_size=300", "parallel.strategy=single", "train.context=32"]
    command = [sys.executable, "-m", "prefect", "deployment", "run", "Pretrain/quickstart", "--watch"]
    parameters = [f"config={json.dumps(given)}", f"overrides={json.dumps(overrides)}", "dry_run=true"]
    for each in parameters:
        command += ["--param", each]
    done = subprocess.run(command, env=os.environ | servers.addresses, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert servers.user_folder.run_dirs() == known, "it only plans"
    (run,) = servers.prefect("/flow_runs/filter", {"deployments": {"name": {"any_": ["quickstart"]}}})
    config = run["parameters"]["config"]
    assert (run["name"], config["preset"], config["train"]["steps"]) == ("quickstart", "quickstart", 3)
    assert config["model"]["width"] == load_config("quickstart").model.width
    (plan,) = servers.prefect("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert "| steps | 3 steps" in plan["data"]
    assert "| vocabulary, context | 300 tokens, 32 positions |" in plan["data"]


def test_a_cancelled_run_has_no_failed_task_and_no_traceback(servers: LocalServers) -> None:
    observed = ObservedRun.submitted(servers, "train.steps=100000")
    observed.wait_for_step(5)
    state = {"type": "CANCELLING", "name": "Cancelling"}
    servers.prefect(f"/flow_runs/{observed.flow_run_id}/set_state", {"state": state, "force": True})
    run = servers.wait(observed.flow_run_id)
    assert run["state_type"] == "CANCELLED"
    of_it = {"flow_runs": {"id": {"any_": [observed.flow_run_id]}}}
    until(
        lambda: (
            {each["state_type"] for each in servers.prefect("/task_runs/filter", of_it)} == {"COMPLETED", "CANCELLED"}
        ),
        "the states of its tasks",
    )
    wanted = {"logs": {"flow_run_id": {"any_": [observed.flow_run_id]}}, "sort": "TIMESTAMP_DESC"}

    def log() -> list[dict[str, Any]]:
        """The newest 200 lines, once the flow's own last one is among them: they are sent in batches."""
        found: list[dict[str, Any]] = servers.prefect("/logs/filter", wanted)
        ends = [line for line in found if line["name"] == "prefect.flow_runs" and "Cancelled" in line["message"]]
        return found if ends else []

    lines = until(log, "the flow's last line in its log")
    text = "\n".join(line["message"] for line in lines)
    assert "Traceback" not in text
    assert {line["name"].partition(".")[0] for line in lines if line["level"] == logging.INFO} >= {"tasks"}, text
