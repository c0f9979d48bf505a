"""Prefect's pages in a real browser: the form of a deployment, its fields by their names in the config."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.local_servers import LocalServers

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTH, HEIGHT = 1100, 860


@contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Root has no sandbox in containers.
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"] * (os.getuid() == 0))
        yield opened
        opened.close()


def shown_fields(schema: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, label, description) of what a form shows of a deployment's schema, from top to bottom."""

    def within(part: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
        for name, field in sorted(part["properties"].items(), key=lambda item: item[1]["position"]):
            section = schema["definitions"][field["$ref"].removeprefix("#/definitions/")] if "$ref" in field else {}
            whole = section | field
            optional = "" if name in part.get("required", ()) else " (Optional)"
            yield f"{prefix}{name}", whole["title"] + optional, whole.get("description", "")
            if "properties" in whole:
                yield from within(whole, f"{prefix}{name}.")

    return list(within(schema, ""))


class Form:
    """A form of a deployment: for a run of it, or for itself (`page`: edit)."""

    def __init__(self, browser: Any, servers: LocalServers, deployment: str, *, page: str = "run") -> None:
        (found,) = [it for it in servers.prefect("/deployments/filter", {}) if it["name"] == deployment]
        self.page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        self.page.add_init_script(f"localStorage.setItem('prefect-password', btoa('{servers.password}'))")
        self.page.goto(f"{servers.url('prefect')}/v2/deployments/deployment/{found['id']}/{page}")
        self.servers, self.deployment_id = servers, found["id"]
        self.fields = shown_fields(found["parameter_openapi_schema"])
        self.label(self.fields[0][0]).wait_for()

    def label(self, name: str) -> Any:
        """Sections have fields of the same title: the form has them in the order of the schema."""
        texts = [text for _, text, _ in self.fields]
        place = [field for field, _, _ in self.fields].index(name)
        return self.page.locator("label").get_by_text(texts[place], exact=True).nth(texts[:place].count(texts[place]))

    def box(self, name: str) -> Any:
        """The label, the description, the input and what is said of it."""
        return self.label(name).locator("xpath=ancestor::*[./fieldset][1]")

    def input(self, name: str) -> Any:
        return self.box(name).locator("fieldset").locator("input, textarea")

    def fill(self, name: str, value: str) -> None:
        self.input(name).fill(value)

    def add_overrides(self, *overrides: str) -> None:
        box = self.box("overrides")
        for override in overrides:
            box.get_by_role("button", name="Add item").click()
            box.locator("textarea").last.fill(override)

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit").click()

    def runs(self) -> list[dict[str, Any]]:
        """What was started by it."""
        of_it = {"deployments": {"id": {"any_": [self.deployment_id]}}}
        found: list[dict[str, Any]] = self.servers.prefect("/flow_runs/filter", of_it)
        return found

    def height(self) -> int:
        """Pixels of the whole page, however it scrolls."""
        return int(self.page.evaluate("Math.max(...[...document.querySelectorAll('*')].map(it => it.scrollHeight))"))
