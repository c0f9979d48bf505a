"""Slurm, by its own commands: jobs that hold nodes, programs on those nodes, and the states of both.

Slurm's errors seldom say what to do. All functions here raise HostError instead; `unreachable` then means that
slurmctld did not answer, so that the state of jobs is unknown.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from infra.hosts import HostError

ANSWER_S = 15.0  # without a controller, Slurm's commands end by themselves after 2 x MessageTimeout / 5
OURS = "shardline"  # the first word of a job's comment
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
# Variables of this process that programs on the nodes get. All others stay here, also secrets.
PASSED_ON = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SLURM_CONF", "USER")
SETTINGS = ("SLURM_", "SRUN_", "SQUEUE_", "SCANCEL_", "SALLOC_", "SINFO_")  # they would change the commands' output

CURES = (
    # text in Slurm's answer, the sentence for the user, and whether a later try may succeed
    ("Unable to contact slurm controller", "slurmctld does not answer: is it running, and is the network up?", True),
    ("Socket timed out", "slurmctld does not answer in time: it may be overloaded", True),
    ("Connection refused", "nothing listens at slurmctld's address: check that it runs", True),
    ("Could not establish a configuration source", "this machine has no slurm.conf and finds no slurmctld: start "
     "Shardline on a login node", False),
    ("Unable to confirm allocation", "slurmctld does not answer, or the job does not run at the moment", True),
    ("Invalid partition", "there is no such partition: `sinfo -s` lists them; set launch.slurm.partition", False),
    ("Invalid account", "you may not use that account or partition: `sacctmgr show associations user=$USER` lists "
     "yours; set launch.slurm.account", False),
    ("Invalid qos", "there is no such quality of service for you: set launch.slurm.qos", False),
    ("Invalid feature", "no node has that feature: `sinfo -o '%N %f'` lists them; set launch.slurm.constraint", False),
    ("Requested node configuration is not available", "no nodes of the partition have these resources: `sinfo -N -l` "
     "shows what they have; lower launch.slurm's nodes, gpus_per_node, cpus_per_node or memory_gib", False),
    ("Requested time limit is invalid", "the partition allows less time: `sinfo -o '%P %l'` shows how much; lower "
     "launch.slurm.time_limit_s", False),
    ("Invalid generic resource", "the cluster has no GPUs of that kind: `sinfo -o '%N %G'` shows what it has", False),
    ("Batch job submission failed", "Slurm refuses the job", False),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job as slurmctld reports it. `nodes`: the nodes that it has now, without failed ones.

    `ends_at`: the end of its time limit, or of a preemption's grace period, in seconds since the epoch; 0: unknown.
    """

    id: str
    state: str  # PENDING, CONFIGURING, RUNNING, COMPLETING, or a state of ENDED
    reason: str
    nodes: tuple[str, ...]
    batch_host: str
    comment: str
    ends_at: float
    preempted: bool
    began_at: float = 0.0

    @property
    def waits(self) -> bool:
        return self.state in {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING"}

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True)
class NodeInfo:
    """A node as slurmctld sees it. `responds`: its slurmd answers. `state`: for example DOWN or ALLOCATED+DRAIN."""

    name: str
    address: str
    state: str
    responds: bool

    @property
    def is_down(self) -> bool:
        return bool(re.search(r"\b(DOWN|FAIL|POWER(ED|ING)_DOWN)\b", self.state))


@dataclass(frozen=True)
class Step:
    """A program on a node of a job; `id` is JOB.NUMBER."""

    id: str
    name: str
    node: str


def environment() -> dict[str, str]:
    """Return the environment for Slurm's commands: no settings of an enclosing job, and times as epoch seconds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS) or name == "SLURM_CONF"}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}


def _passed_on() -> str:
    return ",".join(name for name in PASSED_ON if name in os.environ)


def _ask(program: str, *words: str, content: str = "", timeout_s: float = ANSWER_S) -> str:
    """Return the standard output of one of Slurm's commands; `content` is written to its standard input."""
    if shutil.which(program) is None:
        raise HostError(
            f"{program} is not on PATH: start Shardline on a login node of the cluster, or inside a job there"
        )
    try:
        done = subprocess.run(
            [program, *words], input=content, capture_output=True, text=True, timeout=timeout_s, env=environment()
        )
    except subprocess.TimeoutExpired:
        raise HostError(
            f"{program} gave no answer in {timeout_s:g} s: is slurmctld running?", unreachable=True
        ) from None
    if done.returncode:
        raise explained(program, done.stderr)
    return done.stdout


def explained(program: str, answer: str) -> HostError:
    """Turn the output of a failed Slurm command into an error with a cure."""
    said = " ".join(answer.split())
    for sign, words, unreachable in CURES:
        if sign.lower() in said.lower():
            return HostError(f"{words} ({program} said: {said})", unreachable=unreachable)
    return HostError(f"{program} failed: {said or 'it printed nothing'}")


# Jobs


def submit(script: str, *, name: str, comment: str, options: Sequence[str]) -> str:
    """Submit a batch job and return its ID. Of the environment it gets only PASSED_ON."""
    answer = _ask(
        "sbatch",
        "--parsable",
        f"--job-name={name}",
        f"--comment={comment}",
        f"--export={_passed_on()}",
        *options,
        content=script,
        timeout_s=60.0,
    )
    return answer.strip().partition(";")[0]  # a cluster's name may follow


def job(job_id: str) -> Job | None:
    """Return the job; None once slurmctld has forgotten it (MinJobAge, 300 s after its end)."""
    try:
        text = _ask("scontrol", "--oneliner", "show", "job", job_id)
    except HostError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    fields = _fields(text)
    return Job(
        id=job_id,
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        nodes=expand(fields.get("NodeList", "")),
        batch_host=_value(fields.get("BatchHost", "")),
        comment=_value(fields.get("Comment", "")),
        ends_at=_time(fields.get("EndTime", "")),
        preempted=_time(fields.get("PreemptTime", "")) > 0,
        began_at=_time(fields.get("StartTime", "")),
    )


def our_jobs(run: str = "") -> list[Job]:
    """Return Shardline's jobs that wait, run or are ending: of all runs, or of one."""
    rows = _ask("squeue", "--me", "--noheader", "--format=%i|%k").splitlines()
    ids = [job_id for job_id, _, comment in (row.partition("|") for row in rows) if comment.startswith(f"{OURS}:")]
    found = [known for job_id in ids if (known := job(job_id)) is not None]
    return [known for known in found if not run or run_of(known) == run]


def comment_of(run_id: str, *, launcher: str) -> str:
    """Return the comment that marks a job as Shardline's: the run, and the process that holds its lease."""
    return f"{OURS}:{run_id}:{launcher}"


def run_of(found: Job) -> str:
    return found.comment.split(":")[1]


def launcher_of(found: Job) -> str:
    return found.comment.split(":", 2)[2]


def cancel(job_id: str) -> None:
    """End the job and all programs in it, if it still exists."""
    try:
        _ask("scancel", job_id)
    except HostError as error:
        if not re.search("Invalid job id|already completing", str(error)):
            raise


def expand(hostlist: str) -> tuple[str, ...]:
    """Return the names in a list as Slurm writes it: n[1-3],gpu7."""
    if not _value(hostlist):
        return ()
    if "[" not in hostlist:
        return tuple(hostlist.split(","))
    return tuple(_ask("scontrol", "show", "hostnames", hostlist).split())


def node_infos(names: Iterable[str]) -> dict[str, NodeInfo]:
    """Return the nodes by name, as slurmctld sees them."""
    wanted = ",".join(names)
    if not wanted:
        return {}
    found = map(_fields, _ask("scontrol", "--oneliner", "show", "node", wanted).splitlines())
    return {
        fields["NodeName"]: NodeInfo(
            name=fields["NodeName"],
            address=fields.get("NodeAddr", fields["NodeName"]),
            state=fields["State"].replace("*", ""),
            responds="*" not in fields["State"] and "NOT_RESPONDING" not in fields["State"],
        )
        for fields in found
        if "NodeName" in fields
    }


def resolved(node: NodeInfo) -> str:
    """Return the node's IP address, as this machine resolves it. Raises HostError if that fails."""
    try:
        return str(socket.getaddrinfo(node.address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise HostError(
            f"{node.name}: its address {node.address} does not resolve here ({error}): check NodeAddr in slurm.conf",
            hosts=(node.name,),
        ) from error


# Steps


def start(
    job_id: str,
    node: str,
    command: Sequence[str],
    *,
    name: str,
    working_dir: str,
    log: Path,
    options: Sequence[str] = (),
    secret: bytes = b"",
    waits_for_input: bool = False,
) -> subprocess.Popen[bytes]:
    """Run a command on one node of a job, with its own srun; `secret` is written to its standard input.

    The exit code of srun is the command's. The step may use all resources that the job has on the node, beside other
    steps. `waits_for_input`: its input comes later, by `give_input`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                "srun",
                f"--jobid={job_id}",
                f"--job-name={name}",
                f"--nodelist={node}",
                "--nodes=1",
                "--ntasks=1",
                "--overlap",
                "--no-kill",
                "--unbuffered",
                "--quit-on-interrupt",
                f"--chdir={working_dir}",
                f"--export={_passed_on()}",
                f"--input={0 if secret or waits_for_input else 'none'}",
                *options,
                *command,
            ],
            stdin=subprocess.PIPE if secret or waits_for_input else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,  # a Ctrl-C must reach only this process, which then stops the ranks
        )
    if secret:
        give_input(process, secret)
    return process


def give_input(process: subprocess.Popen[bytes], content: bytes) -> None:
    """Send the content to a step's standard input, and close the input."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the step ended before it read everything: its output tells why
        process.stdin.write(content)
        process.stdin.close()


def steps(job_id: str) -> list[Step]:
    """Return the programs on the nodes of a job, without the script that holds the nodes."""
    rows = _ask("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i|%j|%N").splitlines()
    found = [Step(*row.split("|")) for row in rows if row.count("|") == 2]
    return [step for step in found if step.id.rpartition(".")[2].isdigit()]


def terminate(step_ids: Iterable[str]) -> None:
    """Send SIGTERM to the programs of these steps, and do not wait."""
    _scancel(["--signal=TERM", *step_ids])


def kill(step_ids: Iterable[str]) -> None:
    """Kill the programs of these steps."""
    _scancel([*step_ids])


def _scancel(words: Sequence[str]) -> None:
    """Run scancel. Slurm 22.05 asks all nodes of the job, and reports an error for each node without that step."""
    if not any(not word.startswith("-") for word in words):
        return
    try:
        _ask("scancel", *words)
    except HostError as error:
        if error.unreachable or not re.search("Invalid job id|already completing", str(error)):
            raise


# Slurm's text


def _fields(text: str) -> dict[str, str]:
    """Return name -> value from one line of `scontrol --oneliner show`; for a value with spaces, its first word."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)", text))


def _value(text: str) -> str:
    return "" if text in {"(null)", "n/a", "N/A", "None"} else text


def _time(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+", text) else _naive_time(text)


def _naive_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
