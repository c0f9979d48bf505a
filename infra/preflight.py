"""Probes a host before a run: its daemon, the image, and the checks of a short-lived container there.

A probe does not stop at the first error. If the daemon refuses a part of the request, that is noted as a finding, and
the request is repeated without that part, so that one probe shows everything that must be corrected on a host.
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
NOT_FOUND = 127  # exit codes of the container's init, the same as a shell's


@dataclass(frozen=True)
class Probe:
    """`findings` are the errors, each with its cure; `report` is the throw-away container's output, if there is any.

    `has_gpus`: the container was granted the GPUs that its job asks for.
    """

    host: str
    reachable: bool
    findings: tuple[str, ...] = ()
    image_id: str = ""
    digests: tuple[str, ...] = ()  # NAME@sha256:… of the image in registries
    has_gpus: bool = False
    report: Mapping[str, Any] = field(default_factory=dict)


def probe_all(hosts: Sequence[DockerHost], jobs: Mapping[str, Job], *, timeout_s: float = 60.0) -> dict[str, Probe]:
    """Probe all hosts at once, each with its throw-away job; return host's name -> the result."""
    return on_all(hosts, lambda host: probe(host, jobs[host.name], timeout_s=timeout_s))


def probe(host: DockerHost, job: Job, *, timeout_s: float) -> Probe:
    """Probe one host. `job` prints a JSON object as its last line within `timeout_s`; its `findings` are included."""
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
            name, reachable=True, findings=(*clock, f"it does not have the image {job.image}: {_cure(job.image)}")
        )
    container, granted, refused = start_what_is_granted(client, job)
    report: Mapping[str, Any] = {}
    if container:
        output = finish(client, container, timeout_s=timeout_s)
        report = output.report()
        if not report and not refused:  # otherwise a refused part of the request is the reason
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
        return "copy it there (`docker save … | ssh HOST docker load`), or push it and set launch.image=NAME@sha256:…"
    return f"`docker pull {image}` there, or copy it (`docker save … | ssh HOST docker load`)"


def _said(error: HostError) -> str:
    """Return the error without the host's name, because findings are listed under that name."""
    return str(error).removeprefix(f"{error.hosts[0]}: ") if len(error.hosts) == 1 else str(error)


# The clock


def check_clock(client: HostClient) -> tuple[str, ...]:
    before = time.time()
    with host_errors(client.host):
        time_on_host = client.info()["SystemTime"]
    return clock_findings(time_on_host, before=before, after=time.time())


def clock_findings(time_on_host: str, *, before: float, after: float) -> tuple[str, ...]:
    """Compare the host's clock (RFC 3339) with this machine's; it was read between `before` and `after` (Unix seconds).

    If clocks differ by more, the hosts' logs cannot be compared by time.
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
    """The exit code and the output of a container. `code` None: it did not end in time."""

    code: int | None
    stdout: str
    stderr: str

    def report(self) -> dict[str, Any]:
        """Return the JSON object of the last line; empty if there is none."""
        try:
            report = json.loads(self.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return {}
        return report if isinstance(report, dict) else {}


def finish(client: HostClient, container: str, *, timeout_s: float) -> Output:
    """Wait at most `timeout_s` for the container's end, read its output, and remove it in any case."""
    try:
        code, deadline = None, time.monotonic() + timeout_s
        while code is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            now = state(client, container)
            if now is None:  # another launcher has removed it
                name = client.host.name
                raise HostError(f"{name}: somebody removed the container while it ran: try again", hosts=(name,))
            code = None if now.running or now.status == "created" else now.exit_code
        if code is None:
            kill(client, container)
        with host_errors(client.host):
            stdout, stderr = (client.api.logs(container, stdout=out, stderr=not out) for out in (True, False))
    finally:
        remove(client, container)
    return Output(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


def start_what_is_granted(client: HostClient, job: Job) -> tuple[str, Job, tuple[str, ...]]:
    """Return the container's id (empty: it cannot be started), the job as granted, and a sentence per refused part.

    Raises HostError if the daemon cannot be reached.
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
        return f"it lacks the GPUs asked for ({asked}): see `nvidia-smi -L` there (Docker said: {words.strip()})"
    if device := missing_device(words):
        return f"it has no {device}: load the device's driver there, or take it out of launch.devices"
    return ""


def without(words: str, job: Job) -> Job | None:
    """Return the job without the part that the daemon refused; None if the error names no part that can be left out."""
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
        return f"a container gave no answer in {timeout_s:g} s: its shared folder may hang; check with `df` there"
    last = (output.stderr or output.stdout).strip()[-LAST_CHARACTERS:] or "and said nothing"
    if output.code == NOT_FOUND or "No module named" in last:
        what = job.command[0] if output.code == NOT_FOUND else "Shardline"
        return f"the image {job.image} has no {what} in it: build one with `shardline image build` ({last})"
    return f"a container of the image ended with exit code {output.code}: {last}"


# The same image on all hosts


def image_findings(image: str, probes: Sequence[Probe]) -> dict[str, str]:
    """Return host's name -> a finding, where the image differs from the first host's.

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
