"""The form of a run in Prefect's own pages, in a real browser: what it shows, what it refuses, what it starts.

SCREENSHOTS=docs keeps pictures of it there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_servers import LocalServers
from training.config.run import RunConfig

playwright = pytest.importorskip("playwright.sync_api")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]

SMALL = {
    "data.tokenizer.vocab_size": "300",
    "data.validation_fraction": "0.2",
    "model.layers": "1",
    "model.width": "32",
    "model.heads": "4",
    "train.steps": "6",
    "train.context": "32",
    "train.warmup_steps": "2",
    "checkpoint.every_steps": "6",
    "evaluation.every_steps": "3",
    "evaluation.sample_tokens": "8",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def fields(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """("train.steps", its schema), … in the order of the form."""
    for name, field in part["properties"].items():
        if "$ref" in field:
            section = schema["$defs"][field["$ref"].rpartition("/")[2]]
            yield from fields(schema, section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


class Form:
    """The custom-run form of a deployment, its fields by their names in the config."""

    def __init__(self, browser: Any, servers: LocalServers, deployment: str) -> None:
        (found,) = [it for it in servers.prefect("/deployments/filter", {}) if it["name"] == deployment]
        self.page = browser.new_page(viewport={"width": 1100, "height": 860})
        self.page.add_init_script(f"localStorage.setItem('prefect-password', btoa('{servers.password}'))")
        self.page.goto(f"{servers.url('prefect')}/v2/deployments/deployment/{found['id']}/run")
        self.servers, self.deployment_id = servers, found["id"]
        schema = RunConfig.model_json_schema()
        self.fields = dict(fields(schema, schema))
        self.label("name").wait_for()

    def label(self, name: str) -> Any:
        """Sections have fields of the same title: the form has them in the order of the config."""
        title = self.fields[name]["title"]
        place = [key for key, field in self.fields.items() if field["title"] == title].index(name)
        return self.page.locator("label").get_by_text(f"{title} (Optional)", exact=True).nth(place)

    def box(self, name: str) -> Any:
        """The label, the description, the input and what is said of it."""
        return self.label(name).locator("xpath=ancestor::*[.//fieldset][1]")

    def fill(self, name: str, value: str) -> None:
        self.box(name).locator("fieldset").locator("input, textarea").fill(value)

    def options(self, name: str) -> Any:
        """Of a dropdown, which it opens."""
        self.box(name).locator("fieldset button").click()
        options = self.page.get_by_role("option")
        options.first.wait_for()
        return options

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit").click()

    def runs(self) -> list[dict[str, Any]]:
        """What was started by it."""
        of_it = {"deployments": {"id": {"any_": [self.deployment_id]}}}
        found: list[dict[str, Any]] = self.servers.prefect("/flow_runs/filter", of_it)
        return found

    def picture(self, name: str, *, of: str = "") -> None:
        folder = os.environ.get("SCREENSHOTS")
        if not folder:
            return
        self.page.wait_for_load_state("networkidle")
        if of:
            self.label(of).evaluate("it => it.scrollIntoView({block: 'center'})")
        self.page.screenshot(path=Path(folder) / name)


@pytest.fixture
def form(browser: Any, servers: LocalServers) -> Iterator[Form]:
    opened = Form(browser, servers, "pretrain")
    yield opened
    opened.page.close()


def test_every_field_is_there_with_its_description_and_choices_are_dropdowns(form: Form) -> None:
    text = " ".join(form.page.locator("body").inner_text().split())
    missing = [
        name
        for name, field in form.fields.items()
        if f"{field['title']} (Optional) {' '.join(field['description'].split())}" not in text
    ]
    assert missing == []
    assert "Train (Optional) Batch size, learning-rate schedule, optimizer and seed." in text
    assert "Transformer layers. At least 1, at most 1,000." in text
    layers = form.box("model.layers").locator("input")
    assert (layers.input_value(), layers.get_attribute("min"), layers.get_attribute("max")) == ("4", "1", "1000")
    form.box("parallel.strategy").evaluate("it => it.scrollIntoView()")
    assert form.options("parallel.strategy").all_inner_texts() == form.fields["parallel.strategy"]["enum"]
    form.picture("form.png")


def test_a_bad_value_is_refused_with_the_message_beside_the_field(form: Form) -> None:
    form.fill("data.validation_fraction", "2.5")
    form.submit()
    message = form.box("data.validation_fraction").get_by_text("2.5 is greater than or equal to the maximum of 0.9")
    message.wait_for()
    form.picture("form-refused.png", of="data.validation_fraction")
    form.fill("data.validation_fraction", "0.2")
    form.fill("data.path", "s3://key:hunter2@bucket/x")
    form.submit()
    form.box("data.path").get_by_text("a URL with credentials, which would be stored").wait_for()
    form.fill("data.path", "s3://bucket/x")
    form.fill("train.global_batch", "0")
    form.submit()
    batch = form.box("train.global_batch").locator("input")
    assert "must be greater than or equal to 1" in batch.evaluate("it => it.validationMessage")
    assert form.runs() == []


def test_a_submitted_run_completes_and_its_page_tells_of_it(form: Form, servers: LocalServers) -> None:
    form.fill("data.path", str(servers.user_folder.corpus))
    for name, value in SMALL.items():
        form.fill(name, value)
    form.options("parallel.strategy").get_by_text("single", exact=True).click()
    form.submit()
    form.page.wait_for_url("**/deployments/deployment/*?tab=*")
    (run,) = form.runs()
    run = servers.wait(run["id"])
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    (folder,) = servers.user_folder.run_dirs()
    assert run["name"] == folder.name
    assert (folder / "report.html").exists()
    config = json.loads((folder / "plan.json").read_text())["config"]
    assert (config["train"]["steps"], config["parallel"]["strategy"]) == (6, "single")

    form.page.goto(f"{servers.url('prefect')}/v2/runs/flow-run/{run['id']}?tab=Artifacts")
    for artifact in ("plan", "training", "evaluation", "report", "mlflow-run"):
        form.page.get_by_text(artifact, exact=True).first.wait_for()
    form.page.locator("canvas").wait_for()
    form.picture("run.png")
    tags = servers.mlflow.get_run(json.loads((folder / "run.json").read_text())["mlflow_run_id"]).data.tags
    assert tags["prefect.flow_run_url"].endswith(run["id"]), "the way back"
    (link,) = servers.prefect("/artifacts/filter", {"artifacts": {"key": {"any_": ["mlflow-run"]}}})
    form.page.goto(re.search(rf"{servers.url('mlflow')}/#/experiments/[^)]+", link["data"])[0])  # type: ignore[index]
    form.page.get_by_role("heading", name=folder.name).wait_for()
    assert form.page.get_by_text("Sessions", exact=True).count() == 0, "not MLflow's pages of GenAI"


def test_a_page_of_another_origin_reads_and_starts_nothing(browser: Any, servers: LocalServers) -> None:
    runs = servers.prefect("/flow_runs/count", {})
    (found,) = [it for it in servers.prefect("/deployments/filter", {}) if it["name"] == "quickstart"]
    page = browser.new_page()
    page.goto(f"{servers.url('mlflow')}/health")  # another port is another origin
    ask = """async ([url, mode, type]) => {
        const request = {method: "POST", mode, body: "{}", headers: {"content-type": type}, credentials: "include"};
        try { return (await fetch(url, request)).status } catch (error) { return String(error) }
    }"""
    start = f"{servers.url('prefect')}/api/deployments/{found['id']}/create_flow_run"
    for url in (start, f"{servers.url('prefect')}/api/deployments/filter"):
        assert page.evaluate(ask, [url, "cors", "application/json"]) == "TypeError: Failed to fetch"
        assert page.evaluate(ask, [url, "no-cors", "text/plain"]) == 0, "sent, and nothing of the answer is seen"
    assert servers.prefect("/flow_runs/count", {}) == runs
