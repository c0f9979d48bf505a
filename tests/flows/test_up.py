"""`shardline up` and `down`: real servers and a real worker on this machine, of one SHARDLINE_HOME; what people set on
the pages of their deployments stays, and what Prefect's command line and API start from them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tzlocal
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from flows.presets import load_config
from tests.support.local_servers import LocalServers, lasting_ports, request_json
from tests.support.observed_run import ObservedRun
from tests.support.ranks import losses
from tests.support.user_folder import UserFolder
from tests.support.waiting import until
from training.config.run import RunConfig

NIGHTLY, FLOW = "pretrain-nightly", "Pretrain nightly"
NIGHT = {"schedule": {"cron": "30 3 * * *", "timezone": "Europe/Berlin"}, "active": True}


def deployment(servers: LocalServers, name: str) -> dict[str, Any]:
    (found,) = servers.prefect("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
    return dict(found)


def change(servers: LocalServers, path: str, **fields: Any) -> None:
    servers.prefect(path, fields, method="PATCH")


def addresses_of(process: psutil.Process | None) -> set[tuple[str, int]]:
    """(IP, port) on which it and all that it started listen."""
    assert process is not None
    family = [process, *process.children(recursive=True)]
    return {
        (connection.laddr.ip, connection.laddr.port)
        for each in family
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def settings(found: dict[str, Any]) -> dict[str, Any]:
    """What a person can set on its page."""
    schedules = [(each["schedule"].get("cron"), each["active"]) for each in found["schedules"]]
    limit = found["global_concurrency_limit"]
    return {name: found[name] for name in ("parameters", "tags", "description", "paused", "work_queue_name")} | {
        "schedules": sorted(schedules, key=str),
        "limit": limit["limit"] if limit else None,
    }


def test_a_taken_port_is_named_with_who_has_it_before_anything_starts(tmp_path: Path) -> None:
    user_folder, (free,) = UserFolder(tmp_path), lasting_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        _, err = user_folder.run("up", "--prefect-port", str(free), "--mlflow-port", port, expect=2)
    assert f"port {port}" in err
    assert f"pid {os.getpid()}" in err
    assert "--mlflow-port" in err
    assert not (user_folder.home / "up.json").exists()
    assert "nothing ran" in user_folder.run("down")[0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_are_used_where_the_environment_names_them(
    servers: LocalServers, tmp_path: Path, measured_hardware: Path
) -> None:
    user_folder = UserFolder(tmp_path)
    user_folder.home.mkdir()
    shutil.copy(measured_hardware, user_folder.home)
    outcome = json.loads(user_folder.run("pretrain", str(user_folder.config), "--json", **servers.addresses)[0])
    run = servers.mlflow.get_run(outcome["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    history = servers.mlflow.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == losses(
        user_folder.home / outcome["run_id"] / "plan.json"
    )
    assert int(servers.mlflow.get_model_version_by_alias("verses", "champion").version) == outcome["version"] == 1
    assert run.data.tags["prefect.flow_run_url"].startswith("http://")
    assert servers.wait(run.data.tags["prefect.flow_run_id"], timeout_s=1)["state_type"] == "COMPLETED"
    assert not (user_folder.home / "mlflow.db").exists()
    assert not (user_folder.home / "prefect").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_password_in_a_url_gets_into_no_file_and_no_database(servers: LocalServers) -> None:
    """Neither from the form nor from the command line."""
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        servers.submit("quickstart", servers.config("store.url=s3://key:hunter2@bucket"))
    user_folder = servers.user_folder
    asked = "data.path=https://example.org/x?X-Amz-Signature=hunter2", "model.path=s3://key:hunter2@bucket"
    for command in ("plan", "pretrain"):
        out, err = user_folder.run(command, str(user_folder.config), *asked, "--json", expect=2)
        assert "model.path = 's3://***@bucket': contains credentials" in err
        assert "hunter2" not in out + err
    assert not [path for path in user_folder.home.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


@pytest.mark.slow
def test_a_page_of_another_site_runs_nothing_and_reads_nothing(servers: LocalServers) -> None:
    """It asks from its own origin, or under a name of its own that resolves to loopback (DNS rebinding)."""
    of_it = {"deployments": {"name": {"any_": ["quickstart"]}}}  # Prefect makes those of schedules meanwhile
    runs = servers.prefect("/flow_runs/count", of_it)
    (quickstart,) = servers.prefect("/deployments/filter", of_it)
    prefect, mlflow = f"{servers.url('prefect')}/api", f"{servers.url('mlflow')}/api/2.0/mlflow/experiments"
    start, command = f"{prefect}/deployments/{quickstart['id']}/create_flow_run", {"command": "touch /tmp/taken"}
    origin, host = {"Origin": "http://evil.example"}, {"Host": "evil.example:4200"}
    with httpx.Client(trust_env=False, timeout=60) as page:
        for headers in (origin, host):
            assert page.post(f"{prefect}/deployments/filter", json={}, headers=headers).status_code == 401
            assert page.post(start, json={"job_variables": command}, headers=headers).status_code == 401
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert "access-control-allow-origin" not in page.options(start, headers=origin | asked).headers
        own = {"Origin": servers.url("prefect")}
        assert page.options(start, headers=own | asked).headers["access-control-allow-origin"] == own["Origin"]
        assert page.get(f"{mlflow}/search?max_results=1").status_code == 401
        page.auth = tuple(servers.mlflow_password.split(":"))  # as the browser has it, once it was typed in
        for headers in (origin, {"Origin": servers.url("prefect")}, {"Origin": "http://localhost:3000"}):
            assert page.post(f"{mlflow}/create", json={"name": "evil"}, headers=headers).status_code == 403
            assert page.get(f"{mlflow}/search?max_results=1", headers=headers).status_code == 403
        assert page.get(f"{mlflow}/search?max_results=1", headers=host).status_code == 403
        assert page.get(f"{mlflow}/search?max_results=1", headers={"Origin": servers.url("mlflow")}).status_code == 200
    with pytest.raises(InvalidStatus):
        connect(f"{prefect.replace('http', 'ws')}/events/in", origin=Origin(origin["Origin"]), proxy=None).close()
    assert servers.prefect("/flow_runs/count", of_it) == runs


@pytest.mark.slow
def test_the_password_is_in_one_file_and_in_the_homes_profile_of_prefect(servers: LocalServers) -> None:
    home = servers.user_folder.home
    secret = servers.mlflow_password.partition(":")[2].encode()
    of_mlflow = {path.name: path for path in (home / "up").iterdir() if path.name.startswith("mlflow_auth")}
    assert [name for name, path in of_mlflow.items() if secret in path.read_bytes()] == ["mlflow_auth"]
    assert {of_mlflow[name].stat().st_mode & 0o777 for name in ("mlflow_auth", "mlflow_auth.db")} == {0o600}
    assert servers.password.startswith("admin:")
    holders = [path for path in home.rglob("*") if path.is_file() and servers.password.encode() in path.read_bytes()]
    assert {*holders} == {home / "up" / "prefect_auth", home / "prefect" / "profiles.toml"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
    command = [sys.executable, "-m", "prefect", "deployment", "ls"]
    here = {"PREFECT_HOME": str(home / "prefect"), "PREFECT_API_URL": f"{servers.url('prefect')}/api"}
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    assert "Pretrain/quickstart" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
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
    assert changed == {"made": False, "kept": [], "dropped": []}
    assert settings(deployment(servers, NIGHTLY)) == settings(made)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_night_is_one_of_this_machines_time_zone_and_named_by_its_date(servers: LocalServers) -> None:
    (schedule,) = deployment(servers, NIGHTLY)["schedules"]
    assert schedule["schedule"]["timezone"] == tzlocal.get_localzone_name()
    run = servers.wait(servers.submit(NIGHTLY, config={"name": "nights", "data": {"path": "/nowhere"}}))
    assert run["name"].startswith("nights, 20"), run["name"]


@pytest.mark.slow
@pytest.mark.timeout(600)
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cancelled_run_has_no_failed_task_and_no_traceback(servers: LocalServers) -> None:
    # To compile a run of so many steps takes longer than all else here.
    observed = ObservedRun.submitted(servers, "train.steps=100000", "train.compile=off")
    observed.wait_for_step(5)
    listening = {name: addresses_of(servers.process(name)) for name in ("prefect", "mlflow", "worker")}
    assert {ip for addresses in listening.values() for ip, _ in addresses} == {"127.0.0.1"}, "ranks, too"
    for name, port in servers.ports.items():
        assert {each for _, each in listening[name]} == {port}
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_and_worker_serve_every_command_are_mended_and_go(servers: LocalServers) -> None:
    user_folder, found = servers.user_folder, servers.start()
    deployments = servers.prefect("/deployments/filter", {})
    assert {"quickstart", "compare"} <= {deployment["name"] for deployment in deployments}
    queues = servers.prefect("/work_pools/shardline/queues/filter", {})
    assert {queue["name"]: queue["concurrency_limit"] for queue in queues}["training"] == 1

    user_folder.run("pretrain", str(user_folder.config), "train.steps=4", "parallel.strategy=single")
    (folder,) = user_folder.run_dirs()
    run = user_folder.mlflow_run(folder)
    assert servers.wait(run.data.tags["prefect.flow_run_id"], timeout_s=1)["state_type"] == "COMPLETED"
    asked = f"{found['mlflow']}/api/2.0/mlflow/runs/get?run_id={run.info.run_id}"
    mlflow_run = request_json(asked, password=servers.mlflow_password)
    assert mlflow_run["run"]["info"]["status"] == "FINISHED"

    worker, killed = servers.process("worker"), servers.process("mlflow")
    servers.kill("mlflow")
    assert servers.start() == found
    assert servers.process("worker") == worker, "what ran was left alone"
    mended = servers.process("mlflow")
    assert mended != killed
    ours = [process for service in ("prefect", "mlflow", "worker") if (process := servers.process(service))]
    ours += [child for process in ours for child in process.children(recursive=True)]
    assert "worker, mlflow, prefect" in user_folder.run("down")[0]
    assert len(ours) >= 3
    left = psutil.wait_procs(ours, timeout=1)[1]
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert user_folder.mlflow.search_experiments(filter_string="name = 'verses'"), (
        "what was made is there without servers"
    )
