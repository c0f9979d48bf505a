"""The form of a run in Prefect's own pages, in a real browser: what it shows, what it refuses, what it starts.

SCREENSHOTS=docs keeps pictures of it there.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shop import Shop
from training.config import RunConfig

playwright = pytest.importorskip("playwright.sync_api")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DEADLINE_S = 240
pytestmark = [
    pytest.mark.slow,
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
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def servers(shop: Shop) -> Iterator[dict[str, str]]:
    """Of `shardline up`: URLs by service."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in (first, second)]
    try:
        yield json.loads(shop.run("up", "--prefect-port", ports[0], "--mlflow-port", ports[1], "--json")[0])
    finally:
        shop.run("down", "--force")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def asked(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
        return json.load(answer)


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

    def __init__(self, browser: Any, server: str, deployment: str) -> None:
        (found,) = [it for it in asked(f"{server}/api/deployments/filter", {}) if it["name"] == deployment]
        self.page = browser.new_page(viewport={"width": 1100, "height": 860})
        self.page.goto(f"{server}/v2/deployments/deployment/{found['id']}/run")
        self.server, self.deployment_id = server, found["id"]
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
        found: list[dict[str, Any]] = asked(f"{self.server}/api/flow_runs/filter", of_it)
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
def form(browser: Any, servers: dict[str, str]) -> Iterator[Form]:
    opened = Form(browser, servers["prefect"], "quickstart")
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
    assert "Train (Optional) Batch, schedule, optimizer, seed." in text
    assert "Transformer layers. At least 1, at most 1,000." in text
    layers = form.box("model.layers").locator("input")
    assert (layers.input_value(), layers.get_attribute("min"), layers.get_attribute("max")) == ("4", "1", "1000")
    form.box("parallel.strategy").evaluate("it => it.scrollIntoView()")
    assert form.options("parallel.strategy").all_inner_texts() == form.fields["parallel.strategy"]["enum"]
    form.picture("form.png")


def test_a_bad_value_is_refused_with_the_message_beside_the_field(form: Form, servers: dict[str, str]) -> None:
    form.fill("data.validation_fraction", "2.5")
    form.submit()
    message = form.box("data.validation_fraction").get_by_text("2.5 is greater than or equal to the maximum of 0.9")
    message.wait_for()
    form.picture("form-refused.png", of="data.validation_fraction")
    form.fill("data.validation_fraction", "0.2")
    form.fill("train.global_batch", "0")
    form.submit()
    batch = form.box("train.global_batch").locator("input")
    assert "must be greater than or equal to 1" in batch.evaluate("it => it.validationMessage")
    assert form.runs() == []


def test_a_submitted_run_completes_and_its_page_tells_of_it(form: Form, shop: Shop, servers: dict[str, str]) -> None:
    form.fill("data.path", str(shop.corpus))
    for name, value in SMALL.items():
        form.fill(name, value)
    form.options("parallel.strategy").get_by_text("single", exact=True).click()
    form.submit()
    form.page.wait_for_url("**/deployments/deployment/*?tab=*")
    (run,) = form.runs()
    run = ended(servers["prefect"], run["id"])
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    (folder,) = shop.run_dirs()
    assert run["name"] == folder.name
    assert (folder / "report.html").exists()
    config = json.loads((folder / "plan.json").read_text())["config"]
    assert (config["train"]["steps"], config["parallel"]["strategy"]) == (6, "single")

    form.page.goto(f"{servers['prefect']}/v2/runs/flow-run/{run['id']}?tab=Artifacts")
    for artifact in ("plan", "training", "evaluation", "report", "mlflow-run"):
        form.page.get_by_text(artifact, exact=True).first.wait_for()
    form.page.locator("canvas").wait_for()
    form.picture("run.png")
    tags = {tag["key"]: tag["value"] for tag in mlflow_run(servers["mlflow"], folder)["data"]["tags"]}
    assert tags["prefect.flow_run_url"].endswith(run["id"]), "the way back"
    (link,) = asked(f"{servers['prefect']}/api/artifacts/filter", {"artifacts": {"key": {"any_": ["mlflow-run"]}}})
    assert f"{servers['mlflow']}/#/experiments/" in link["data"]


def ended(server: str, run_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        run: dict[str, Any] = asked(f"{server}/api/flow_runs/{run_id}")
        if run["state_type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}:
            return run
        time.sleep(0.5)
    raise AssertionError(f"the run was {run['state_type']} after {DEADLINE_S} s: {run['state']}")


def mlflow_run(server: str, folder: Path) -> Any:
    run_id = json.loads((folder / "run.json").read_text())["mlflow_run_id"]
    return asked(f"{server}/api/2.0/mlflow/runs/get?run_id={run_id}")["run"]
