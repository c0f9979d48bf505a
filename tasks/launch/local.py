"""Run a training program on ranks of this machine, watch it, and stop it in order.

The program runs under torchrun in a session of its own, so that a Ctrl-C in the terminal reaches only us: we
pass it on as SIGTERM, the ranks save a checkpoint and leave, and nobody is cut off in a collective.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.launch import nsight
from tasks.launch.failure import OUT_OF_MEMORY, PEER_IS_GONE, cause_of
from tasks.launch.lease import FENCE_S, withdraw_leases
from tasks.runs.errors import RunFailed, RunStopped
from tasks.runs.owner import RanksLauncher, ranks_launcher
from tasks.workspace.paths import tracking_uri
from tasks.workspace.processes import process_key
from training.records.plan import AnyPlan, RankPlan, RunPlan

logger = logging.getLogger(__name__)

POLL_S = 0.25
STOP_GRACE_S = 120.0
CHECKPOINT_GIB_PER_S = 0.1  # the slowest disk that a checkpoint on its way, and the last one, are waited for
STACK_S = 1.0  # in which ranks that did not stop write their Python stacks
LAST_LINES = 25
LOG_LINE = re.compile(r"[\d-]+ [\d:,]+ [A-Z]+ ")
DIED = re.compile(r"rank +: (\d+) .*\n.*exitcode.*\n.*error_file.*\n.*(Signal \d+ \(\w+\) received by PID \d+)")
RANK_WARNING = re.compile(r"[\d-]+ [\d:,]+ WARNING (.*)")  # as training/runtime/process.py formats its log


def run_program(
    module: str, *, plan: RankPlan, run_dir: Path, ranks: int = 0, on_poll: Callable[[], object] = lambda: None
) -> None:
    """Run `python -m MODULE runs/ID/plan.json` on `ranks` ranks (0: the plan's) and wait; output goes to logs/.

    Raises RuntimeError with the log's last lines if it fails, RunStopped if we were interrupted meanwhile.
    """
    end_earlier_attempt(run_dir, grace_s=grace_s(plan))
    end_containers(run_dir)
    log_path = run_dir / "logs" / f"{module.rpartition('.')[2]}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(run_dir / "stacks", ignore_errors=True)
    command = command_for(module, plan=plan, run_dir=run_dir, ranks=ranks or plan.world_size)
    kills = kernel_kills()
    with log_path.open("ab") as log:
        earlier = log.tell()
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=_environment(plan)
        )
    RanksLauncher(launcher=process_key(process.pid)).write(run_dir / "gang.json")
    stacks = Stacks(run_dir / "stacks")
    try:
        while process.poll() is None:
            on_poll()
            stacks.look()
            time.sleep(POLL_S)
        on_poll()
    except Exception:
        _stop(process, grace_s=grace_s(plan))
        raise
    except BaseException:  # Ctrl-C, or the SIGTERM that Prefect turns into an exception
        _stop(process, grace_s=grace_s(plan))
        again = f"`shardline resume {plan.run_id}` goes on from the last checkpoint"
        again = again if isinstance(plan, RunPlan) else "nothing was kept: evaluate again"
        raise RunStopped(f"interrupted: {again}") from None
    with log_path.open("rb") as log:
        log.seek(earlier)
        lines = log.read().decode(errors="replace").splitlines()
    for line in lines:
        if match := RANK_WARNING.match(line):
            logger.warning("%s: %s", module, match[1])
    if process.returncode:
        error = _error_line(process.returncode, lines, memory_was_used_up=kernel_kills() > kills)
        raise RunFailed(_failure(module, error, lines, log_path) + stacks.where(), cause=cause_of(error), detail=error)


def command_for(module: str, *, plan: RankPlan, run_dir: Path, ranks: int) -> list[str]:
    """The command line: under torchrun if there are several ranks, each under nsys if the plan's config says so."""
    wrapped = nsight.prefix(module, plan, run_dir=run_dir, rank="%q{RANK}" if ranks > 1 else "0")
    if wrapped:
        nsight.check_here(plan.config)
    program = [*wrapped, sys.executable, "-u", "-m", module, str(run_dir / "plan.json")]
    if ranks == 1:
        return program
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "--no-python", *program]


class Stacks:
    """runs/ID/stacks: what ranks write of where they are when no step comes (training/runtime/watchdog.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, False

    def look(self) -> None:
        """Warn once; a rank empties its file when a step comes after all."""
        if not self.seen and self._written():
            self.seen = True
            logger.warning("training has made no step for a while: the ranks' Python stacks are in %s", self.folder)

    def where(self) -> str:
        written = ", ".join(path.stem for path in self._written())
        return f"\nThe Python stacks of {written} are in {self.folder}" if written else ""

    def _written(self) -> list[Path]:
        return [path for path in sorted(self.folder.glob("rank-*.txt")) if path.stat().st_size]


def _environment(plan: RankPlan) -> dict[str, str]:
    """Our own, plus what ranks need: the tracking URI, threads, and the process they must not outlive."""
    return {
        # OpenMP threads that wait by spinning lose their core to whatever else runs: with one other busy process on
        # 2 cores, 2 threads trained at 217 tokens/s; at 1000 spins 8,266, and as fast as before (20,900) when alone.
        "GOMP_SPINCOUNT": "1000",
        **plan.environment(),
        **os.environ,
        "MLFLOW_TRACKING_URI": tracking_uri(),
        "OMP_NUM_THREADS": str(plan.threads_per_rank),
        "PYTHONSAFEPATH": "1",  # a folder named `training` where the user stands must not take our place
        "SHARDLINE_LAUNCHER_PID": str(os.getpid()),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _stop(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """Send SIGTERM, wait for a checkpoint, then send SIGKILL. A second Ctrl-C skips the wait."""
    logger.info("stopping: the ranks save a checkpoint and leave (Ctrl-C again kills them)")
    try:
        _end(psutil.Process(process.pid), grace_s=grace_s)
    except psutil.NoSuchProcess:
        pass
    finally:
        process.wait()


def _is_rank(process: psutil.Process) -> bool:
    """Whether it runs `python … -m training.X plan.json` itself, and is not torchrun, nsys or a compiler.

    A node program counts too: it stops the ranks below it by itself.
    """
    with suppress(psutil.NoSuchProcess):
        command = process.cmdline()
        wrapped = any("torch.distributed.run" in word or Path(word).name.startswith("nsys") for word in command)
        return not wrapped and bool(command) and (command[-1].endswith("plan.json") or "training.node" in command)
    return False


def grace_s(plan: AnyPlan | RankPlan | None) -> float:
    """Seconds that ranks get to save a checkpoint when they are told to stop; of a run without a plan, the least."""
    gib = plan.predicted.checkpoint_gib if isinstance(plan, RunPlan) else 0.0
    return STOP_GRACE_S + 2 * gib / CHECKPOINT_GIB_PER_S


def _end(launcher: psutil.Process, *, grace_s: float) -> None:
    """Stop a launcher and its ranks in order, however long their checkpoint takes within the grace.

    The ranks are told directly: torchrun would kill them 30 s after it was told, and as each is in a session of
    its own, no process group reaches them all.
    """
    family = [launcher]
    with suppress(psutil.NoSuchProcess):  # it leaves by itself too, once whoever started it is gone
        family += launcher.children(recursive=True)
    try:
        for rank in [*filter(_is_rank, family)] or family:  # none yet: the launcher still imports
            with suppress(psutil.NoSuchProcess):
                rank.terminate()
        _, alive = psutil.wait_procs(family, timeout=grace_s)
        for member in alive:  # they hang: let them say where
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGUSR1)
        _, alive = psutil.wait_procs(alive, timeout=STACK_S)
    except KeyboardInterrupt:
        alive = family
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive)


def end_earlier_attempt(run_dir: Path, *, grace_s: float) -> None:
    """Stop the ranks of an earlier start that outlived their launcher: no two attempts work on one run."""
    if launcher := ranks_launcher(run_dir):
        logger.warning("ranks of an earlier start are still alive (pid %d): stopping them first", launcher.pid)
        _end(launcher, grace_s=grace_s)


def end_containers(run_dir: Path) -> None:
    """Withdraw the leases of containers whose launcher was killed, when their run is resumed on this machine."""
    if withdraw_leases(run_dir):
        logger.warning(
            "ranks of an earlier start on Docker hosts may be alive: their lease is withdrawn, which ends them; "
            "`shardline reap` removes their containers"
        )
        time.sleep(FENCE_S)


def kernel_kills() -> int:
    """Processes that the kernel has killed so far because memory, or a control group's share of it, was used up."""
    path = Path("/proc/vmstat")
    counted = re.search(r"^oom_kill (\d+)", path.read_text(), flags=re.MULTILINE) if path.exists() else None
    return int(counted[1]) if counted else 0


def _error_line(code: int, lines: list[str], *, memory_was_used_up: bool) -> str:
    """The line that tells why: an exception's, or torchrun's of the signal that a rank died of.

    Want of memory comes first, wherever it stands, and a lost peer last: the ranks that lost it say so, each.
    """
    causes = [line for line in lines if ("Error:" in line or "NonFiniteLoss:" in line) and not LOG_LINE.match(line)]
    signals = [f"rank {rank} died: {signal}" for rank, signal in DIED.findall("\n".join(lines))]
    errors = [line.strip() for line in causes if "ChildFailedError" not in line]
    memory = [line for line in errors if OUT_OF_MEMORY.search(line)]
    its_own = [line for line in errors if not PEER_IS_GONE.search(line)]
    killed = [*(line for line in signals if "Signal 9" in line), *(["Signal 9"] if code == -signal.SIGKILL else [])]
    if memory_was_used_up and killed and not memory:
        return f"MemoryError: the kernel killed a rank, since memory was used up ({killed[0]})"
    return next(
        iter(memory or its_own or killed or errors or signals), f"exit code {code}" if code > 0 else f"Signal {-code}"
    )


def _failure(module: str, error: str, lines: list[str], log_path: Path) -> str:
    tail = "\n".join(lines[-LAST_LINES:])
    return f"{module} failed: {error}\nThe last lines of {log_path}:\n{tail}"
