"""infra/head.Dockerfile and serve.Dockerfile, built on a Docker host of the rig as `docker compose build` would."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.hosts import HostClient
from tests.support.repository import REPO
from tests.support.rig.image_tier import proxy, write_base
from tests.support.rig.rig import USER

BASE, BARE = "shardline-rig-python:1", "shardline-rig-bare:1"
HEAD, SERVE = "shardline-head:0.2.0", "shardline-serve:0.2.0"  # as compose.yaml names them
POSTGRES = "postgres:17.6-bookworm"
LONG_S = 900.0


def make_base(client: HostClient, root: Path, *, gateway: str) -> None:
    """`root`, a system as a tar archive, as a base whose pip trusts whom this environment's trusts."""
    client.api.import_image(str(root), repository=BARE.split(":")[0], tag="1")
    ca = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    lines = [f"FROM {BARE}", f"ENV PIP_TRUSTED_HOST={gateway}"]
    lines += ["COPY ca.pem /etc/ca.pem", "ENV PIP_CERT=/etc/ca.pem"] if ca else []
    files = {"Dockerfile": "\n".join(lines).encode()} | ({"ca.pem": Path(ca).read_bytes()} if ca else {})
    build(client, BASE, files=files, dockerfile="Dockerfile")


def build_postgres(client: HostClient, folder: Path) -> None:
    """Debian's Postgres under the name of the image that compose.yaml pins, which no registry here has."""
    write_base(folder / "postgres.tar", with_torch=False, packages="postgresql")
    client.api.import_image(str(folder / "postgres.tar"), repository="shardline-rig-postgres", tag="1")
    entrypoint = REPO / "tests" / "rig" / "postgres_entrypoint.sh"
    lines = ["FROM shardline-rig-postgres:1", "COPY entrypoint.sh /", f"RUN useradd --uid {USER.split(':')[0]} runner"]
    lines += [
        "RUN install --directory --mode 3777 /var/run/postgresql"
    ]  # as the official one; a restarted tmpfs has it
    lines += ["ENV PATH=/usr/lib/postgresql/15/bin:/usr/bin:/bin LANG=C.UTF-8", "STOPSIGNAL SIGINT"]
    lines += ['ENTRYPOINT ["bash", "/entrypoint.sh"]']
    files = {"Dockerfile": "\n".join(lines).encode(), "entrypoint.sh": entrypoint.read_bytes()}
    build(client, POSTGRES, files=files, dockerfile="Dockerfile")


def build_serve(client: HostClient, tag: str = SERVE, *, gateway: str) -> None:
    with proxy(gateway) as way_out:
        arguments = {"BASE_IMAGE": BASE, "HTTPS_PROXY": way_out}
        build(client, tag, files=checkout(), dockerfile="infra/serve.Dockerfile", buildargs=arguments)


def build_head(client: HostClient, folder: Path, *, gateway: str) -> None:
    """With this environment's torch, which comes from an index of `folder`."""
    with proxy(gateway) as way_out, torch_index(folder, gateway) as index:
        arguments = {"BASE_IMAGE": BASE, "HTTPS_PROXY": way_out, "TORCH_INDEX_URL": index}
        build(client, HEAD, files=checkout(), dockerfile="infra/head.Dockerfile", buildargs=arguments)


@contextlib.contextmanager
def torch_index(folder: Path, address: str) -> Iterator[str]:
    """A package index with one package: this environment's torch, wherever pip has it from."""
    project = folder / "torch"
    project.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(project)]
    subprocess.run([*command, f"torch=={metadata.version('torch')}"], check=True)
    handler = functools.partial(_Silent, directory=str(folder))
    server = ThreadingHTTPServer((address, 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """pip asks it for every package."""


def checkout() -> dict[str, bytes]:
    names = subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).split("\n")
    return {name: (REPO / name).read_bytes() for name in names if name and not name.startswith(("tests/", "docs/"))}


def build(client: HostClient, tag: str, *, files: dict[str, bytes], **options: Any) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    context.seek(0)
    lines = list(
        client.api.build(
            fileobj=context, custom_context=True, tag=tag, rm=True, forcerm=True, decode=True, timeout=LONG_S,
            network_mode="host", **options,
        )
    )  # fmt: skip
    assert not any("error" in line for line in lines), lines[-20:]
