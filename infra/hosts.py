"""Docker hosts: a client for each over a unix socket, TCP with TLS, or ssh; errors in plain sentences.

Docker's errors seldom name the host and never say what to do. All functions here that ask a daemon raise HostError
instead: the host's name, the cause and the cure.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException
from docker.tls import TLSConfig

from infra.tunnels import local_socket

OLDEST_API = (1, 41)  # Docker 20.10 (December 2020), the oldest version that was tested
ALERT_S = 2.0

Result = TypeVar("Result")


class Named(Protocol):
    """A host of any kind."""

    @property
    def name(self) -> str: ...


AnyHost = TypeVar("AnyHost", bound=Named)


@dataclass(frozen=True)
class DockerHost:
    """A machine with a Docker daemon, and the part of it that Shardline may use."""

    name: str
    url: str = "unix:///var/run/docker.sock"  # or tcp://HOST:2376, ssh://[USER@]HOST[:PORT]
    tls_dir: Path | None = None  # ca.pem, cert.pem and key.pem of this client
    address: str = "127.0.0.1"
    interface: str = ""
    gpus: int = 0  # -1: all
    gpu_ids: tuple[str, ...] = ()
    home: str = ""
    cpus: float = 0.0  # 0: all
    memory_gib: float = 0.0  # 0: no limit


class HostError(RuntimeError):
    """An error of one or several hosts, with its cause and cure. `hosts` names them. `unreachable`: no daemon answered
    (network, power, daemon), so it is unknown what runs there. Otherwise a daemon answered and refused, and will refuse
    again until the cause is removed.
    """

    def __init__(self, message: str, *, hosts: tuple[str, ...] = (), unreachable: bool = False) -> None:
        super().__init__(message)
        self.hosts, self.unreachable = hosts, unreachable


class HostClient(docker.DockerClient):
    """Docker's client, with the host that it talks to. Threads may share it, as they may share requests' sessions."""

    host: DockerHost


def connect(host: DockerHost, *, timeout_s: float = 10) -> HostClient:
    """Return a client with the daemon's API version; each request waits at most `timeout_s` for an answer.

    Connect again after a HostError with `unreachable`, because an ssh tunnel may have ended.
    Raises HostError if the daemon cannot be reached, does not trust us, is not trusted, or is too old.
    """
    with host_errors(host):
        url = f"unix://{local_socket(host.url, timeout_s=timeout_s)}" if host.url.startswith("ssh://") else host.url
        with closing(_client(host, url, version="1.41", timeout_s=timeout_s)) as probe:
            try:
                version = str(probe.api.version(api_version=False)["ApiVersion"])
            except requests.ConnectionError as error:
                if not isinstance(error, requests.Timeout):  # no daemon answers; the check would take ALERT_S more
                    _check_certificate(host)
                raise
        if tuple(map(int, version.split("."))) < OLDEST_API:
            raise HostError(
                f"{host.name}: the daemon at {host.url} speaks API {version}, at least Docker 20.10 (API 1.41) is "
                "needed: upgrade Docker there",
                hosts=(host.name,),
            )
        return _client(host, url, version=version, timeout_s=timeout_s)


def _client(host: DockerHost, url: str, *, version: str, timeout_s: float) -> HostClient:
    client = HostClient(base_url=url, version=version, timeout=timeout_s, tls=_tls(host), max_pool_size=16)
    client.api.trust_env = False  # otherwise REQUESTS_CA_BUNDLE replaces the host's CA, and a proxy may be used
    client.host = host
    return client


def _tls(host: DockerHost) -> TLSConfig | None:
    if host.tls_dir is None:
        return None
    names = ("ca.pem", "cert.pem", "key.pem")
    if missing := [name for name in names if not (host.tls_dir / name).is_file()]:
        raise HostError(
            f"{host.name}: {host.tls_dir} lacks {', '.join(missing)}: it needs the daemon's CA as ca.pem, and this "
            "client's certificate and key as cert.pem and key.pem",
            hosts=(host.name,),
        )
    ca, cert, key = (str(host.tls_dir / name) for name in names)
    return TLSConfig(client_cert=(cert, key), ca_cert=ca, verify=True)


def _check_certificate(host: DockerHost) -> None:
    """Raise ssl.SSLError if the daemon does not accept this client's certificate.

    With TLS 1.3 the daemon refuses only after the handshake. A client that is already sending a request may see a
    broken connection instead of the reason; a client that only reads gets the reason.
    """
    if host.tls_dir is None:
        return
    parts = urlsplit(host.url)
    context = ssl.create_default_context(cafile=host.tls_dir / "ca.pem")
    context.load_cert_chain(host.tls_dir / "cert.pem", host.tls_dir / "key.pem")
    with (
        socket.create_connection((str(parts.hostname), parts.port or 2376), timeout=ALERT_S) as raw,
        context.wrap_socket(raw, server_hostname=parts.hostname) as connection,
        suppress(TimeoutError),  # the daemon waits for a request, so it accepts the certificate
    ):
        connection.recv(1)


def on_each(hosts: Iterable[AnyHost], action: Callable[[AnyHost], Result]) -> dict[str, Result | HostError]:
    """Run the action on all hosts at once, each in its own thread; return host's name -> result or HostError. Any other
    exception is raised when all have ended.
    """
    hosts = list(hosts)

    def act(host: AnyHost) -> Result | HostError:
        try:
            return action(host)
        except HostError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(hosts)), thread_name_prefix="host") as pool:
        return dict(zip([host.name for host in hosts], pool.map(act, hosts), strict=True))


def on_all(hosts: Iterable[AnyHost], action: Callable[[AnyHost], Result]) -> dict[str, Result]:
    """Run the action on all hosts at once; return host's name -> result. One HostError lists all hosts' failures."""
    done = on_each(hosts, action)
    errors = [result for result in done.values() if isinstance(result, HostError)]
    if errors:
        raise HostError(
            "\n".join(map(str, errors)),
            hosts=tuple(name for error in errors for name in error.hosts),
            unreachable=all(error.unreachable for error in errors),
        ) from errors[0]
    return {name: result for name, result in done.items() if not isinstance(result, HostError)}


@contextmanager
def host_errors(host: DockerHost) -> Iterator[None]:
    """Raise errors of the SDK, requests, urllib3 and sockets as HostError."""
    try:
        yield
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        message, unreachable = _explain(host, error)
        raise HostError(f"{host.name}: {message}", hosts=(host.name,), unreachable=unreachable) from error


REFUSALS = (
    # text in dockerd's answer -> the sentence for the user
    ("could not select device driver", "it has no NVIDIA runtime for the GPUs: install "
     "nvidia-container-toolkit there, run `nvidia-ctk runtime configure --runtime=docker`, restart Docker"),
    ("bind source path does not exist", "a folder to mount does not exist: create it, or mount the shared storage"),
    ("error setting rlimit type 8", "its kernel refuses to lift the limit on locked memory: set launch.memlock=false"),
    ("No such image", "it does not have the image: push it to a registry (`shardline image push`), then pull it there"),
    ("is already in use by container", "a container of that name exists already: `shardline ps` lists it, `shardline "
     "stop` ends it"),
    ("no space left on device", "its disk is full: `docker system df` shows what Docker holds"),
    ("client sent an HTTP request to an HTTPS server", "the daemon wants TLS: set the host's `tls` folder"),
)  # fmt: skip

TROUBLES = (
    # text in the error of a failed connection, the sentence for the user, and whether a later try may succeed
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by {tls}/ca.pem, or is for another address: give the "
     "CA of this daemon, or have {address} added to its certificate", False),
    ("WRONG_VERSION_NUMBER", "the daemon there does not speak TLS: start it with --tlsverify", False),
    ("_ALERT_", "it does not accept {tls}/cert.pem: have it signed by the CA that the daemon trusts", False),
    ("PermissionError", "this user may not open the socket: add them to the group docker, and log in again", False),
    ("FileNotFoundError", "there is no daemon's socket: start Docker (systemctl start docker)", True),
    ("Name or service not known", "the host's name does not resolve: check its spelling, or give an IP address", False),
    ("Permission denied (publickey", "ssh needs a key: copy yours there with `ssh-copy-id`", False),
    ("Host key verification failed", "ssh does not know the host's key: connect there once by hand with `ssh`", False),
    ("RemoteDisconnected", "the connection ended before an answer; over ssh: may that user open the daemon's socket?",
     True),
    ("timed out", "no answer: check the host's power, its daemon and the network: `docker -H {url} info`", True),
    ("refused", "nothing listens there: start Docker, and let it listen at this address", True),
)  # fmt: skip


def _explain(host: DockerHost, error: Exception) -> tuple[str, bool]:
    """Return the error as one sentence, and whether the daemon could not be reached."""
    if isinstance(error, APIError):
        answer = str(error.explanation or error)
        cure = next((cure for sign, cure in REFUSALS if sign.lower() in answer.lower()), "Docker refused")
        return f"{cure} (Docker said: {answer.strip()})", False
    text = f"{error!r} {error}"
    tls, address = host.tls_dir, host.url.partition("://")[2]
    for sign, words, unreachable in TROUBLES:
        if sign.lower() in text.lower():
            return f"{host.url}: {words.format(tls=tls, address=address, url=host.url)} ({error})", unreachable
    if isinstance(error, requests.exceptions.SSLError):
        return f"{host.url}: TLS failed: {error}", False
    return f"{host.url} cannot be reached: check the host's power and the network ({error})", True
