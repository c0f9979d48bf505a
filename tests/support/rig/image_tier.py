"""What the image tier needs where no registry of images is reachable: a base image, a registry, a way to packages."""

from __future__ import annotations

import asyncio
import contextlib
import io
import ssl
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx
from packaging.requirements import Requirement

from tasks.workspace.processes import free_port
from tests.support.rig.certificates import make_certificate

SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # Debian's, by its Python: torch's binaries fit one version only
PACKAGES = "python3,python3-venv,ca-certificates,iproute2"
LEFT_OUT = ("torch/test/", "torch/bin/", "torch/include/")  # 200 of 750 MB, for those who compile against torch
START_S = 20.0


def write_base(path: Path, *, with_torch: bool = True, packages: str = PACKAGES) -> None:
    """A root file system with Python and the torch of this environment, as NVIDIA's image has its own: `docker import`.

    750 MB; 50 s, of which mmdebstrap takes nearly all.
    """
    suite = SUITES[sys.version_info[:2]]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", suite, str(path)]
    subprocess.run(command, check=True)
    site = f"usr/local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/dist-packages"
    if not with_torch:
        return
    with tarfile.open(path, "a") as archive:
        for name in sorted(_with_requirements("torch")):
            for file in metadata.distribution(name).files or ():
                needless = str(file).startswith(LEFT_OUT) and file.name != "torch_shm_manager"  # torch looks for it
                if ".." not in file.parts and not needless:
                    archive.add(str(file.locate()), f"./{site}/{file}", filter=_roots)


def _roots(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def _with_requirements(name: str) -> set[str]:
    found, todo = set[str](), [name]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            requirements = map(Requirement, metadata.requires(name) or ())
            todo += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@contextlib.contextmanager
def registry(folder: Path, *, authority: Path, address: str) -> Iterator[str]:
    """Debian's docker-registry with TLS on the address; yields ADDRESS:PORT, which all daemons here trust meanwhile."""
    make_certificate(folder, authority=authority, addresses=[address])
    place = f"{address}:{free_port()}"
    (folder / "registry.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/images}}}}\n"
        f"http: {{addr: '{place}', tls: {{certificate: {folder}/cert.pem, key: {folder}/key.pem}}}}\n"
    )
    trusted = Path("/etc/docker/certs.d") / place
    trusted.mkdir(parents=True)
    (trusted / "ca.crt").write_bytes((folder / "ca.pem").read_bytes())
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", folder / "registry.yml"], stdout=log, stderr=log)
    try:
        _wait_for(f"https://{place}/v2/", process, ca=folder / "ca.pem")
        yield place
    finally:
        process.terminate()
        process.wait()
        (trusted / "ca.crt").unlink()
        trusted.rmdir()


def _wait_for(url: str, process: subprocess.Popen[bytes], *, ca: Path) -> None:
    context, deadline = ssl.create_default_context(cafile=str(ca)), time.monotonic() + START_S
    while True:
        try:
            httpx.get(url, verify=context, timeout=5, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            assert process.poll() is None, "docker-registry ended"
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.05)


@contextlib.contextmanager
def proxy(address: str) -> Iterator[str]:
    """HTTPS from a host of the rig, which has no way out, to package indexes; yields HTTPS_PROXY's value."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    places: list[str] = []

    async def serve() -> None:
        server = await asyncio.start_server(_connect, address, 0)
        places.append("http://{}:{}".format(*server.sockets[0].getsockname()))
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(START_S)
    try:
        yield places[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """CONNECT HOST:PORT, and nothing else."""
    method, target, _ = (await reader.readline()).decode().split()
    assert method == "CONNECT", method
    while (await reader.readline()).strip():
        pass
    host, _, port = target.rpartition(":")
    there_reader, there_writer = await asyncio.open_connection(host, int(port))
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(io.DEFAULT_BUFFER_SIZE * 8):
            writer.write(chunk)
            await writer.drain()
    writer.close()
