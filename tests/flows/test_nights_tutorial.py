"""docs/tutorials/nights.md from top to bottom: its commands, and the values of its table as the form submits them."""

from __future__ import annotations

import re
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.docs_commands import Fence, fences
from tests.support.local_servers import LocalServers
from tests.support.repository import REPO

PAGE = REPO / "docs" / "tutorials" / "nights.md"
NAME = "tutorial"
NIGHT_S = 600.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * NIGHT_S + 600)]


def entered(defaults: dict[str, Any], *, corpus: Path) -> dict[str, Any]:
    """The deployment's parameters after what the page's table tells a person to enter in the form."""
    parameters = deepcopy(defaults)
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 6, "the table of the form is on the page"
    for where, given in rows:
        if where == "`overrides`":
            parameters["overrides"] = [*parameters.get("overrides", ()), *re.findall(r"`(.+?)`", given)]
            continue
        *sections, names = where.split(" › ")
        target = parameters
        for section in sections:
            target = target[section.strip("`").lower()]
        fields = re.findall(r"`(\w+)`", names)
        texts = [str(corpus)] if "whole path" in given else given.strip("`").split(", ")
        for field, text in zip(fields, texts, strict=True):
            target[field] = yaml.safe_load(text)
    return parameters


def run_fence(fence: Fence, folder: Path) -> None:
    done = subprocess.run(["bash", "-euc", fence.script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{fence.place}: {done.stderr}"


def test_the_page_leads_to_a_champion_a_verdict_and_a_skipped_night(servers: LocalServers, tmp_path: Path) -> None:
    for name in ("docs", "training"):
        (tmp_path / name).symlink_to(REPO / name)
    first_texts, new_texts = (fence for fence in fences((PAGE,)) if fence.mark == "run")
    filters = {"deployments": {"name": {"any_": ["pretrain-nightly"]}}}
    (deployment,) = servers.prefect("/deployments/filter", filters)
    parameters = entered(deployment["parameters"], corpus=tmp_path / "corpus")
    assert parameters["config"]["name"] == NAME

    def night() -> tuple[dict[str, Any], dict[str, str]]:
        """The flow run at its end, and the artifacts of it and of its subflow run, by key."""
        run = servers.wait(servers.submit("pretrain-nightly", **parameters), timeout_s=NIGHT_S)
        inner = servers.prefect("/flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}})
        ids = [run["id"], *(one["id"] for one in inner)]
        shown = servers.prefect("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": ids}}})
        return run, {artifact["key"]: artifact["data"] for artifact in shown}

    def champion() -> int:
        return int(servers.mlflow.get_model_version_by_alias(NAME, "champion").version)

    run_fence(first_texts, tmp_path)
    run, shown = night()
    assert run["state_type"] == "COMPLETED", run["state"]
    assert {"new-text", "plan", "evaluation", "report"} <= {*shown}
    assert champion() == 1

    run_fence(new_texts, tmp_path)
    run, shown = night()
    assert run["state_type"] == "COMPLETED", run["state"]
    assert len(servers.mlflow.search_model_versions(f"name = '{NAME}'")) == 2
    assert "gate" in shown, [*shown]

    run, shown = night()
    assert run["state"]["name"] == "Skipped"
    assert run["state"]["message"] in shown["new-text"].replace("\\", "")

    user_folder = servers.user_folder
    if champion() == 1:
        user_folder.run("promote", NAME, "--force")
    assert champion() == 2
    user_folder.run("rollback", NAME)
    assert champion() == 1
    history = user_folder.run("history", NAME)[0]
    assert "rollback" in history, history
