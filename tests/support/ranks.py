"""Real ranks for the tests, forked from a server that has imported the training programs once.

torchrun starts each rank as a fresh interpreter, whose imports take 4 s of a core; the tests of the launcher and of
the pipeline pay that, the many here need not. Environment, process group and program are the same.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tasks.workspace.processes import free_port
from tests.support import nccl_like
from tests.support.device import rank_environment
from tests.support.forked import SERVER
from tests.support.waiting import until
from training.records.checkpoint import CheckpointManifest
from training.records.plan import RunPlan
from training.records.train_result import TrainResult
from training.tracking.rows import METRICS, read_rows

BACKEND = "SHARDLINE_TEST_BACKEND"  # nccl_like: the ranks' groups are those of tests/support/nccl_like.py
SERVER.set_forkserver_preload(["tests.support.gc_off", "tests.support.rank_imports"])


def _run_rank(program: str, plan_path: Path, environment: dict[str, str], log_path: Path) -> None:
    os.environ.update(environment)
    if environment.get(BACKEND) == nccl_like.NAME:
        nccl_like.install()
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [program, str(plan_path)]
    importlib.import_module(program).main(plan_path)


class Ranks:
    """A program on the run plan's ranks, or on `ranks`. If one fails the others are ended, as torchrun does it.

    `hosts`: the host that each rank believes to be on; all are on this machine.
    """

    def __init__(
        self, plan_path: Path, *, program: str = "training.train", ranks: int = 0, hosts: Sequence[str] = ()
    ) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server inherits it
        ranks = ranks or RunPlan.read(plan_path).world_size
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        self.log_path = plan_path.parent / f"{program}.log"
        self.processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MLFLOW_TRACKING_URI": ""}
            place |= {"SHARDLINE_HOST": hosts[rank]} if hosts else {}
            place[BACKEND] = os.environ.get(BACKEND, "")
            environment = world | place | rank_environment()
            process = SERVER.Process(target=_run_rank, args=(program, plan_path, environment, self.log_path))
            process.start()
            self.processes.append(process)

    def wait(self, *, end_others: bool = True) -> list[int]:
        """Exit codes by rank; once a rank failed the others are ended, or left to end by themselves."""
        running = {process.sentinel: process for process in self.processes}
        while running:
            for sentinel in wait(list(running)):
                process = running.pop(sentinel)  # type: ignore[index]
                process.join()
                if process.exitcode and end_others:
                    for other in running.values():
                        other.terminate()
        return [process.exitcode or 0 for process in self.processes]

    def finish(self) -> None:
        """Wait; a failure shows what the ranks printed, and their stacks if a signal ended one."""
        codes = self.wait()
        stacks = [path.read_text() for path in sorted(self.log_path.parent.glob("stacks/*.txt"))] if any(codes) else []
        assert not any(codes), "\n".join([f"exit codes {codes}", self.log(), *stacks])

    def signal(self, signum: signal.Signals) -> None:
        """To every rank that is still there."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signum)

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""


def torchrun(plan_path: Path, *, program: str = "training.train") -> list[str]:
    """The command that runs a program on the plan's ranks, as the launcher does it."""
    ranks = str(RunPlan.read(plan_path).world_size)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return [*launcher, "-m", program, str(plan_path)]


def run_ranks(plan_path: Path, *, program: str = "training.train") -> None:
    """Run it to its end; a failure shows what the ranks printed."""
    Ranks(plan_path, program=program).finish()


def rank_env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""}


def result(plan_path: Path) -> TrainResult:
    return TrainResult.read(plan_path.parent / "result.json")


def losses(plan_path: Path) -> dict[int, float]:
    """Step -> training loss, as logged."""
    return {row["step"]: row["loss"] for row in read_rows(plan_path.parent / "metrics.jsonl") if "loss" in row}


def kill_and_resume(make: Callable[..., Path], *, ranks: int, at_step: int, undisturbed: Path) -> Path:
    """The plan of a run of two ranks that was killed after a step and ended by `ranks`: it has `undisturbed`'s losses,
    to the bit on two ranks. `make`: plans a run of a name for so many ranks.
    """
    import torch  # not for the many who only read losses

    name = f"killed {ranks}"
    plan_path = make(name, ranks=2)
    killed = Ranks(plan_path)
    until(lambda: (plan_path.parent / METRICS).exists() and at_step in losses(plan_path), f"step {at_step} is logged")
    killed.signal(signal.SIGKILL)
    killed.wait()
    assert max(losses(plan_path)) < RunPlan.read(plan_path).steps
    make(name, ranks=ranks)
    run_ranks(plan_path)
    got, expected = losses(plan_path), losses(undisturbed)
    if ranks == 2:
        assert got == expected
    else:
        torch.testing.assert_close(*(torch.tensor(list(each.values())) for each in (got, expected)), rtol=1e-4, atol=0)
    return plan_path


def weight_hashes(plan_path: Path, step: int) -> list[str]:
    """Of the checkpoint of a step: model, optimizer, and what each rank keeps of its own."""
    files = CheckpointManifest.read(plan_path.parent / "checkpoints" / f"{step:08d}" / "manifest.json").files
    return [str(file) for name, file in sorted(files.items()) if name.startswith(("model", "optimizer", "own"))]
