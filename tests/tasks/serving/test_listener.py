"""A server answers under its own names only: a page of another site, whose name leads to it, reads nothing."""

from __future__ import annotations

import pytest

from tasks.serving.listener import is_own_name
from training.config.serving import ServeConfig, ServingConfig

OWN = (
    *(
        "127.0.0.1",
        "127.0.0.1:8000",
        "10.0.0.7:8000",
        "[::1]",
        "[::1]:8000",
        "[fe80::1]:80",
        "localhost",
        "LOCALHOST:1",
    ),
    *(
        "localhost.",
        "model",
        "model:8000",
        "gpu1.local",
        "serve.ns.svc",
        "serve.ns.svc.cluster.local:8000",
        "x.internal",
    ),
    *("me.localhost:8000", "model.example.org", "Model.Example.Org:443", "0.0.0.0:8000", "bound.example.com"),
)
FOREIGN = (
    *("evil.example", "evil.example:8000", "127.0.0.1.nip.io", "localhost.evil.example", "evil.example.", "a.b.c"),
    *(
        "model.example.org.evil.example",
        "notmodel.example.org",
        "sub.model.example.org",
        "svc.evil.example",
        "127.0.0.1.x",
    ),
    *(
        "localhost@evil.example",
        "evil.example@localhost",
        "",
        ":8000",
        "[::1",
        "[evil.example]",
        "evil.example/localhost",
    ),
    *("1.2.3.4.5", "0x7f.0.0.1", "evil.example#localhost", "evil.example?.local", "evil.local.example"),
)


@pytest.mark.parametrize("host", OWN)
def test_a_name_that_no_site_can_have_is_the_servers(host: str) -> None:
    config = ServeConfig(serving=ServingConfig(host_names=("model.example.org",))).known_as("bound.example.com")
    assert is_own_name(host, names=config.serving.host_names)


@pytest.mark.parametrize("host", FOREIGN)
def test_another_sites_name_is_not(host: str) -> None:
    assert not is_own_name(host, names=("model.example.org", "127.0.0.1"))


def test_the_machines_own_name_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_own_name("Gpu1.corp.example:8000", names=())
    monkeypatch.setattr("socket.gethostname", lambda: "gpu1.corp.example")
    assert is_own_name("Gpu1.corp.example:8000", names=())
