"""Makes the pictures of pages in docs/ anew: `make pictures`. Two real runs and a server take about 15 minutes.

docs/pictures.json keeps our words in each picture. `--check`, a part of `make docs`, compares them with today's code.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from prefect.flows import load_flow_from_entrypoint

from flows.presets import PRETRAIN
from flows.servers.form import form_schema
from tasks.workspace.processes import end_process, free_port
from tests.support.local_servers import LocalServers, wait_for
from tests.support.prefect_pages import WIDTH, Form, open_browser, shown_fields
from tests.support.repository import REPO
from tests.support.user_folder import UserFolder

DOCS = REPO / "docs"
WORDS = DOCS / "pictures.json"
FORMS = ("form.png", "form-refused.png")
SOURCES = {  # where the words of other pages are
    "run.png": ("flows/*.py", "flows/stages/*.py", "flows/prefect_ui/*.py"),
    "report.png": ("tasks/reports/*.py", "tasks/reports/*.j2"),
    "serving.png": ("tasks/serving/demo_page.html",),
}
SHORT_RUN = ["train.steps=70", "train.target_minutes=0", "registry.notes=Version 1"]
COLOURS = 128
RUN_WITHIN_S = 1800.0
# Of elements that the picture shows.
SEEN = """([selector, height]) => [...document.querySelectorAll(selector)].filter(it => {
    const box = it.getBoundingClientRect(); return box.height && box.top >= 0 && box.bottom <= height;
}).map(it => it.innerText.trim())"""
FIELDS = "label:has(+ p), label + p"


def stale() -> dict[str, list[str]]:
    """Return, by picture, the words that the code does not have any more, and those that the form has since."""
    seen: dict[str, list[str]] = json.loads(WORDS.read_text())
    form = [word for _, *words in shown_fields(form_schema(load_flow_from_entrypoint(PRETRAIN))) for word in words]
    found = {name: _missing(seen[name], form) for name in FORMS}
    found["form.png"] += _missing(form, seen["form.png"])
    for name, patterns in SOURCES.items():
        code = " ".join(path.read_text() for pattern in patterns for path in sorted(REPO.glob(pattern)))
        found[name] = [word for word in seen[name] if word not in code]
    return {name: words for name, words in found.items() if words}


def _missing(words: Iterable[str], known: Iterable[str]) -> list[str]:
    texts = {" ".join(word.split()) for word in known}
    return [word for word in words if " ".join(word.split()) not in texts]


class Camera:
    """Takes pictures of pages into docs/, and keeps their words."""

    def __init__(self) -> None:
        self.words = dict[str, list[str]]()

    def take(self, page: Any, name: str, *, height: int, words: str) -> None:
        """`words`: a selector of the elements that have ours."""
        page.set_viewport_size({"width": WIDTH, "height": height})
        page.wait_for_load_state("networkidle")
        page.screenshot(path=DOCS / name)
        Image.open(DOCS / name).convert("RGB").quantize(COLOURS).save(DOCS / name, optimize=True)
        self.words[name] = page.evaluate(SEEN, [words, height])


def make_pictures(servers: LocalServers, browser: Any) -> Camera:
    camera = Camera()
    refused = Form(browser, servers, "pretrain")
    refused.submit()
    refused.box("config.data.path").get_by_text("'path' is a required property").wait_for()
    refused.label("config.data.path").evaluate("it => it.scrollIntoView({block: 'center'})")
    camera.take(refused.page, "form-refused.png", height=640, words=FIELDS)
    servers.wait(servers.submit("quickstart", overrides=SHORT_RUN), timeout_s=RUN_WITHIN_S)
    form = Form(browser, servers, "quickstart")
    camera.take(form.page, "form.png", height=form.height(), words=FIELDS)
    form.submit()
    form.page.wait_for_url("**/deployments/deployment/*?tab=*")
    run = servers.wait(next(each["id"] for each in form.runs()), timeout_s=RUN_WITHIN_S)
    assert run["state_type"] == "COMPLETED", run["state"]
    page = form.page
    page.goto(f"{servers.url('prefect')}/v2/runs/flow-run/{run['id']}?tab=Artifacts")
    page.locator("canvas").wait_for()
    page.get_by_text("mlflow-run", exact=True).first.wait_for()
    page.wait_for_timeout(3000)  # the graph is drawn, and nothing says when
    camera.take(page, "run.png", height=1240, words="nothing")
    of_it = {"flow_runs": {"id": {"any_": [run["id"]]}}}
    artifacts = servers.prefect("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    keys = {each["key"] for each in artifacts if page.get_by_text(each["key"], exact=True).count()}
    assert "plan" in keys, f"no cards of artifacts among {keys}"
    camera.words["run.png"] = sorted(keys | {each["name"] for each in servers.prefect("/task_runs/filter", of_it)})
    page.goto((servers.user_folder.home / run["name"] / "report.html").as_uri())
    camera.take(page, "report.png", height=1400, words="h2, .tiles div:nth-child(-n+5) small")
    with serving(servers.user_folder) as url:
        page.goto(url)
        page.get_by_label("prompt").fill("def read_lines(path):\n")
        page.get_by_role("button").click()
        page.locator("#previous pre:not(:empty)").wait_for()
        camera.take(page, "serving.png", height=640, words="label, button, h2")
    return camera


@contextmanager
def serving(user_folder: UserFolder) -> Iterator[str]:
    """The address of a server of the champion."""
    port = free_port()
    process = user_folder.start("serve", "quickstart", "--port", str(port))
    try:
        wait_for(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_process(process, grace_s=10)


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        for name, words in (found := stale()).items():
            print(f"docs/{name} is not like the code: {', '.join(map(repr, words))}")
        sys.exit("`make pictures` makes them anew" if found else 0)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        servers = LocalServers(UserFolder(Path(folder)))
        servers.start()
        try:
            camera = make_pictures(servers, browser)
        finally:
            servers.stop()
    WORDS.write_text(json.dumps(camera.words, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
