"""Reads the memory that this process may use: the machine's, or less within a container's limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_memory_bytes(*, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the machine's memory, or less if a control group limits it."""
    limits = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory.limit_in_bytes"):
        for file in control_files("memory", name, root=root, membership=membership):
            text = file.read_text().strip()
            limits.append(limits[0] if text == "max" else int(text))
    return min(limits)


def control_files(controller: str, name: str, *, root: Path, membership: Path) -> Iterator[Path]:
    """Return the files `name` of this process's control group and of all above it, for cgroup v2 and v1.

    Inside a container the path in /proc may be the host's and not exist; then only the root is found, which is the
    container's group.
    """
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            if (base / folder / name).is_file():
                yield base / folder / name
