"""A deployment's form in Prefect's own pages, in a real browser: what it shows, what it refuses, what it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from flows.presets import presets
from tests.support.local_servers import LocalServers
from tests.support.prefect_pages import BROWSER, Form, open_browser

pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]

SMALL = (
    "data.tokenizer.vocab_size=300",
    "data.validation_fraction=0.2",
    "model.kv_heads=2",
    "train.context=32",
    "train.warmup_steps=2",
    "checkpoint.every_steps=6",
    "evaluation.every_steps=3",
    "evaluation.sample_tokens=8",
    "parallel.strategy=single",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def new_page_of_mlflow(browser: Any, servers: LocalServers) -> Any:
    """A page of a browser into which somebody has typed MLflow's password."""
    user, _, password = servers.mlflow_password.partition(":")
    return browser.new_context(http_credentials={"username": user, "password": password}).new_page()


@pytest.fixture
def form(browser: Any, servers: LocalServers) -> Iterator[Form]:
    opened = Form(browser, servers, "pretrain")
    yield opened
    opened.page.close()


@pytest.mark.parametrize("deployment", ["pretrain", "quickstart", "pretrain-nightly", "compare", "promote"])
def test_a_form_has_few_fields_each_with_its_description(browser: Any, servers: LocalServers, deployment: str) -> None:
    form = Form(browser, servers, deployment)
    text = " ".join(form.page.locator("body").inner_text().split())
    said = [" ".join(f"{label} {description}".split()) for _, label, description in form.fields]
    assert [each for each in said if each not in text] == []
    places = [text.index(each) for each in said]
    assert places == sorted(places)
    assert form.page.locator("main, body").locator("input:visible, textarea:visible").count() <= 25
    assert form.height() < 3000, "30,000 pixels with every field of the config"
    form.page.close()


def test_an_empty_path_is_refused_and_so_are_bad_values_each_beside_its_field(form: Form) -> None:
    layers = form.input("config.model.layers")
    assert (layers.get_attribute("min"), layers.get_attribute("max")) == ("1", "1000")
    form.submit()
    form.box("config.data.path").get_by_text("'path' is a required property").wait_for()
    form.fill("config.data.path", "s3://key:hunter2@bucket/x")
    form.submit()
    form.box("config.data.path").get_by_text("a URL with credentials, which would be stored").wait_for()
    form.fill("config.data.path", "s3://bucket/x")
    form.fill("config.name", "two words")
    form.submit()
    form.box("config.name").get_by_text("'two words' does not match").wait_for()
    form.fill("config.name", "words")
    form.fill("config.data.path", "")
    form.submit()
    form.box("config.data").get_by_text(re.compile("'(path|data)' is a required property")).wait_for()
    form.fill("config.data.path", "s3://bucket/x")
    form.fill("config.train.steps", "0")
    form.submit()
    steps = form.input("config.train.steps")
    assert "must be greater than or equal to 1" in steps.evaluate("it => it.validationMessage")
    assert form.runs() == []


def test_a_submitted_run_has_what_was_filled_in_and_the_rest_of_its_deployment(
    browser: Any, servers: LocalServers
) -> None:
    form, preset = Form(browser, servers, "quickstart"), presets()["quickstart"]
    assert form.input("config.data.path").input_value() == "stdlib"
    filled = {"data.path": str(servers.user_folder.corpus), "name": "mine", "train.steps": "6"}
    filled |= {"model.layers": "1", "model.width": "32", "model.heads": "4", "registry.notes": "of the form"}
    for name, value in filled.items():
        form.fill(f"config.{name}", value)
    form.add_overrides(*SMALL)
    form.submit()
    form.page.wait_for_url("**/deployments/deployment/*?tab=*")
    (run,) = form.runs()
    run = servers.wait(run["id"])
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    (folder,) = servers.user_folder.run_dirs()
    assert run["name"] == folder.name
    assert (folder / "report.html").exists()
    config = json.loads((folder / "plan.json").read_text())["config"]
    got = {name: config[name.split(".")[0]] for name in filled}
    got = {name: part[name.split(".")[1]] if "." in name else part for name, part in got.items()}
    assert {name: str(value) for name, value in got.items()} == filled
    assert (config["preset"], config["train"]["context"], config["parallel"]["strategy"]) == (
        "quickstart",
        32,
        "single",
    )
    kept = {"beta2", "learning_rate", "global_batch"}
    assert {name: config["train"][name] for name in kept} == {name: preset["train"][name] for name in kept}
    assert config["checkpoint"]["keep_last"] == preset["checkpoint"]["keep_last"]

    form.page.goto(f"{servers.url('prefect')}/v2/runs/flow-run/{run['id']}?tab=Artifacts")
    for artifact in ("plan", "training", "evaluation", "report", "mlflow-run"):
        form.page.get_by_text(artifact, exact=True).first.wait_for()
    form.page.locator("canvas").wait_for()
    tags = servers.mlflow.get_run(json.loads((folder / "run.json").read_text())["mlflow_run_id"]).data.tags
    assert tags["prefect.flow_run_url"].endswith(run["id"]), "the way back"
    (link,) = servers.prefect("/artifacts/filter", {"artifacts": {"key": {"any_": ["mlflow-run"]}}})
    page = new_page_of_mlflow(browser, servers)
    page.goto(re.search(rf"{servers.url('mlflow')}/#/experiments/[^)]+", link["data"])[0])  # type: ignore[index]
    page.get_by_role("heading", name=folder.name).wait_for()
    assert page.get_by_text("Sessions", exact=True).count() == 0, "not MLflow's pages of GenAI"
    page.close()
    form.page.close()


def test_a_deployments_own_form_changes_what_it_shows_and_keeps_the_rest(browser: Any, servers: LocalServers) -> None:
    form = Form(browser, servers, "pretrain-nightly", page="edit")
    before = servers.prefect(f"/deployments/{form.deployment_id}")["parameters"]
    form.fill("config.data.path", "/srv/texts")
    form.page.get_by_role("button", name="Save").click()
    form.page.wait_for_url(f"**/deployments/deployment/{form.deployment_id}?*")
    after = servers.prefect(f"/deployments/{form.deployment_id}")["parameters"]
    assert after["config"]["data"] == before["config"]["data"] | {"path": "/srv/texts"}
    assert after["config"]["gates"] == before["config"]["gates"]
    assert {**after["config"]["train"], **before["config"]["train"]} == after["config"]["train"]
    form.page.close()


def test_a_page_of_another_origin_reads_and_starts_nothing(browser: Any, servers: LocalServers) -> None:
    of_it = {"deployments": {"name": {"any_": ["quickstart"]}}}  # Prefect makes those of schedules meanwhile
    runs = servers.prefect("/flow_runs/count", of_it)
    (found,) = [it for it in servers.prefect("/deployments/filter", {}) if it["name"] == "quickstart"]
    page = new_page_of_mlflow(browser, servers)
    page.goto(f"{servers.url('mlflow')}/health")  # another port is another origin
    ask = """async ([url, mode, type]) => {
        const [headers, body] = [{"content-type": type}, '{"name": "evil"}'];
        const request = {method: "POST", mode, body, headers, credentials: "include"};
        try { return (await fetch(url, request)).status } catch (error) { return String(error) }
    }"""
    start = f"{servers.url('prefect')}/api/deployments/{found['id']}/create_flow_run"
    for url in (start, f"{servers.url('prefect')}/api/deployments/filter"):
        assert page.evaluate(ask, [url, "cors", "application/json"]) == "TypeError: Failed to fetch"
        assert page.evaluate(ask, [url, "no-cors", "text/plain"]) == 0, "sent, and nothing of the answer is seen"
    assert servers.prefect("/flow_runs/count", of_it) == runs

    page.goto(f"{servers.url('prefect')}/api/health")  # and so is this one to MLflow, whose password the browser has
    experiments = f"{servers.url('mlflow')}/api/2.0/mlflow/experiments"
    for url in (f"{experiments}/search", f"{experiments}/create"):
        assert page.evaluate(ask, [url, "cors", "application/json"]) == "TypeError: Failed to fetch"
        assert page.evaluate(ask, [url, "no-cors", "text/plain"]) == 0
    assert [it.name for it in servers.mlflow.search_experiments(filter_string="name = 'evil'")] == []
