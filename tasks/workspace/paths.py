"""Paths and addresses: SHARDLINE_HOME holds everything a machine makes; MLFLOW_TRACKING_URI may point elsewhere."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote, urlparse

from tasks.workspace.processes import local_process
from tasks.workspace.skip import skip_unreadable
from training.config.credentials import without_url_credentials
from training.records.record import read_fields
from training.tracking.redaction import credentials_apart

logger = logging.getLogger(__name__)

MLFLOW_USER, MLFLOW_PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
UP_FILE = "up.json"  # in SHARDLINE_HOME: service -> {url, process}, by flows/servers/local.py


def home() -> Path:
    """Return SHARDLINE_HOME, by default ./runs; make it if it is missing. Only its owner may enter it."""
    path = Path(os.environ.get("SHARDLINE_HOME") or "runs").resolve()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (mode := path.stat().st_mode) & 0o077:
            _close(path, stat.S_IMODE(mode))
    except OSError as error:
        raise ValueError(
            f"SHARDLINE_HOME = {path} cannot be made ({error.strerror}): set it to a folder of yours"
        ) from None
    return path


@cache
def _close(path: Path, mode: int) -> None:
    """Keep other users out of SHARDLINE_HOME, or say that they may enter it."""
    if not mode & stat.S_ISVTX:  # a folder of all users, as /tmp is, stays as it is
        with suppress(OSError):  # it is another user's, or of a file system that has no modes
            path.chmod(0o700)
    if path.stat().st_mode & 0o077:
        logger.warning("other users may enter SHARDLINE_HOME = %s (mode %04o): `chmod 700` keeps them out", path, mode)
    else:
        logger.info("SHARDLINE_HOME = %s had mode %04o: now only its owner may enter it", path, mode)


def open_private(path: Path, mode: Literal["wb", "ab"]) -> IO[bytes]:
    """Open a file that only its owner may read and write, whatever its mode was, and whatever the umask is."""
    path.touch(mode=0o600)
    make_private(path)
    return path.open(mode)


def make_private(*paths: Path) -> None:
    """Let only the owner of these files read and write them."""
    for path in paths:
        with suppress(OSError):  # another user's, who alone may do that, or one that is gone
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)


def run_folder(run_id: str) -> Path:
    """Return the folder of a run. Raises ValueError for a name that leads outside SHARDLINE_HOME."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        raise ValueError(f"{run_id!r} is not a run's ID: `ls {home()}` lists the runs")
    return home() / run_id


def present(path: Path) -> Path:
    """Return where a file of SHARDLINE_HOME lies now: `path` as it was recorded, or its place in a home that moved."""
    return path if path.exists() else in_this_home(path) or path


def in_this_home(path: Path) -> Path | None:
    """Return the place in SHARDLINE_HOME of a file that was recorded before the home was moved or copied."""
    rests = (path.relative_to(parent) for parent in reversed(path.parents[1:]))  # the longest first; never a name alone
    return next((home() / rest for rest in rests if (home() / rest).exists()), None)


def local_path(uri: str) -> Path | None:
    """Return the path that a file's URI names, where it lies now; None for a URI of another kind."""
    address = urlparse(uri)
    return present(Path(unquote(address.path))) if address.scheme in {"", "file"} else None


def tracking_uri() -> str:
    """Return MLFLOW_TRACKING_URI if set, or the server of `shardline up`, or a sqlite file in SHARDLINE_HOME.

    For the server of `up`, its user and password go into this process's environment, where MLflow's clients and the
    programs that are started from here find them. A user that MLFLOW_TRACKING_USERNAME names beside the address stays.
    """
    named, of_up = os.environ.get("MLFLOW_TRACKING_URI", ""), up_url("mlflow")
    if of_up and (not named or (named == of_up and MLFLOW_USER not in os.environ)):
        os.environ |= mlflow_credentials()
    return named or of_up or f"sqlite:///{home()}/mlflow.db"


def mlflow_credentials() -> dict[str, str]:
    """Return the variables by which clients of the MLflow server of `shardline up` sign in; empty before its first
    start."""
    user, _, password = password_of_up("mlflow").partition(":")
    return {MLFLOW_USER: user, MLFLOW_PASSWORD: password} if password else {}


def password_file(service: str) -> Path:
    """Return the file with what a server of `shardline up` asks for, `user:PASSWORD`, of mode 0600."""
    return home() / "up" / f"{service}_auth"


def password_of_up(service: str) -> str:
    """Return what a server of `shardline up` asks for, as `user:PASSWORD`; empty if it asks for nothing."""
    path = password_file(service)
    return path.read_text().strip() if path.exists() else ""


def keep_password_apart() -> None:
    """Move a password in MLFLOW_TRACKING_URI to separate variables, where MLflow also finds it.

    Commands and flows call this first, because MLflow's errors quote the whole URI, and Prefect stores them in states
    and logs.
    """
    if apart := credentials_apart(os.environ.get("MLFLOW_TRACKING_URI", "")):
        names = ("MLFLOW_TRACKING_URI", MLFLOW_USER, MLFLOW_PASSWORD)
        os.environ |= dict(zip(names, apart, strict=True))


def mlflow_url() -> str:
    """Return MLflow's address for people: SHARDLINE_MLFLOW_URL if programs use another address, as in a stack."""
    return os.environ.get("SHARDLINE_MLFLOW_URL") or without_url_credentials(tracking_uri())


def up_url(service: str) -> str:
    """Return the URL of a service that `shardline up` started on this machine; empty if it does not run."""
    with skip_unreadable("servers of `shardline up` are not used"):
        known = read_fields(home() / UP_FILE).get(service)
        return str(known["url"]) if known and local_process(known["process"]) else ""
    return ""


def prefect_url() -> str:
    """Return the API of a Prefect server that outlives this process, or the server's URL; empty if there is none."""
    return os.environ.get("PREFECT_API_URL") or up_url("prefect")


def embedded_artifacts(*, always: bool = False) -> str | None:
    """Return the artifact location of the embedded store; None if a server decides, unless `always`."""
    return None if os.environ.get("MLFLOW_TRACKING_URI") and not always else (home() / "artifacts").as_uri()


def command(name: str) -> str:
    """Return how a command of this environment is called here: by name if it is on PATH, otherwise by path."""
    ours = Path(sys.executable).parent / name
    if (found := shutil.which(name)) and Path(found) == ours:
        return name
    return str(ours.relative_to(Path.cwd())) if ours.is_relative_to(Path.cwd()) else str(ours)


def fresh(path: Path) -> Path:
    """Return `path`, after a change of its folder: an NFS client remembers for up to 60 s that a file did not exist,
    but forgets that when it changes the folder itself.
    """
    if not path.exists() and path.parent.is_dir():
        probe = path.with_name(f".look-{os.getpid()}")
        probe.touch()
        probe.unlink()
    return path
