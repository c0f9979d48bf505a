"""An image with nothing in it, and the read-only mounts that make a training image of it: this machine's own files.

No registry is needed, nothing is copied, and it is there in 0.1 s. Its id is the same on every daemon, as it is the
hash of a config that we write.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from pathlib import Path

import docker

REPO = Path(__file__).parents[3]
NAME = "shardline-rig:empty"
# Not /sbin: Docker puts its init there.
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ssl", "/etc/ld.so.cache")


def mounts() -> tuple[str, ...]:
    """SOURCE:TARGET of each, as launch.mounts has them: the system, Python, its packages, and this checkout."""
    # An interpreter that only links to another one, as in a virtual environment, needs that one too.
    needed = [*SYSTEM, sys.base_prefix, sys.prefix, str(REPO)]
    paths: list[str] = []
    for path in needed:
        inside = any(Path(path).is_relative_to(other) for other in paths)
        if Path(path).exists() and not inside:
            paths.append(path)
    return tuple(f"{path}:{path}" for path in paths)


def load(client: docker.DockerClient) -> str:
    """The image's id."""
    return str(client.images.load(_archive())[0].id)


def _archive() -> bytes:
    """As `docker save` writes it: a manifest, a config, and one layer without files."""
    layer = _tar({})
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "created": "2026-01-01T00:00:00Z",
        "config": {
            "Env": [
                f"PATH={sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                f"PYTHONPATH={REPO}",
                "PYTHONDONTWRITEBYTECODE=1",
                "HOME=/tmp",
                "LANG=C.UTF-8",
            ]
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created": "2026-01-01T00:00:00Z"}],
    }
    packed = json.dumps(config, sort_keys=True).encode()
    name = f"{hashlib.sha256(packed).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    return _tar({name: packed, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()})


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
