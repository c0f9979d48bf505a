"""The dashboard's expressions, evaluated by a real Prometheus that scrapes real metrics: none is empty."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client import start_http_server

from tasks.serving.metrics import ServerMetrics
from tasks.workspace.processes import free_port
from tests.support.local_servers import wait_for
from tests.support.repository import REPO
from tests.support.tiny_shards import MakeRun
from tests.support.waiting import until

DASHBOARD = REPO / "infra" / "grafana" / "dashboards" / "shardline.json"
CONFIG = REPO / "infra" / "prometheus.yml"
SCRAPES_WITHIN_S = 90

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Prometheus: apt-get install prometheus"),
]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Expression by panel, as Grafana fills in `$run` when all are chosen."""
    return {
        f"{panel['title']}, {target['refId']}": target["expr"].replace("$run", ".*")
        for panel in panels()
        for target in panel["targets"]
    }


@pytest.fixture(scope="module")
def home(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SHARDLINE_HOME with a run that was trained, and which goes on for all that its folder says.

    CPUs have no rate in a data sheet: one more row is as a GPU's.
    """
    plan = make_run("tiny-1", train__steps=8)
    run_dir, home = plan.parent, tmp_path_factory.mktemp("home")
    subprocess.run([sys.executable, "-m", "training.train", str(plan)], check=True, capture_output=True, cwd=REPO)
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    last = json.loads(next(row for row in reversed(rows) if '"loss"' in row))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"mfu": 0.41, "eta_s": 60.0}) + "\n")
    shutil.copytree(run_dir, home / "tiny-1")
    return home


@pytest.fixture(scope="module")
def exporter(home: Path) -> Iterator[str]:
    """`shardline metrics` of that home; its address."""
    port = free_port()
    command = [sys.executable, "-m", "flows.cli", "metrics", "--port", str(port)]
    environment = os.environ | {"SHARDLINE_HOME": str(home)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, cwd=REPO) as process:
        wait_for(f"http://127.0.0.1:{port}/metrics", process)
        yield f"127.0.0.1:{port}"
        process.terminate()


@pytest.fixture(scope="module")
def prometheus(exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Our prometheus.yml with addresses of this machine, scraped each second; its URL."""
    served, port = ServerMetrics(), free_port()
    server, _ = start_http_server(port, "127.0.0.1", registry=served.registry)
    served.version.labels("m").set(1)
    quiet = threading.Event()
    threading.Thread(target=make_requests, args=(served, quiet), daemon=True).start()
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "1s"
    here = {"metrics:9464": exporter, "serve:8000": f"127.0.0.1:{port}"}
    for job in config["scrape_configs"]:
        (targets,) = job["static_configs"]
        targets["targets"] = [here[name] for name in targets["targets"]]
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = ["prometheus", *options, f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log, psutil.Popen(command, stdout=log, stderr=log) as process:
        wait_for(f"http://{address}/-/ready", process)
        yield f"http://{address}"
        process.terminate()
    quiet.set()
    server.shutdown()


def make_requests(served: ServerMetrics, quiet: threading.Event) -> None:
    """Count requests as the server of models does: without any, there is no percentile of their seconds."""
    while not quiet.wait(0.1):
        served.requests.labels("m", "1", "200").inc()
        served.seconds.labels("m", "1").observe(0.2)
        served.tokens.labels("m", "1").inc(10)


def ask(prometheus: str, expression: str) -> list[dict[str, Any]]:
    reply = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}, trust_env=False).json()
    assert reply["status"] == "success", f"{expression}: {reply}"
    found: list[dict[str, Any]] = reply["data"]["result"]
    return found


@pytest.mark.parametrize("place", expressions())
def test_every_expression_of_the_dashboard_has_a_value(prometheus: str, place: str) -> None:
    expression = expressions()[place]

    def values() -> list[str]:
        found = [value["value"][1] for value in ask(prometheus, expression)]
        return [value for value in found if value not in {"NaN", "+Inf"}]

    until(values, f"a value of {expression}", within_s=SCRAPES_WITHIN_S)


def test_the_figures_are_the_runs_own(prometheus: str, home: Path) -> None:
    rows = [json.loads(line) for line in (home / "tiny-1" / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    strategy = json.loads((home / "tiny-1" / "plan.json").read_text())["strategy"]
    for name, value in {
        "shardline_run_step": 8,
        "shardline_run_planned_steps": 8,
        "shardline_run_loss_nats": last["loss"],
        "shardline_run_tokens_total": last["tokens"],
        "shardline_run_tokens_per_second": last["tokens_per_s"],
        "shardline_run_peak_memory_bytes": last["memory_peak/resident_gib"] * 2**30,
        "shardline_run_validation_loss_nats": [row["val_loss"] for row in rows if "val_loss" in row][-1],
    }.items():
        (found,) = until(lambda name=name: ask(prometheus, name), name, within_s=SCRAPES_WITHIN_S)  # type: ignore[misc]
        assert float(found["value"][1]) == pytest.approx(value), name
        assert (found["metric"]["run"], found["metric"]["strategy"]) == ("tiny-1", strategy)


def test_names_and_help_are_as_prometheus_wants_them(exporter: str) -> None:
    page = httpx.get(f"http://{exporter}/metrics", trust_env=False).text
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_configuration_is_one() -> None:
    subprocess.run(["promtool", "check", "config", str(CONFIG)], check=True, stdout=subprocess.DEVNULL)


def test_panels_do_not_overlap_and_each_has_a_unit_and_a_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "prometheus"
        taken |= cells
