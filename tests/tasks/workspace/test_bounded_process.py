"""A chat template that fails or fills memory is a refused chat, and the next chat is rendered.

One that loops is in test_http_requests.py, because it takes seconds.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tasks.workspace.bounded_process import BoundedTemplate

TEMPLATE = (
    "{% set text = messages[0].content %}"
    "{% if text == 'divide' %}{{ 1 / 0 }}{% elif text == 'miss' %}{{ messages[7].content.x }}"
    "{% elif text == 'fill' %}{{ 'x' * 10**10 }}{% elif text == 'write' %}{{ 'x' * 10**8 }}"
    "{% else %}{{ text }}{{ eos_token }}{% endif %}"
)


def test_the_next_chat_is_rendered() -> None:
    template = BoundedTemplate(TEMPLATE, {"eos_token": "</s>"})

    def render(text: str) -> str:
        return template.render([{"role": "user", "content": text}])

    assert render("größer\n\U000f0000") == "größer\n\U000f0000</s>"
    for text, says in (
        ("divide", "refuses these messages: division by zero"),
        ("miss", "refuses these messages: list object has no element 7"),
        ("fill", "refuses these messages: MemoryError"),
        ("write", "makes 100000000 characters of these messages"),
    ):
        with pytest.raises(ValueError, match=says):
            render(text)
        assert render("x") == "x</s>"
    assert template.process._process
    template.process._process.kill()
    template.process._process.wait()
    with pytest.raises(ValueError, match="ended its process"):
        render("x")
    assert render("x") == "x</s>", "started again"
    template.process.close()
    with pytest.raises(ValueError, match="refuses these messages: unexpected 'end of template'"):
        BoundedTemplate("{% for", {}).render([])


def test_a_process_that_does_not_start_or_answer_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = BoundedTemplate(TEMPLATE, {"eos_token": "</s>"})
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        with pytest.raises(RuntimeError, match="did not start"):
            template.render([{"role": "user", "content": "x"}])
    monkeypatch.setenv("SECRET", "x")
    assert template.render([{"role": "user", "content": "x"}]) == "x</s>"
    assert template.process._process
    assert b"SECRET" not in Path(f"/proc/{template.process._process.pid}/environ").read_bytes()
    template.process._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("tasks.workspace.bounded_process.WALL_S", 0.1)
    with pytest.raises(ValueError, match=r"took more than 0\.1 s"):
        template.render([{"role": "user", "content": "x"}])
    template.process.close()
