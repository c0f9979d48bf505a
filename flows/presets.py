"""Presets and overrides: from `quickstart train.steps=100` to a validated RunConfig."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tasks.display.suggestion import did_you_mean
from tasks.runs.folder import flattened
from tasks.workspace.paths import command
from training.config.credentials import without_url_credentials
from training.config.run import RunConfig
from training.config.serving import EvaluateConfig, ServeConfig
from training.config.size_rule import cleared

C = TypeVar("C", bound=BaseModel)
Shape = dict[str, "Shape"]  # name of a section -> its own sections; fields are not in it

SIZE_FIELD = "model.size="
PRETRAIN = "flows.pretrain.pretrain"
PRESETS_FILE = Path(__file__).with_name("prefect.yaml")  # in a checkout a link to the one at the top; in a wheel a file


def presets(path: Path = PRESETS_FILE) -> dict[str, dict[str, Any]]:
    """Return NAME -> config for every deployment that trains."""
    content = yaml.safe_load(path.read_text())
    return {
        deployment["name"]: deployment["parameters"]["config"]
        for deployment in content["deployments"]
        if deployment["entrypoint"] == PRETRAIN
    }


def load_config(preset: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of a preset or of a YAML file, with `section.field=value` overrides.

    Raises ValueError naming each wrong field, its value and the cure.
    """
    return with_overrides(_read(preset), overrides)


def with_overrides(config: RunConfig | dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return the config with the overrides; a mapping changes in place. Raises as `load_config` does."""
    content = config.model_dump() if isinstance(config, RunConfig) else config
    return _validated(RunConfig, content, overrides)


def serve_config(overrides: Sequence[str]) -> ServeConfig:
    """Apply `inference.field=value` and `serving.field=value` to the defaults. Raises as `load_config` does."""
    return _validated(ServeConfig, {}, overrides)


def evaluate_config(content: dict[str, Any], overrides: Sequence[str]) -> EvaluateConfig:
    """Apply `inference.…`, `evaluation.…` and `data.…` to `content`, in place. Raises as `load_config` does."""
    return _validated(EvaluateConfig, content, overrides)


def command_for_all_steps(config: RunConfig) -> str:
    """Return the command that trains `config` for all of train.steps, without the limit of train.target_minutes.

    It names the config's preset, and the settings that differ from it; empty without one.
    """
    if not (preset := preset_of(config)):
        return ""
    train = config.train.model_copy(update={"target_minutes": 0.0})
    asked = dict(flattened(config.model_copy(update={"train": train}).model_dump(mode="json")))
    by_size = [f"{SIZE_FIELD}{config.model.size}"] if config.model.size else []
    known = dict(flattened(load_config(preset, by_size).model_dump(mode="json")))
    differ = [field for field, value in asked.items() if field != "preset" and known.get(field) != value]
    changed = [f"{field}={_as_yaml(field, asked[field])}" for field in differ]
    return shlex.join([command("shardline"), "pretrain", preset, *by_size, *changed])


def preset_of(config: RunConfig) -> str:
    """Return the name of the preset that `config` began with; empty if it is none, or none of this version.

    Configs of versions that did not write it down have the preset's name.
    """
    return name if (name := config.preset or config.name) in presets() else ""


def _as_yaml(field: str, value: Any) -> str:
    """Return the value as an override writes it. Text stays as it is, where YAML reads it as the same text."""
    if isinstance(value, str) and parse_override(f"{field}={value}")[1] == value:
        return value
    return json.dumps(value)


def shape_of(part: type[BaseModel]) -> Shape:
    """Return the sections of a config. A field that is a mapping is one value, like a list."""
    defaults = {name: field.default for name, field in part.model_fields.items()}
    return {name: shape_of(type(default)) for name, default in defaults.items() if isinstance(default, BaseModel)}


def laid_over(base: dict[str, Any], given: dict[str, Any], *, shape: Shape) -> dict[str, Any]:
    """Return `base` with the fields of `given` in place of its own; `shape`: the sections of both."""
    return base | {
        name: laid_over(base[name], value, shape=shape[name])
        if name in shape and isinstance(value, dict) and isinstance(base.get(name), dict)
        else value
        for name, value in given.items()
    }


def _validated(config: type[C], content: dict[str, Any], overrides: Sequence[str]) -> C:
    for override in sorted(overrides, key=lambda override: not override.startswith(SIZE_FIELD)):
        if override.startswith(SIZE_FIELD):  # it chooses anew what the preset or an earlier size has chosen
            cleared(content)
        _apply(content, override, config)
    try:
        return config.model_validate(content)
    except ValidationError as error:
        raise ValueError("\n".join(_describe_problem(problem, config) for problem in error.errors())) from None


def _read(preset: str) -> dict[str, Any]:
    path = Path(preset)
    if path.suffix in {".yaml", ".yml"}:
        try:
            content = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist: give a preset's name or the path of a YAML file") from None
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            raise ValueError(f"{path} cannot be read as YAML: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} is not a mapping of sections: see the presets in prefect.yaml")
        return content
    known = presets()
    if preset not in known:
        close = did_you_mean(preset, known)
        raise ValueError(f"there is no preset {preset!r}{close}: choose {', '.join(known)}, or a YAML file's path")
    return known[preset] | {"preset": preset}


def _apply(content: dict[str, Any], override: str, config: type[BaseModel]) -> None:
    key, value = parse_override(override, config)
    *sections, field = key.split(".")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ValueError(f"{override!r}: {section} is a field, not a section")
    content[field] = value


def parse_override(override: str, config: type[BaseModel] = RunConfig) -> tuple[str, Any]:
    """Split section.field=value into (section.field, value). Raises ValueError for text of another form."""
    key, found, value = override.partition("=")
    if not found or not key:
        raise ValueError(f"{override!r} is not an override: write section.field=value, for example train.steps=100")
    try:
        return key, _as_the_field_wants(key, value, config)
    except yaml.YAMLError:
        raise ValueError(f"{override!r}: the value is not YAML; quote it") from None


def _as_the_field_wants(key: str, value: str, config: type[BaseModel]) -> Any:
    """Parse a value as YAML, unless its field is text: name=2024 stays "2024", and rebalance=on stays "on"."""
    part: Any = config
    for section in key.split("."):
        found = part.model_fields.get(section) if hasattr(part, "model_fields") else None
        part = found.annotation if found else None
    return value if part is str or value in get_args(part) else yaml.safe_load(value)


def field_rows(
    part: type[BaseModel] = RunConfig, prefix: str = "", *, values: BaseModel | None = None
) -> list[tuple[str, str]]:
    """Return (section.field, description and default) of every field, for people who write overrides.

    `values`: a config, whose value comes first where it is not the default.
    """
    rows = []
    for name, field in part.model_fields.items():
        value = getattr(values, name) if values else field.default
        if isinstance(field.default, BaseModel):
            rows += field_rows(type(field.default), f"{prefix}{name}.", values=value)
        else:
            here = f"{value!r} here. " if value != field.default else ""
            text = " ".join(str(field.description).split())
            rows.append((f"{prefix}{name}", f"{here}{text} Default: {field.default!r}."))
    return rows


def _describe_problem(problem: Any, config: type[BaseModel]) -> str:
    """Return what is wrong with a field of `config`, and its value without credentials."""
    place = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":  # of a section's `check`: it names the fields itself
        return message
    if problem["type"] == "extra_forbidden":
        close = did_you_mean(place, [name for name, _ in field_rows(config)])
        return f"{place} is not a field of the config{close}: `shardline plan --fields` lists them"
    return without_url_credentials(f"{place} = {problem['input']!r}: {message}") if place else message
