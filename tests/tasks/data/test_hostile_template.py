"""A stranger's chat template is read before a run begins: in a process whose time and memory are bounded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tasks.data.tokenizer import load_pretrained, written_by_template
from tests.support.tokenizer_cases import chatml
from training.config.data import TokenizerConfig

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}<|im_start|>"
HOSTILE = {
    "nested ranges": LOOPS + "{% endfor %}",
    "a power of constants": "{{ 7 ** 99999999 }}",  # which Jinja computes where it reads the source
    "long texts": "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
}


def written(folder: Path) -> tuple[str, ...]:
    pretrained = load_pretrained(TokenizerConfig(kind="pretrained", path=str(folder)))
    assert pretrained
    return written_by_template(pretrained)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "nested ranges")) for kind in HOSTILE]
)
def test_a_template_that_does_not_end_is_refused_with_its_folder(kind: str, tmp_path: Path) -> None:
    folder = chatml(tmp_path / "t", template=HOSTILE[kind])
    began = time.process_time()
    with pytest.raises(ValueError, match=r"data\.tokenizer\.path=.*chat template .*(CPU time|ended its process)"):
        written(folder)
    assert time.process_time() - began < 20, "nothing of it runs here"


@pytest.mark.parametrize("template", ["{{ '<|im_start|>' * 10 ** 9 }}", "{{ 'xx' * 10 ** 9 }}<|im_start|>", MACRO])
def test_a_template_that_fills_memory_writes_what_its_source_names(template: str, tmp_path: Path) -> None:
    assert written(chatml(tmp_path / "t", template=template)) == ("<|im_start|>",)


@pytest.mark.parametrize("template", ["{% for", "{{ " + "(" * 5000, "{% if x %}" * 3000])
def test_a_template_that_cannot_be_read_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer\.path=.*chat template .*mend or remove it"):
        written(chatml(tmp_path / "t", template=template))


def test_an_ordinary_template_is_read(tmp_path: Path) -> None:
    assert written(chatml(tmp_path / "t")) == ("<|im_start|>", "<|im_end|>")
