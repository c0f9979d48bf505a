"""Probes a host before a run: its daemon, the image, and what a short-lived container finds there.

Nothing here stops at the first thing that is wrong. What a daemon refuses is put into words and taken out of the
request, which is then made again, so that one look shows all there is to mend on a host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from docker.errors import APIError, ImageNotFound

from infra.containers import Job, kill, missing_device, remove, start, state
from infra.hosts import DockerHost, HostClient, HostError, connect, host_errors, on_all

POLL_S = 0.05
CLOCK_LIMIT_S = 5.0
LAST_CHARACTERS = 800
NOT_FOUND = 127  # of the container's init, as of a shell


@dataclass(frozen=True)
class Probe:
    """`findings` are what is wrong, each with its cure; `report` is what the throw-away container printed, if it did.

    `has_gpus`: the container was granted the GPUs that its job asks for.
    """

    host: str
    reachable: bool
    findings: tuple[str, ...] = ()
    image_id: str = ""
    digests: tuple[str, ...] = ()  # NAME@sha256:… in the registries that the image was in
    has_gpus: bool = False
    report: Mapping[str, Any] = field(default_factory=dict)


def probe_all(hosts: Sequence[DockerHost], jobs: Mapping[str, Job], *, timeout_s: float = 60.0) -> dict[str, Probe]:
    """Probe all hosts at once, each with its throw-away job: host's name -> what it said."""
    return on_all(hosts, lambda host: probe(host, jobs[host.name], timeout_s=timeout_s))


def probe(host: DockerHost, job: Job, *, timeout_s: float) -> Probe:
    """Probe one host. `job` prints a JSON object as its last line within `timeout_s`; its `findings` are taken over."""
    try:
        with closing(connect(host)) as client:
            return _probe(client, job, timeout_s=timeout_s)
    except HostError as error:
        return Probe(host.name, reachable=not error.unreachable, findings=(_said(error),))


def _probe(client: HostClient, job: Job, *, timeout_s: float) -> Probe:
    name, clock = client.host.name, check_clock(client)
    try:
        with host_errors(client.host):
            image = client.images.get(job.image)
    except HostError as error:
        if not isinstance(error.__cause__, ImageNotFound):
            raise
        return Probe(
            name, reachable=True, findings=(*clock, f"it has not got the image {job.image}: {_cure(job.image)}")
        )
    container, granted, refused = start_what_is_granted(client, job)
    report: Mapping[str, Any] = {}
    if container:
        output = finish(client, container, timeout_s=timeout_s)
        report = output.report()
        if not report and not refused:  # else what was refused is the reason
            refused = (silence(job, output, timeout_s=timeout_s),)
    return Probe(
        name,
        reachable=True,
        findings=(*clock, *refused, *report.get("findings", ())),
        image_id=str(image.id),
        digests=tuple(image.attrs.get("RepoDigests") or ()),
        has_gpus=bool(container and (granted.gpus or granted.gpu_ids)),
        report=report,
    )


def _cure(image: str) -> str:
    if image.startswith("sha256:"):
        return "send it (`docker save … | ssh HOST docker load`), or push it and set launch.image=NAME@sha256:…"
    return f"`docker pull {image}` there, or send it (`docker save … | ssh HOST docker load`)"


def _said(error: HostError) -> str:
    """The error without the host's name, since findings are listed under it."""
    return str(error).removeprefix(f"{error.hosts[0]}: ") if len(error.hosts) == 1 else str(error)


# The clock


def check_clock(client: HostClient) -> tuple[str, ...]:
    before = time.time()
    with host_errors(client.host):
        time_on_host = client.info()["SystemTime"]
    return clock_findings(time_on_host, before=before, after=time.time())


def clock_findings(time_on_host: str, *, before: float, after: float) -> tuple[str, ...]:
    """Compare the host's clock, in RFC 3339, with ours: it was read between `before` and `after` (Unix seconds).

    With clocks further apart the age of a lease or a heartbeat means nothing, and logs of hosts do not line up.
    """
    theirs = datetime.fromisoformat(time_on_host).timestamp()
    ahead_s = max(theirs - after, 0.0) or min(theirs - before, 0.0)
    if abs(ahead_s) <= CLOCK_LIMIT_S:
        return ()
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"its clock is {abs(ahead_s):.1f} s {side} the launcher's, {CLOCK_LIMIT_S:g} s are allowed: "
        "`timedatectl set-ntp true` on both",
    )


# The throw-away container


@dataclass(frozen=True)
class Output:
    """The exit code and the output of a container; `code` None: it did not end in time."""

    code: int | None
    stdout: str
    stderr: str

    def report(self) -> dict[str, Any]:
        """The JSON object of its last line, empty if there is none."""
        try:
            report = json.loads(self.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return {}
        return report if isinstance(report, dict) else {}


def finish(client: HostClient, container: str, *, timeout_s: float) -> Output:
    """Wait at most `timeout_s` for the container to end, read its output, and remove it, whatever happens."""
    try:
        code, deadline = None, time.monotonic() + timeout_s
        while code is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            now = state(client, container)
            if now is None:  # another launcher has removed it
                name = client.host.name
                raise HostError(f"{name}: somebody removed our container while it ran: try again", hosts=(name,))
            code = None if now.running or now.status == "created" else now.exit_code
        if code is None:
            kill(client, container)
        with host_errors(client.host):
            stdout, stderr = (client.api.logs(container, stdout=out, stderr=not out) for out in (True, False))
    finally:
        remove(client, container)
    return Output(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


def start_what_is_granted(client: HostClient, job: Job) -> tuple[str, Job, tuple[str, ...]]:
    """The container's id, empty if there is no way to start it; the job as granted; in words, what was refused of it.

    Raises HostError if the daemon is out of reach.
    """
    refused: list[str] = []
    lesser: Job | None = job
    while lesser is not None:
        job = lesser
        try:
            return start(client, job), job, tuple(refused)
        except HostError as error:
            if not isinstance(error.__cause__, APIError):
                raise
            words = str(error.__cause__.explanation or error.__cause__)
            refused.append(_extra_words(words, job) or _said(error))
            lesser = without(words, job)
    return "", job, tuple(refused)


def _extra_words(words: str, job: Job) -> str:
    """Return the first line of an error that infra/hosts.py has no sentence for."""
    if "nvidia-container-cli" in words or "unknown device" in words:
        asked = ", ".join(job.gpu_ids) or ("all" if job.gpus < 0 else job.gpus)
        return f"it has not the GPUs asked for ({asked}): see `nvidia-smi -L` there (Docker said: {words.strip()})"
    if device := missing_device(words):
        return f"it has no {device}: load the device's driver there, or take it out of launch.devices"
    return ""


def without(words: str, job: Job) -> Job | None:
    """The job without what the daemon's words refuse; None where they name nothing that could be left out."""
    if "device driver" in words or "nvidia-container-cli" in words or "unknown device" in words:
        return replace(job, gpus=0, gpu_ids=()) if job.gpus or job.gpu_ids else None
    if "rlimit" in words:
        return replace(job, memlock=False) if job.memlock else None
    if device := missing_device(words):
        rest = tuple(name for name in job.devices if name != device)
        return replace(job, devices=rest) if len(rest) < len(job.devices) else None
    if "bind source path does not exist: " in words:
        missing = words.partition("bind source path does not exist: ")[2].strip()
        mounts = tuple(bind for bind in job.mounts if bind.source != missing)
        return replace(job, mounts=mounts) if len(mounts) < len(job.mounts) else None
    return None


def silence(job: Job, output: Output, *, timeout_s: float) -> str:
    """Say why a container left no report."""
    if output.code is None:
        return f"no answer from a container in {timeout_s:g} s: does its shared folder hang? See `df` there"
    last = (output.stderr or output.stdout).strip()[-LAST_CHARACTERS:] or "and said nothing"
    if output.code == NOT_FOUND or "No module named" in last:
        what = job.command[0] if output.code == NOT_FOUND else "Shardline"
        return f"the image {job.image} has no {what} in it: build one with `shardline image build` ({last})"
    return f"a container of the image ended with exit code {output.code}: {last}"


# One image on all


def image_findings(image: str, probes: Sequence[Probe]) -> dict[str, str]:
    """Host's name -> that its image is another than the first host's.

    Daemons that store images in different ways give the same image unlike ids; a digest that both know decides then.
    """
    with_image = [probe for probe in probes if probe.image_id]
    if not with_image:
        return {}
    first, *others = with_image
    return {
        other.host: f"its {image} is {other.image_id[:19]}, on {first.host} it is {first.image_id[:19]}: "
        "set launch.image to one digest (NAME@sha256:…) or id, and pull that on every host"
        for other in others
        if other.image_id != first.image_id and not {*other.digests} & {*first.digests}
    }
