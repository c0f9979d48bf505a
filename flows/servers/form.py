"""The form of a deployment on Prefect's page: the few fields in which runs differ, instead of the whole config.

Prefect makes the form from the schema by which its server checks parameters, those of its API too. All of RunConfig
would be 200 inputs; and a field that the form requires would be missed in a run whose `config` is a part of one. So the
form gets sections of its own, which the server does not see: the page looks a reference up as it is written, the server
decodes it first. `#/definitions/%44ataConfig` is a definition of that name to the page, and DataConfig to the server.
If a later page decodes it as well, it shows the whole config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect import Flow

FIELDS: dict[str, tuple[str, ...]] = {  # in this order; fields of a section
    "data": ("path",),
    "name": (),
    "train": ("steps", "target_minutes"),
    "model": ("layers", "width", "heads"),
    "launch": ("launcher", "hosts"),
    "registry": ("notes",),
}
REQUIRED = {"data.path"}
REST = (
    "All other fields have this deployment's values. `overrides` changes them; so does Use JSON Input, in the menu, "
    "which shows what the deployment sets."
)
# What the server adds to RunConfig. The form writes these sections, so that a config which has them is no part of one.
NEEDS_PATH: dict[str, Any] = {
    "if": {
        "required": ["model", "train", "launch", "registry"],
        "properties": {
            "data": {"properties": {"sources": {"maxItems": 0}}},
            "trainer": {"properties": {"module": {"maxLength": 0}, "script": {"maxLength": 0}}},
        },
    },
    "then": {"required": ["data"], "properties": {"data": {"required": ["path"]}}},
}


def form_schema(flow: Flow[Any, Any]) -> dict[str, Any]:
    """Return the schema of a flow's parameters: what its form shows, and what Prefect's server accepts."""
    from prefect.utilities.callables import parameter_schema

    schema = parameter_schema(flow).model_dump(mode="json", exclude_unset=True)
    parameters: dict[str, Any] = schema["properties"]
    if "config" in parameters:
        parameters["config"] |= {"$ref": _shown_config(schema["definitions"]), "description": REST}
        schema["definitions"]["RunConfig"] |= NEEDS_PATH
        first = [*schema["required"], "overrides"]
        for position, name in enumerate([*first, *(name for name in parameters if name not in first)]):
            parameters[name]["position"] = position
    return schema


def _shown_config(definitions: dict[str, Any]) -> str:
    """Add the form's sections to the definitions; return the reference to that of the config."""
    config = dict[str, Any]()
    for name, fields in FIELDS.items():
        config[name] = definitions["RunConfig"]["properties"][name]
        if fields:
            section = config[name]["$ref"].rpartition("/")[2]
            properties = {field: definitions[section]["properties"][field] for field in fields}
            required = [field for field in fields if f"{name}.{field}" in REQUIRED]
            for field in required:  # the form would write the default, and find nothing missing
                properties[field] = {key: value for key, value in properties[field].items() if key != "default"}
            config[name] = {"$ref": _add_shown(definitions, section, properties, required)}
    return _add_shown(definitions, "RunConfig", config, [name for name, fields in FIELDS.items() if fields])


def _add_shown(definitions: dict[str, Any], section: str, properties: dict[str, Any], required: list[str]) -> str:
    """Add the definition of a section as the form shows it, by the key that only the page looks up."""
    key = f"%{ord(section[0]):X}{section[1:]}"
    placed = {name: field | {"position": position} for position, (name, field) in enumerate(properties.items())}
    definitions[key] = definitions[section] | {"properties": placed, "required": required}
    return f"#/definitions/{key}"
