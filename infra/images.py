"""The training image: built by a host's daemon, pushed to a registry, pulled by digest.

It is built over the Docker API, so a daemon is enough, on this machine or another. Only pyproject.toml and the packages
are sent there, not the whole folder. An installed wheel has the same files as a checkout, so it builds the same images.
Files at the top of the repository have links in infra/project/ and flows/; in a wheel these are files.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from infra.hosts import DockerHost, HostClient, HostError, host_errors

ROOT = Path(__file__).parents[1]
DOCKERFILE = "infra/train.Dockerfile"
PACKAGES = ("flows", "tasks", "training", "infra")
AT_THE_TOP = {  # file of the repository -> its place in an installation, beside the packages
    "pyproject.toml": "infra/project/project.toml",  # as pyproject.toml, tools would take the folder for a project
    "constraints.txt": "infra/project/constraints.txt",
    "README.md": "infra/project/README.md",
    "prefect.yaml": "flows/prefect.yaml",
}
EXTRA = "extra"  # train.Dockerfile copies the files of this folder beside pyproject.toml
LAST_LINES = 15
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # colours that the builder puts around standard error

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Identity:
    """`id` is the hash of the image's content; `digests` are NAME@sha256:…, its names in registries."""

    id: str
    digests: tuple[str, ...]


def build(
    client: HostClient,
    *,
    tag: str,
    base_image: str = "",
    build_args: Mapping[str, str] | None = None,
    wheels: Iterable[Path] = (),
    ca: Path | None = None,
    network: str = "",
    timeout_s: float = 3600,
    on_line: OnLine = print,
    root: Path = ROOT,
) -> str:
    """Build train.Dockerfile on the client's host; returns the image's id. `on_line` gets the builder's lines.

    `wheels` and `ca` (certificates that pip trusts) are in the image during the build only. `network`: Docker's for the
    build, such as host. Raises ValueError for a folder without Shardline's files or a password in an argument,
    HostError with the last lines if the build fails.
    """
    arguments = {**(build_args or {}), **({"BASE_IMAGE": base_image} if base_image else {})}
    for name, value in arguments.items():
        if urlsplit(value).password:
            raise ValueError(
                f"{name} contains a password, which `docker history` shows: use an index without one, or wheels"
            )
    options = {"dockerfile": DOCKERFILE, "buildargs": arguments, "network_mode": network or None}
    with tempfile.TemporaryFile() as archive:
        write_context(archive, root=root, wheels=wheels, ca=ca)
        archive.seek(0)
        with host_errors(client.host):
            stream = client.api.build(
                fileobj=archive, custom_context=True, tag=tag, rm=True, forcerm=True, decode=True,
                timeout=timeout_s, **options,
            )  # fmt: skip
            _follow(client.host, stream, what=f"building {tag}", on_line=on_line)
    return identity(client, tag).id


def write_context(file: IO[bytes], *, root: Path = ROOT, wheels: Iterable[Path] = (), ca: Path | None = None) -> None:
    """Write a tar archive of the Dockerfile's files, without owners and times, so that Docker can cache equal files.

    `root` is a checkout, or the site-packages of an installed wheel. Raises ValueError if it is neither.
    """
    if missing := [name for name in (DOCKERFILE, *AT_THE_TOP.values(), *PACKAGES) if not (root / name).exists()]:
        raise ValueError(f"{root} has no {', '.join(missing)}: build the image from a checkout or a wheel of Shardline")
    named = [((root / AT_THE_TOP[name]).resolve(), name) for name in ("pyproject.toml", "README.md")]
    files = [root / DOCKERFILE, *(path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))]
    named += [(path, str(path.relative_to(root))) for path in files]
    named += [(path, f"{EXTRA}/{path.name}") for path in wheels]
    named += [(ca, f"{EXTRA}/ca.pem")] if ca is not None else []
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, name in named:
            archive.add(path, name, filter=_without_circumstances)


def copy_sources(folder: Path, *, root: Path = ROOT) -> None:
    """Copy the files that compose.yaml and the Dockerfiles read to `folder`, as in a checkout; replace older ones."""
    for package in PACKAGES:
        shutil.rmtree(folder / package, ignore_errors=True)
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, source in AT_THE_TOP.items():
        shutil.copyfile(root / source, folder / name)


def _without_circumstances(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o644
    return info


def push(client: HostClient, tag: str, *, on_line: OnLine = print) -> str:
    """Push to the registry in its name, with the credentials of `docker login`; return NAME@sha256:… for launch.image.

    Raises ValueError for a name without a registry, HostError if the push fails.
    """
    name, version = split_name(tag)
    with host_errors(client.host):
        stream = client.api.push(name, tag=version, stream=True, decode=True)
        rows = _follow(client.host, stream, what=f"pushing {tag}", on_line=on_line)
    digest = next((row["aux"]["Digest"] for row in rows if "Digest" in row.get("aux", {})), "")
    assert digest, f"the push of {tag} ended without a digest"
    return f"{name}@{digest}"


def split_name(tag: str) -> tuple[str, str]:
    """Split REGISTRY/NAME[:VERSION] into (NAME, VERSION).

    Raises ValueError without a registry: Docker Hub is no default.
    """
    registry, _, rest = tag.partition("/")
    if not rest or not ("." in registry or ":" in registry or registry == "localhost"):
        raise ValueError(f"{tag} names no registry: call it REGISTRY/NAME:VERSION, e.g. registry.example:5000/{tag}")
    path, _, version = rest.partition(":")
    return f"{registry}/{path}", version or "latest"


def pull(client: HostClient, image: str, *, on_line: OnLine = print) -> Identity:
    """Pull by digest (NAME@sha256:…) or tag. Raises HostError if the registry lacks the image or cannot be reached."""
    with host_errors(client.host):
        stream = client.api.pull(image, stream=True, decode=True)
        _follow(client.host, stream, what=f"pulling {image}", on_line=on_line)
    return identity(client, image)


def identity(client: HostClient, image: str) -> Identity:
    """Return the image's id and digests. Raises HostError if the host does not have the image."""
    with host_errors(client.host):
        found = client.api.inspect_image(image)
    return Identity(id=str(found["Id"]), digests=tuple(found["RepoDigests"] or ()))


def _follow(host: DockerHost, stream: Iterable[dict[str, Any]], *, what: str, on_line: OnLine) -> list[dict[str, Any]]:
    """Read a stream of Docker; pass lines and changes of a layer's status to `on_line`.

    Raises HostError if it has an error.
    """
    rows, lines, states = [], [""], dict[str, str]()
    for row in stream:
        rows.append(row)
        if "error" in row:
            last = "\n".join(lines[-LAST_LINES:])
            raise HostError(f"{host.name}: {what} failed: {row['error'].strip()}\n{last}".rstrip(), hosts=(host.name,))
        layer, status = row.get("id", ""), row.get("status", "")
        texts = COLOUR.sub("", row.get("stream", "")).splitlines()
        if status and states.get(layer) != status:
            states[layer] = status
            texts = [f"{layer}: {status}" if layer else status]
        for text in filter(str.strip, texts):
            lines.append(text.rstrip())
            on_line(text.rstrip())
    return rows


def local_daemon() -> DockerHost:
    """Return the daemon that the `docker` command uses: DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH if set."""
    folder = os.environ.get("DOCKER_CERT_PATH") or str(Path.home() / ".docker")
    return DockerHost(
        name="here",
        url=os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock",
        tls_dir=Path(folder) if os.environ.get("DOCKER_TLS_VERIFY") else None,
    )
