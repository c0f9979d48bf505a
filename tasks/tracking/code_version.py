"""Which commit the code is of: the checkout's, or the one that the wheel was built from.

Standard library only: setup.py imports it while it builds the wheel.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

STAMP = "commit.json"  # beside this file in a wheel: [commit, whether the checkout differed from it]


def git_commit() -> tuple[str, bool]:
    """Return the commit of the code, and whether the code differs from it; ("unknown", False) if nothing says it.

    An installed wheel often lies inside another project's repository, whose commit is not Shardline's.
    """
    source = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source.parent), *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", source.name) is None:
        stamp = source.with_name(STAMP)
        commit, changes = json.loads(stamp.read_text()) if stamp.exists() else (None, False)
    else:
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return commit or "unknown", bool(changes)


def write_stamp(folder: Path) -> str:
    """Write this checkout's commit to `folder`, which has a copy of this file or will be installed as its folder;
    return it.
    """
    stamp = git_commit()
    (folder / STAMP).write_text(json.dumps(stamp) + "\n")
    return stamp[0]
