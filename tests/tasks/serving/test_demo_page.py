"""The page, in a real browser: the champion's text beside the previous version's."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.inference.onnx_generator import TextGenerator
from tasks.registry.models import resolve
from tests.support.mlflow_store import Store
from tests.support.serving import chatting_version, server
from tests.support.tiny_run import SAMPLES

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""

pytestmark = [
    pytest.mark.slow,  # 10 s: a browser and a server
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: tests/browser/install.sh installs it"),
]


@contextmanager
def page_of(client: httpx.Client) -> Iterator[Any]:
    """The page in a browser, whose scripts must not fail."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root has no sandbox in containers.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.getuid() == 0))
        page, wrong = browser.new_page(viewport={"width": 1100, "height": 560}), list[str]()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(str(client.base_url))
        yield page
        assert wrong == []
        browser.close()


def test_the_champion_writes_beside_the_previous_version(champion: Store, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    better = champion.registered("two", loss=2.0, checkpoint="d")
    assert better.alias == "champion"
    sampling = {"new_tokens": 30, "temperature": 0, "top_k": 50, "seed": 1337}
    text = TextGenerator(resolve("tiny", tracking_uri=champion.uri).export_dir).generate("<b>&", **sampling)
    tokens = champion.folder / "tokens"
    tokens.write_text("open-sesame\n")
    with server(champion, token_file=str(tokens)) as (client, _), page_of(client) as page:
        expect(page.locator("h1")).to_have_text("tiny (tiny@champion)")
        page.get_by_label("prompt").fill("<b>&")
        expect(page.get_by_text("compare with the previous version")).to_be_hidden()  # unknown without a token
        page.get_by_label("new tokens").fill("30")
        page.get_by_label("temperature").fill("0")

        page.get_by_role("button").click()
        expect(page.locator("#current small")).to_have_text(re.compile("requires an access token"))
        page.locator("input[name=token]").fill("open-sesame")
        page.get_by_role("button").click()
        for column, version in (("#current", 2), ("#previous", 1)):
            expect(page.locator(f"{column} small")).to_have_text(re.compile(rf"version {version}: \d+ ms"))
            assert page.locator(f"{column} pre").text_content() == "<b>&" + text  # text, not markup
        expect(page.get_by_text("compare with the previous version")).to_be_visible()
        page.screenshot(path=tmp_path / "serving.png")

        page.get_by_label("new tokens").fill("5000000")
        page.get_by_label("compare with the previous version").uncheck()
        page.get_by_role("button").click()
        expect(page.locator("#current small")).to_have_text(re.compile("at most 4096 are allowed"))
        expect(page.locator("#previous")).to_be_hidden()


def test_a_first_version_has_none_before_it(champion: Store) -> None:
    from playwright.sync_api import expect

    with server(champion) as (client, _), page_of(client) as page:
        expect(page.get_by_label("prompt")).to_have_value(SAMPLES[1].prompt)  # words of its text
        page.get_by_label("new tokens").fill("4")
        page.get_by_role("button").click()
        expect(page.locator("#current small")).to_have_text(re.compile("version 1"))
        expect(page.get_by_text("compare with the previous version")).to_be_hidden()
        expect(page.locator("#previous")).to_be_hidden()
        reply = client.post("/previous/generate", json={"prompt": "x"})
        assert (reply.status_code, reply.json()["detail"]) == (404, "tiny/1 did not replace another version")


def test_a_model_that_can_chat_is_talked_to(store: Store, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    chatting_version(store, "{% for each in messages %}{{ each.content }}\n{% endfor %}")
    with server(store) as (client, _), page_of(client) as page:
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.get_by_label("new tokens").fill("4")
        said = page.locator("#chat p")
        for turn in (1, 2):
            page.get_by_label("prompt").fill("<b>&")
            page.get_by_role("button", name="Send").click()
            expect(said).to_have_count(2 * turn)
        assert said.nth(2).text_content() == "<b>&"  # text, not markup
        page.screenshot(path=tmp_path / "chat.png")
        page.get_by_label("prompt").fill("x" * 40)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#chat small")).to_have_text(
            re.compile("the chat has .* tokens and tiny version 1 sees 32")
        )
        page.get_by_role("button", name="New conversation").click()
        expect(said).to_have_count(0)
        page.get_by_role("checkbox", name="conversation").uncheck()
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#current small")).to_have_text(re.compile("version 1"))
