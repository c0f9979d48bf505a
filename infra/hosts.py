"""Docker hosts: a client for each over a unix socket, TCP with TLS, or ssh; what goes wrong there, in words.

Docker's own errors say what failed, seldom on which host and never what to do. Everything here that talks to a
daemon raises HostError instead: the host's name, the cause and the cure.
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

OLDEST_API = (1, 41)  # Docker 20.10 (December 2020): the oldest that this was tried on
ALERT_S = 2.0

Result = TypeVar("Result")


class Named(Protocol):
    """A host of any kind."""

    @property
    def name(self) -> str: ...


AnyHost = TypeVar("AnyHost", bound=Named)


@dataclass(frozen=True)
class DockerHost:
    """A machine with a Docker daemon, and what of it we may use."""

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
    """About one host, or several: what went wrong, and the cure.

    `hosts` names them. `unreachable`: no daemon answered (network, power, daemon), so nobody knows what runs there;
    otherwise a daemon answered and refused, and will again until the cause is mended.
    """

    def __init__(self, message: str, *, hosts: tuple[str, ...] = (), unreachable: bool = False) -> None:
        super().__init__(message)
        self.hosts, self.unreachable = hosts, unreachable


class HostClient(docker.DockerClient):
    """Docker's client that knows which host it talks to. Safe to share between threads, as requests' sessions are."""

    host: DockerHost


def connect(host: DockerHost, *, timeout_s: float = 10) -> HostClient:
    """A client whose API version is the daemon's; each of its requests waits at most `timeout_s` for an answer.

    Connect again after a HostError that says `unreachable`: over ssh the tunnel may be gone.
    Raises HostError if the daemon cannot be reached, does not trust us, is not trusted, or is too old.
    """
    with host_errors(host):
        url = f"unix://{local_socket(host.url, timeout_s=timeout_s)}" if host.url.startswith("ssh://") else host.url
        with closing(_client(host, url, version="1.41", timeout_s=timeout_s)) as probe:
            try:
                version = str(probe.api.version(api_version=False)["ApiVersion"])
            except requests.ConnectionError as error:
                if not isinstance(error, requests.Timeout):  # nobody there: that would take ALERT_S more
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
    client.api.trust_env = False  # or REQUESTS_CA_BUNDLE replaces the host's CA, and a proxy gets in between
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
    """Raises ssl.SSLError if the daemon does not accept ours.

    TLS 1.3 tells a client only after the handshake, and whoever is sending a request by then may see the connection
    break rather than the reason; who only listens gets it.
    """
    if host.tls_dir is None:
        return
    parts = urlsplit(host.url)
    context = ssl.create_default_context(cafile=host.tls_dir / "ca.pem")
    context.load_cert_chain(host.tls_dir / "cert.pem", host.tls_dir / "key.pem")
    with (
        socket.create_connection((str(parts.hostname), parts.port or 2376), timeout=ALERT_S) as raw,
        context.wrap_socket(raw, server_hostname=parts.hostname) as connection,
        suppress(TimeoutError),  # it waits for our request: the certificate is good
    ):
        connection.recv(1)


def on_each(hosts: Iterable[AnyHost], action: Callable[[AnyHost], Result]) -> dict[str, Result | HostError]:
    """Name -> the action's result, or the HostError it raised; all hosts at once, each in a thread of its own.

    Any other exception is raised when all are through.
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
    """Name -> the action's result, all hosts at once; one HostError tells what failed on every host where it did."""
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
    """Raises what the SDK, requests, urllib3 or a socket raise as HostError."""
    try:
        yield
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        message, unreachable = _explain(host, error)
        raise HostError(f"{host.name}: {message}", hosts=(host.name,), unreachable=unreachable) from error


REFUSALS = (
    # what dockerd's answer holds, what to say of it
    ("could not select device driver", "it has no NVIDIA runtime for the GPUs asked for: install "
     "nvidia-container-toolkit there, run `nvidia-ctk runtime configure --runtime=docker`, restart Docker"),
    ("bind source path does not exist", "a folder to mount is not there: create it, or mount the shared storage"),
    ("error setting rlimit type 8", "its kernel refuses to lift the limit on locked memory: set launch.memlock=false"),
    ("No such image", "it has not got the image: `shardline image push` there, or pull it"),
    ("is already in use by container", "a container of that name is there already: `shardline ps`, `shardline stop`"),
    ("no space left on device", "its disk is full: `docker system df` shows what Docker holds"),
    ("client sent an HTTP request to an HTTPS server", "the daemon wants TLS: set the host's `tls` folder"),
)  # fmt: skip

TROUBLES = (
    # what the text of a failed connection holds, what to say of it, whether the daemon may be there next time
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by {tls}/ca.pem, or names another address: give the "
     "CA of this daemon, or have {address} added to its certificate", False),
    ("WRONG_VERSION_NUMBER", "the daemon there does not speak TLS: start it with --tlsverify", False),
    ("_ALERT_", "it does not accept {tls}/cert.pem: have it signed by the CA that the daemon trusts", False),
    ("PermissionError", "this user may not open the socket: add them to the group docker, and log in again", False),
    ("FileNotFoundError", "no daemon has its socket there: start Docker (systemctl start docker)", True),
    ("Name or service not known", "that name does not resolve: check its spelling, or give an IP address", False),
    ("Permission denied (publickey", "ssh lets nobody in without a key: `ssh-copy-id` ours to it", False),
    ("Host key verification failed", "ssh does not know the host's key: `ssh` there once by hand", False),
    ("RemoteDisconnected", "the line was cut before an answer came; over ssh: may that user open the daemon's socket?",
     True),
    ("timed out", "no answer: is the host on, its daemon alive, and the network between? `docker -H {url} info`", True),
    ("refused", "nothing listens there: start Docker, and see that it listens at this address", True),
)  # fmt: skip


def _explain(host: DockerHost, error: Exception) -> tuple[str, bool]:
    """The error as one sentence, and whether the daemon was out of reach."""
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
    return f"{host.url} cannot be reached: is the host on, and the network between? ({error})", True
