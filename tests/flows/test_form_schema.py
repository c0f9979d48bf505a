"""What a deployment's form shows, and what Prefect's server takes: by Prefect's own validation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.schema_tools.validation import build_error_obj, is_valid_schema, validate

from flows.presets import PRESETS_FILE
from flows.servers.form import form_schema
from tests.support.prefect_pages import shown_fields
from training.config.run import RunConfig

DEPLOYMENTS = yaml.safe_load(PRESETS_FILE.read_text())["deployments"]
WHOLE = {"name": "a", "train": {"steps": 3}, "model": {"layers": 2}, "launch": {"launcher": "local"}, "registry": {}}


@cache
def schema_of(entrypoint: str) -> dict[str, Any]:
    return form_schema(load_flow_from_entrypoint(entrypoint))


@pytest.fixture
def schema() -> dict[str, Any]:
    return schema_of("flows.pretrain.pretrain")


def refusals(schema: dict[str, Any], config: dict[str, Any]) -> Any:
    """(the field, why) for each problem."""

    def flat(errors: list[Any], place: tuple[str, ...]) -> list[tuple[str, str]]:
        found = []
        for error in errors:
            if isinstance(error, str):
                found.append((".".join(place), error))
            else:
                found += flat(error["errors"], (*place, error["property"]))
        return found

    return flat(build_error_obj(validate({"config": config}, schema))["errors"], ())


@pytest.mark.parametrize("entry", DEPLOYMENTS, ids=lambda entry: entry["name"])
def test_a_form_begins_with_what_runs_differ_in(entry: dict[str, Any]) -> None:
    schema = schema_of(entry["entrypoint"])
    is_valid_schema(schema)
    assert validate(entry.get("parameters", {}), schema, ignore_required=True) == [], "as Prefect judges a deployment"
    labels = [(label, bool(description)) for _, label, description in shown_fields(schema)]
    assert all(described for _, described in labels), labels
    if "config" in entry.get("parameters", {}):
        shown = ["Data", "Path", "Name (Optional)", "Train", "Steps (Optional)", "Target minutes (Optional)", "Model"]
        shown += ["Layers (Optional)", "Width (Optional)", "Heads (Optional)", "Launch", "Launcher (Optional)"]
        shown += ["Hosts (Optional)", "Registry", "Notes (Optional)"]
        assert [label for label, _ in labels][1 : len(shown) + 1] == shown
        assert "overrides (Optional)" in [label for label, _ in labels][len(shown) + 1 : len(shown) + 3]
        assert len(labels) <= 22


def test_the_form_writes_no_path_by_itself(schema: dict[str, Any]) -> None:
    assert "default" not in schema["definitions"]["%44ataConfig"]["properties"]["path"]


def test_a_whole_config_needs_a_path_and_a_part_of_one_does_not(schema: dict[str, Any]) -> None:
    assert refusals(schema, WHOLE | {"data": {}}) == [("config.data.path", "'path' is a required property")]
    assert refusals(schema, WHOLE) == [("config.data", "'data' is a required property")]
    parts: list[dict[str, Any]] = [{"train": {"steps": 3}}, {"data": {"column": "body"}}, {"name": "a", "model": {}}]
    parts += [{"model": {"layers": 2}, "train": {"steps": 3}, "launch": {"launcher": "local"}}]
    sources = {"data": {"sources": [{"path": "texts"}]}}
    for config in (
        *parts,
        WHOLE | sources,
        WHOLE | {"trainer": {"script": "train.py"}},
        WHOLE | {"data": {"path": "a"}},
    ):
        assert refusals(schema, config) == [], config
    assert refusals(schema, RunConfig().model_dump(mode="json")) == [], "what the flow itself says of an empty path"


def test_the_server_checks_fields_that_the_form_does_not_show(schema: dict[str, Any]) -> None:
    bad = {"train": {"steps": -1, "beta2": 2.0, "stpes": 1}, "parallel": {"strategy": "magic"}}
    assert dict(refusals(schema, bad)).keys() == {
        "config.train",
        "config.train.steps",
        "config.train.beta2",
        "config.parallel.strategy",
    }
    assert ("config.train", "Additional properties are not allowed ('stpes' was unexpected)") in refusals(schema, bad)
    assert ("config.train.steps", "-1 is less than the minimum of 1") in refusals(schema, bad)
