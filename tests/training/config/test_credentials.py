"""No URL with credentials gets into a config, and so into run.json, reports, MLflow, Prefect's database or an error."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, TypeAdapter, ValidationError

from training.config.credentials import problem_of, without_url_credentials
from training.config.run import RunConfig
from training.config.serving import EvaluateConfig, ServeConfig

SECRET = "hunter2"
WITH_CREDENTIALS = [
    f"s3://key:{SECRET}@bucket/runs",
    f"s3://AKIA:a/b+c/{SECRET}@bucket/x",  # unquoted, as AWS writes its keys
    f"https://me:{SECRET}@example.org/a.txt",
    f"https://me:at@{SECRET}@example.org/a.txt",
    f"HTTPS://{SECRET}@example.org/a.txt",
    f"git+https://{SECRET}@example.org/model.git",
    f"ssh://me:{SECRET}@gpu1",
    f"tcp://me:{SECRET}@gpu1:2376",
    f"redis://:{SECRET}@head",
    f"simplecache::s3://key:{SECRET}@bucket/x",
    f"--database=postgresql://me:{SECRET}@db/x",
    f"https://b.s3.amazonaws.com/x.jsonl?X-Amz-Algorithm=AWS4&X-Amz-Signature={SECRET}",
    f"https://storage.googleapis.com/b/x?Expires=9&Signature={SECRET}",
    f"https://account.blob.core.windows.net/c/x?sv=1&sig={SECRET}",
    f"https://example.org/x?access_token={SECRET}",
    f"https://example.org/x#api_key={SECRET}",
]
WITHOUT = [
    "s3://bucket/a:b@c",
    "hf://datasets/owner/name@revision/x.jsonl",
    "abfs://container@account.dfs.core.windows.net/x",
    "ssh://me@gpu1:22",
    "tcp://gpu1:2376",
    "http://localhost:9000/models/x@2",
    "http://[::1]:8080/x@y",
    "docker://me@nvcr.io#nvidia/pytorch:24.01",
    "docker://ubuntu:22.04@sha256:0123",
    "https://zenodo.org/records/1/x.txt?download=1",
    '{"url":"http://head:8080","mail":"me@example.org"}',
]


def texts(part: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("store.url", its type with all its constraints), … of all fields that may hold a text."""
    for name, field in part.model_fields.items():
        inner = [each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type)]
        sections = [each for each in inner if issubclass(each, BaseModel)]
        for section in sections:
            yield from texts(section, f"{prefix}{name}.")
        if not sections:
            kind: Any = field.annotation
            for constraint in field.metadata:
                kind = Annotated[kind, constraint]
            yield f"{prefix}{name}", kind


def given(kind: Any, text: str) -> Any:
    """A value of that type which holds the text; None if there is none."""
    for value in (text, (text,), {"NCCL_IB_HCA": text}, {"example.org/key": text}):
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError:
            continue
        return value
    return None


@functools.cache
def form(of: type[BaseModel]) -> Draft202012Validator:
    """By which Prefect checks a form before it stores anything."""
    return Draft202012Validator(of.model_json_schema())


def refusal(of: type[BaseModel], name: str, value: Any) -> str:
    """What the config says of a value, in a section whose other fields have their defaults."""
    *sections, field = name.split(".")
    content: Any = {field: value}
    for section in reversed(sections):
        content = {section: (content,) if section in ("sources", "hosts", "phases") else content}
    assert not form(of).is_valid(json.loads(json.dumps(content))), name
    with pytest.raises(ValidationError) as refused:
        of.model_validate(content)
    assert SECRET not in str(refused.value), name
    return "\n".join(each["msg"] for each in refused.value.errors() if ".".join(map(str, each["loc"])).endswith(field))


@pytest.mark.parametrize("of", [RunConfig, EvaluateConfig, ServeConfig])
def test_every_field_that_takes_a_text_refuses_it(of: type[BaseModel]) -> None:
    checked = []
    for name, kind in texts(of):
        value = given(kind, WITH_CREDENTIALS[0]) or given(kind, f"ssh://me:{SECRET}@gpu1")
        if value is not None and not name.endswith(".prompts"):  # those are the model's own text
            assert "contains credentials" in refusal(of, name, value), name
            checked.append(name)
    if of is RunConfig:
        known = {"store.url", "model.path", "data.path", "data.tokenizer.path", "data.sources.path", "rollout.servers"}
        known |= {"train.optimizer_path", "launch.hosts.docker", "launch.nccl", "launch.image", "trainer.args"}
        assert known <= {*checked}
        assert len(checked) > 40


@pytest.mark.parametrize("url", WITH_CREDENTIALS)
def test_a_url_with_credentials_is_refused_and_hidden_in_errors(url: str) -> None:
    assert "contains credentials" in refusal(RunConfig, "data.path", url)
    shown = without_url_credentials(f"data.path = {url!r}: no such file")
    assert SECRET not in shown
    assert "***" in shown
    assert problem_of(shown.replace("***@", "")) == ""


@pytest.mark.parametrize("url", WITHOUT)
def test_other_urls_are_taken_and_shown_as_they_are(url: str) -> None:
    assert RunConfig.model_validate({"data": {"path": url}}).data.path == url
    assert form(RunConfig).is_valid({"data": {"path": url}})
    assert without_url_credentials(f"{url} is away") == f"{url} is away"
