"""The sockets that a server listens on, and their addresses."""

from __future__ import annotations

import errno
import ipaddress
import json
import shlex
import socket
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import urlsplit


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, opened before the model is loaded so that a port in use is an error at once.

    `port` 0 takes any free port. Raises ValueError if the address cannot be used.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port = {port}: choose one from 1 to 65535, or 0 for any that is free, with --port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        # Connections inherit TCP_NODELAY. asyncio sets it only on sockets that it opened itself; without it a reply's
        # body waits 40 ms for the acknowledgement of the reply's head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        why = "it is in use" if error.errno == errno.EADDRINUSE else error
        raise ValueError(f"cannot listen on {host} port {port}: {why}; choose another with --port or --host") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; a name is what it resolves to."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


NOBODYS = ("localhost", "local", "internal", "svc", "cluster.local")  # no site can get a name below these


def is_own_name(header: str, *, names: Collection[str]) -> bool:
    """Whether a request's Host may be this server's: an address, a name without a dot, one that no site can get, this
    machine's, or one of `names`.

    A page of another site, whose name resolves to this server, sends that name; it could read all answers otherwise.
    """
    try:
        host = (urlsplit(f"//{header}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if "@" in header or not host:
        return False
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    known = {socket.gethostname().lower(), *(name.lower() for name in names)}
    return "." not in host or host in known or host.endswith(tuple(f".{ending}" for ending in NOBODYS))


def url_of(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def print_address(what: str, url: str, *, prompt: str) -> None:
    """Print where a server is, and a request to try; `prompt` is of the text that its model learned from."""
    example = json.dumps({"prompt": prompt, "new_tokens": 64}, ensure_ascii=False)
    print(f"serving {what} at {url}")
    print(f"try: curl {url}/generate -H 'content-type: application/json' -d {shlex.quote(example)}", flush=True)
