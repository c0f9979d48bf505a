"""Requests as strangers, other servers' clients and attackers send them, to a real server: none is a 500 or a hang."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from pydantic import SecretStr

from tasks.promotion.servers import read_counts
from tests.support.mlflow_store import Store
from tests.support.serving import chatting_version, server, store_of_module
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # 20 s: one server for all, and one with few files

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ message.role[0] }}{{ message.content }}\n{% endfor %}"
)
LIMITS: dict[str, Any] = {
    "max_new_tokens": 100_000,
    "max_concurrent": 2,
    "max_waiting": 2,
    "timeout_s": 60,
    "cors_origins": ["https://page.example"],
}


@pytest.fixture(scope="module")
def chatting(empty_store: Path, exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with store_of_module(empty_store, exported_run, tmp_path_factory) as store:
        chatting_version(store, TEMPLATE)
        yield store


@pytest.fixture(scope="module")
def client(chatting: Store) -> Iterator[httpx.Client]:
    with server(chatting, **LIMITS) as (client, _):
        yield client


def completion(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2, **fields})


def chat(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "tiny", "max_tokens": 2, "messages": messages, **fields})


def raw(client: httpx.Client, *parts: bytes) -> bytes:
    """Send bytes as they are, in so many packets; return the reply up to its end or 10 s of silence."""
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        reply = b""
        while piece := connection.recv(65536):
            reply += piece
            head, _, body = reply.partition(b"\r\n\r\n")
            lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if lengths and len(body) >= lengths[0]:
                break
    return reply


def test_errors_have_the_form_of_the_protocol_and_say_the_cure(client: httpx.Client) -> None:
    as_json = {"Content-Type": "application/json"}
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
    for says, status, reply in (
        ("the path is /v1/chat/completions", 404, client.post("/chat/completions", json={})),
        ("OpenAI's are POST /v1/chat/completions", 404, client.post("/v1/responses", json={})),
        ("takes POST, not GET", 405, client.get("/v1/completions")),
        ("send Content-Type: application/json", 400, client.post("/v1/completions", content=body)),
        (
            "is text/plain: send",
            415,
            client.post("/v1/completions", content=body, headers={"Content-Type": "text/plain"}),
        ),
        (
            "is text/json: send",
            415,
            client.post("/v1/completions", content=body, headers={"Content-Type": "text/json"}),
        ),
        *(
            ("is not a JSON object", 400, client.post("/v1/completions", content=each, headers=as_json))
            for each in (b"", b"null", b"[]", b'"x"')
        ),
        ("prompt: send a text, the IDs of its tokens", 400, completion(client, prompt=["a", 1])),
        ("read and write text only", 400, chat(client, {"role": "user", "content": [{"type": "image_url"}]})),
        (
            "not JSON: Expecting value at character 10",
            400,
            client.post("/v1/completions", content=b'{"model": ', headers=as_json),
        ),
        (
            "body cannot be read",
            400,
            client.post("/v1/completions", content=b"[" * 40_000, headers=as_json),
        ),
        (
            "body cannot be read",
            400,
            client.post("/v1/completions", content=b'{"model": "\xff"}', headers=as_json),
        ),
        ("at most 1000000", 413, client.post("/v1/completions", content=b" " * 1_000_001, headers=as_json)),
        ("at most 1000000", 413, client.post("/v1/completions", content=iter([b" " * 1_000_001]), headers=as_json)),
        (
            "without compression",
            415,
            client.post("/v1/completions", content=body, headers=as_json | {"Content-Encoding": "gzip"}),
        ),
        ("sees 32", 400, chat(client, {"role": "user", "content": "hello " * 9000})),
        ("takes more than 2 s", 400, chat(client, {"role": "loop", "content": "x"})),
        ("1 to 128", 400, completion(client, prompt=[])),
    ):
        assert reply.status_code == status, reply.text
        assert says in reply.json()["error"]["message"]
    too_long = chat(client, {"role": "user", "content": "hello " * 9000})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    for path in ("/health", "/v1/models", "/v1/models/tiny"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(client.get(path).content)
    assert client.post("/generate", content=b"{}").json()["detail"].startswith("the request's Content-Type is missing")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.nip.io", "localhost.evil.example"])
def test_a_site_whose_name_leads_to_the_server_reads_nothing_of_it(host: str, client: httpx.Client) -> None:
    for path in ("/", "/health", "/metrics", "/example", "/v1/models", "/openapi.json"):
        reply = client.get(path, headers={"host": host})
        assert reply.status_code == 403, path
        assert "ask under its address, or add the name to serving.host_names" in reply.text
    body = {"prompt": "def ", "new_tokens": 1}
    assert client.post("/generate", json=body, headers={"host": host}).status_code == 403
    assert client.post("/generate", json=body, headers={"host": "model:8000"}).status_code == 200


def test_no_page_of_it_loads_anything_from_elsewhere(client: httpx.Client) -> None:
    assert [client.get(path).status_code for path in ("/docs", "/redoc", "/docs/oauth2-redirect")] == [404] * 3
    assert "/generate" in client.get("/openapi.json").json()["paths"]
    assert not re.findall(r"""(?:src|href|url|import|fetch)\s*[=(]\s*["'`]?(?:https?:)?//""", client.get("/").text)


def test_a_page_of_an_origin_that_is_named_may_call_it(client: httpx.Client) -> None:
    for origin, allowed in (("https://page.example", "https://page.example"), ("https://other.example", None)):
        asking = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        assert client.options("/v1/completions", headers=asking).headers.get("access-control-allow-origin") == allowed


def turns_of_openai(base_url: str) -> Iterator[str]:
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as by_openai:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        for _ in range(3):
            said = by_openai.chat.completions.create(model="tiny", messages=messages, max_tokens=2, temperature=0)
            messages += [said.choices[0].message, {"role": "user", "content": "b"}]
            yield said.choices[0].message.content or ""


def turns_of_langchain(base_url: str) -> Iterator[str]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=base_url, api_key=SecretStr("any"), model="tiny", max_retries=0, temperature=0, max_completion_tokens=2
    )
    messages: list[Any] = [("user", "a")]
    for _ in range(3):
        said = model.invoke(messages)
        messages += [said, ("user", "b")]
        yield str(said.content)


def turns_of_litellm(base_url: str) -> Iterator[str]:
    import litellm

    messages: list[Any] = [{"role": "user", "content": "a"}]
    for _ in range(3):
        said = litellm.completion(
            "openai/tiny",
            base_url=base_url,
            api_key="any",
            messages=messages,
            max_tokens=2,
            temperature=0,
            num_retries=0,
        )
        messages += [said.choices[0].message, {"role": "user", "content": "b"}]
        yield said.choices[0].message.content


def test_a_reply_is_taken_back_from_each_client(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client made of a reply stands in its next request; they differ in the fields that they add."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no prices from the network
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    expected = list(turns_of_openai(f"{client.base_url}/v1"))
    for turns in (turns_of_langchain, turns_of_litellm):
        assert list(turns(f"{client.base_url}/v1")) == expected, turns.__name__


def test_a_reply_can_be_sent_back(client: httpx.Client) -> None:
    user, text = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for name, message in {
        "all fields of openai's": text
        | {"refusal": None, "tool_calls": None, "function_call": None, "annotations": [], "audio": None},
        "no content": {"role": "assistant", "content": None},
        "a refusal": {"role": "assistant", "content": None, "refusal": "no"},
        "parts": {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        "of a model that thinks": text | {"reasoning_content": "hm"},
    }.items():
        assert chat(client, user, message, user).status_code == 200, name
    for says, message in {
        "calls no tools": text
        | {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        "color is not a field": text | {"color": "red"},
        "content of a message of role 'user' is missing": {"role": "user"},
    }.items():
        refused = chat(client, user, message)
        assert (refused.status_code, says in refused.text) == (400, True), refused.text
    options = {"include_usage": True, "include_obfuscation": False}
    assert completion(client, stream=True, stream_options=options).status_code == 200


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(300):
    NESTED = {"type": "array", "items": NESTED}
REPORTED: tuple[tuple[dict[str, Any], int], ...] = (  # fields, status
    ({"stop": "x"}, 200),
    ({"stop": []}, 200),
    ({"stop": None}, 200),
    ({"stop": ""}, 400),
    ({"stop": ["a", ""]}, 400),
    ({"logit_bias": {"97": 1}}, 200),
    ({"logit_bias": {"a": 1}}, 400),
    ({"logit_bias": None}, 200),
    ({"max_tokens": None}, 200),
    ({"max_tokens": 0}, 200),
    ({"max_tokens": -1}, 400),
    ({"max_tokens": 10**30}, 400),
    ({"max_tokens": "2"}, 200),
    ({"max_tokens": 1.5}, 400),
    ({"seed": -1}, 200),
    ({"seed": 10**30}, 400),
    ({"temperature": 1e-320}, 200),
    ({"temperature": "NaN"}, 400),
    ({"top_p": 0}, 400),
    ({"n": 0}, 400),
    ({"n": 2, "stream": True, "stream_options": {"include_usage": True}}, 200),
    ({"user": "me", "metadata": {"a": "\ud800"}}, 200),
    ({"\ud800": 1}, 400),
    ({"prompt": "a\0b"}, 200),
    ({"prompt": "", "echo": True, "logprobs": 1}, 200),
    ({"prompt": [], "n": 1}, 400),
    ({"prompt": [[]]}, 200),
    ({"prompt": [-1]}, 400),
    ({"prompt": [True]}, 400),
    ({"prompt": [[5], [999]], "logprobs": 1, "stream": True}, 400),
    ({"prompt": None}, 400),
    ({"model": "org/other"}, 404),
    ({"model": "\U0001f600"}, 404),
    ({"response_format": {"type": "text"}}, 200),
    ({"response_format": {"type": "json_schema"}}, 400),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NESTED}}}, 400),
    ({"structured_outputs": {"json": {"const": "\ud800"}}}, 400),
    ({"structured_outputs": {"json": {"const": 10**400}}}, 400),
    ({"structured_outputs": {"regex": "a" * 300_000}}, 400),
    ({"structured_outputs": {"regex": "((a{9999}){9999}){9999}b"}}, 400),
    ({"structured_outputs": {"regex": ""}}, 200),
    ({"logit_bias": {"97": math.nan}}, 400),
    ({"logit_bias": {str(10**30): 1}}, 400),
    ({"prompt": "a\ud800", "stream": True}, 400),
    ({"prompt": [10**30], "echo": True, "logprobs": 0}, 400),
    ({"prompt": ["a", [1]]}, 400),
    ({"n": 2.0, "seed": 1.0, "logprobs": 20, "stream": True}, 200),
    ({"seed": 1.5}, 400),
    ({"best_of": None, "suffix": ""}, 200),
    ({"stream_options": {}, "stream": True}, 200),
    ({"stream_options": {"color": "red"}, "stream": True}, 400),  # as OpenAI's API
    ({"metadata": json.loads("[" * 500 + "]" * 500)}, 200),
    ({"structured_outputs": {"regex": "("}, "stream": True}, 400),
)


def test_what_reports_of_other_servers_tell(client: httpx.Client) -> None:
    """As in reports of vLLM's, llama.cpp's and TGI's servers."""
    before, right = read_counts(client.get("/metrics").text, version=1), 0
    for fields, status in REPORTED:
        body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}).encode()
        reply = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == status, f"{str(fields)[:200]}: {reply.text[:300]}"
        right += status == 200
    since = read_counts(client.get("/metrics").text, version=1).since(before)
    assert (since.requests, since.failed) == (right, 0), "what a roll-out's watch counts: no client's mistake"
    assert chat(client, {"role": "developer", "content": "a"}, {"role": "tool", "content": "b"}).status_code == 200
    assert chat(client).status_code == 400
    assert client.get("/v1/models/tiny@champion").status_code == 200
    assert client.get("/v1/models/org/other").status_code == 404


def test_http_as_proxies_and_old_clients_speak_it(client: httpx.Client) -> None:
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'
    head = b"Host: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    for reply in (
        raw(client, b"POST /v1/completions HTTP/1.0\r\n" + head + length + b"\r\n" + body),
        raw(client, b"POST /v1/completions/ HTTP/1.1\r\n" + head + length + b"\r\n" + body),
        raw(client, b"POST http://a/v1/completions HTTP/1.1\r\n" + head + length + b"\r\n" + body),
        raw(client, b"POST //v1//completions HTTP/1.1\r\n" + head + length + b"\r\n" + body),
        raw(
            client, b"POST /v1/completions HTTP/1.1\r\nContent-Encoding: Identity\r\n" + head + length + b"\r\n" + body
        ),
        raw(client, b"POST /v1/completions HTTP/1.1\r\nExpect: bananas\r\n" + head + length + b"\r\n" + body),
        raw(client, b"POST /v1%2Fcompletions HTTP/1.1\r\n" + head + length + b"\r\n" + body),
        raw(client, b"POST /v1/completions HTTP/1.1\r\n" + head + length + b"\r\n", body[:9], body[9:]),
        raw(
            client,
            b"POST /v1/completions HTTP/1.1\r\n"
            + head
            + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        ),
        raw(
            client,
            b"POST /v1/completions HTTP/1.1\r\n"
            + head
            + b"Content-Length: %d\r\n\r\n" % (len(body) + 3)
            + b"\xef\xbb\xbf"
            + body,
        ),
    ):
        assert reply.startswith(b"HTTP/1.1 200 "), reply
    for wrong in (
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n" + head + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + head + b"\r\nzz\r\n",
    ):
        reply = raw(client, wrong)
        assert reply.startswith(b"HTTP/1.1 400 "), reply
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert raw(client, b"GET http://[ HTTP/1.1\r\n" + head + b"\r\n").startswith(b"HTTP/1.1 400 ")
    waiting = raw(client, b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\n" + head + length + b"\r\n", body)
    assert waiting.startswith(b"HTTP/1.1 100 ")


def test_a_batch_lets_others_in_and_a_grammar_is_compiled_once(client: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    with ThreadPoolExecutor(8) as pool:
        batch = pool.submit(completion, client, n=128, max_tokens=30)
        until(lambda: " 1.0" in metric_line(client, "shardline_requests_in_flight"), "the batch runs", within_s=20)
        statuses = [completion(client).status_code for _ in range(10)]
        assert statuses == [200] * 10
        assert not batch.done(), "they were answered between its texts"
        assert batch.result().status_code == 200
    held = {"structured_outputs": {"json": {"enum": [f"v{number}" for number in range(20_000)]}}}
    began = time.monotonic()
    assert completion(client, n=128, max_tokens=3, **held).status_code == 200
    assert time.monotonic() - began < 30, "47 s and more, when each text compiled it"


def test_a_grammar_that_takes_minutes_holds_no_place_and_is_ended(client: httpx.Client) -> None:
    """llguidance counts remainders: each of the two places, and each thread, would be held for more than a minute."""
    pytest.importorskip("llguidance")
    slow = [
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 9_999_991 + number}}} for number in range(6)
    ]
    with ThreadPoolExecutor(8) as pool:
        left = [pool.submit(client.post, "/v1/completions", json=_asked(each), timeout=1) for each in slow[1:]]
        held = pool.submit(completion, client, **slow[0])
        assert completion(client).status_code == 200
        for each in left:  # each may compute for 2 s
            with pytest.raises(httpx.ReadTimeout):
                each.result()
        refused = held.result()
        assert (refused.status_code, "simplify it" in refused.text) == (400, True), refused.text
    until(lambda: " 0.0" in metric_line(client, "shardline_requests_in_flight"), "all are gone", within_s=40)
    fine = {"structured_outputs": {"regex": "[ab]{2}"}}
    assert completion(client, **fine).status_code == 200


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}


def metric_line(client: httpx.Client, name: str) -> str:
    return next(line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} "))


def test_clients_that_leave_while_they_wait_or_do_not_read_hold_nothing(client: httpx.Client) -> None:
    long = {"model": "tiny", "prompt": "x", "max_tokens": 90_000, "temperature": 0, "stream": True}
    with (
        client.stream("POST", "/v1/completions", json=long) as one,
        client.stream("POST", "/v1/completions", json=long) as two,
    ):
        lines = one.iter_lines(), two.iter_lines()
        assert all(next(each) for each in lines)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=long, timeout=0.5)
        until(lambda: " 2.0" in metric_line(client, "shardline_requests_in_flight"), "who left is gone", within_s=1)
    until(lambda: " 0.0" in metric_line(client, "shardline_requests_in_flight"), "all are gone", within_s=20)


def test_a_thousand_idle_connections_and_a_reader_that_stalls(chatting: Store) -> None:
    """In a process of its own: at most 1,024 open files, as many systems allow."""
    limits = {"max_new_tokens": 1_000_000, "max_concurrent": 1, "timeout_s": 3}
    with server(chatting, files=1024, **limits) as (client, process):
        address = urlsplit(str(client.base_url))
        place = (address.hostname or "", address.port or 0)
        idle = [socket.create_connection(place, timeout=10) for _ in range(1000)]
        try:
            assert completion(client).status_code == 200
            slow = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            reply = raw(client, slow + b"Content-Length: 50\r\n\r\n{")
            assert reply.startswith(b"HTTP/1.1 408 ")
            assert b"only 1 bytes of the body came within 3 s" in reply
            stalled = socket.create_connection(place, timeout=10)
            asked = {"max_tokens": 900_000, "temperature": 0, "n": 128, "echo": True, "stream": True}
            body = json.dumps({"model": "tiny", "prompt": "x" * 100_000, **asked}).encode()
            began = time.monotonic()
            stalled.sendall(slow + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: " 1.0" in metric_line(client, "shardline_requests_in_flight"), "it runs", within_s=20)
            until(lambda: completion(client).status_code == 200, "its slot is free", within_s=20)
            assert time.monotonic() - began < 3 + 7, "of timeout_s and of other work; unread it would run for minutes"
            until(lambda: " 0.0" in metric_line(client, "shardline_requests_in_flight"), "it ended", within_s=20)
            assert len(read_all(stalled)) < 128 * 100_000, "the prompt alone is longer: the rest was dropped"
            until(lambda: completion(client).status_code == 200, "another is served", within_s=20)
        finally:
            for each in idle:
                each.close()
        process.kill()
        output, _ = process.communicate(timeout=20)
        assert len(output) < 10_000


def read_all(connection: socket.socket) -> bytes:
    read = b""
    with connection, suppress(ConnectionResetError):
        while piece := connection.recv(2**20):
            read += piece
    return read
