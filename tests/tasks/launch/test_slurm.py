"""What is asked of Slurm, and what its commands' answers mean; without a cluster (tests/slurm has one)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.cli.command import main
from infra.slurm import explained
from tasks.hardware.slurm_nodes import command, container_options
from tasks.launch.failure import NodeState
from tasks.launch.slurm import SlurmHost, StepNode
from tasks.launch.slurm_allocation import Allocation, AllocationRecord, options_of, require_slurm
from training.config.launch import LaunchConfig
from training.config.slurm import SlurmConfig
from training.records.node import NodeEnd


def test_every_setting_reaches_sbatch(tmp_path: Path) -> None:
    wanted = SlurmConfig(
        partition="gpu",
        account="mine",
        qos="high",
        reservation="maintenance",
        constraint="a100&ib",
        nodes=4,
        gpus_per_node=8,
        cpus_per_node=64,
        memory_gib=0.5,
        time_limit_s=90,
        signal_s=30,
        options=("--exclusive", "--mail-type=END"),
    )
    options = options_of(wanted, log=tmp_path / "100%.log")
    expected = {
        "--partition=gpu",
        "--account=mine",
        "--qos=high",
        "--reservation=maintenance",
        "--constraint=a100&ib",
        "--nodes=4",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
        "--mem=512M",
        "--time=2",
        "--signal=TERM@30",
        "--no-kill",
        "--no-requeue",
        "--exclusive",
        "--mail-type=END",
        f"--output={tmp_path}/100%%.log",
    }
    assert expected <= set(options)
    assert not any(
        word.startswith(("--partition", "--gpus", "--time")) for word in options_of(SlurmConfig(), log=Path())
    )


@pytest.mark.parametrize(
    ("fields", "cure"),
    [
        ({"options": ["--export=ALL"]}, "sets --export"),
        ({"options": ["--nodes 3"]}, "sets --nodes"),
        ({"options": ["rm -rf"]}, "options"),
        ({"modules": ["cuda; touch canary"]}, "modules"),
        ({"gpus_per_node": 2, "slots": 3}, "slots=0"),
        ({"time_limit_s": 60}, "raise the limit"),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(fields: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValidationError, match=cure):
        SlurmConfig.model_validate(fields)


def test_more_hosts_than_nodes_and_two_containers_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_hosts = 3 of launch\.slurm\.nodes = 2"):
        LaunchConfig.model_validate({"launcher": "slurm", "min_hosts": 3, "slurm": {"nodes": 2}})
    with pytest.raises(ValidationError, match=r"image = a and .* give one of them"):
        LaunchConfig.model_validate({"launcher": "slurm", "image": "a", "slurm": {"command_prefix": ["apptainer"]}})


def test_python_starts_as_the_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    words = ("-m", "training.node", "task.json")
    assert command(LaunchConfig(), *words) == [sys.executable, "-P", *words]
    prefix = ("apptainer", "exec", "image.sif")
    assert command(LaunchConfig(slurm=SlurmConfig(command_prefix=prefix)), *words) == [*prefix, "python", "-P", *words]
    image = LaunchConfig(image="registry#shardline:1", mounts=("/data:/data",))
    assert command(image, *words) == ["python", "-P", *words]
    mounts = f"--container-mounts={tmp_path}:{tmp_path},/data:/data:ro"
    assert container_options(image) == ["--container-image=registry#shardline:1", mounts]
    assert container_options(LaunchConfig()) == []


def test_modules_are_loaded_in_a_login_shell_and_arguments_stay_arguments() -> None:
    hostile = "$(touch canary)"
    launch = LaunchConfig(slurm=SlurmConfig(modules=("cuda/12.4", "nccl"), python="echo"))
    shell, *rest = command(launch, hostile)
    rest[1] = rest[1].replace("module load", "echo loading")
    done = subprocess.run([shell, *rest], capture_output=True, text=True, check=True)
    assert done.stdout == f"loading cuda/12.4 nccl\n-P {hostile}\n"


def test_an_answer_of_slurms_is_told_with_its_cure() -> None:
    error = explained("sbatch", "sbatch: error: Batch job submission failed: Invalid account or account/partition")
    assert "launch.slurm.account" in str(error)
    assert not error.unreachable
    assert explained(
        "squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    ).unreachable
    assert "it printed nothing" in str(explained("scancel", ""))


def test_a_machine_without_slurm_is_refused_before_texts_are_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "runs"))
    words = ["pretrain", "quickstart", "launch.launcher=slurm"]
    assert main(words) == 2
    assert "squeue is not on PATH: start Shardline on a login node" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("answer", "later"),
    [
        ("squeue: error: Unable to contact slurm controller (connect failure)", True),
        ("squeue: fatal: Could not establish a configuration source", False),
    ],
)
def test_a_controller_that_does_not_answer_yet_is_waited_for(
    answer: str, later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit 1\n")
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if later:
        require_slurm()
        return
    with pytest.raises(ValueError, match="start Shardline on a login node"):
        require_slurm()


@pytest.fixture
def host(tmp_path: Path) -> SlurmHost:
    allocation = Allocation(LaunchConfig(launcher="slurm"), run_dir=tmp_path)
    allocation.folder.mkdir()
    AllocationRecord(job_id="7", machines=("n7",)).write(allocation.folder / "job.json")
    return SlurmHost("node0", 0, allocation)


def ended(host: SlurmHost, tmp_path: Path, *, code: int, says: str, ending: str = "") -> NodeState:
    """How a step counts whose srun printed this and left with that code, and whose node left that record."""
    log, end = tmp_path / "node0.log", tmp_path / "node0.end.json"
    log.write_text("of an earlier attempt: Node failure on n7\n")
    before = log.stat().st_size
    with log.open("ab") as output:
        process = subprocess.Popen(["sh", "-c", f"echo '{says}'; exit {code}"], stdout=output)
    process.wait()
    if ending:
        NodeEnd(ending=ending, exit_code=code, asked="", seconds=1.0).write(end)  # type: ignore[arg-type]
    state = StepNode(host, process, step="1.node0", end_path=end, log=log, log_from=before).state
    assert state is not None
    assert not state.running
    return state


@pytest.mark.parametrize(
    ("code", "says", "ending", "exit_code"),
    [
        pytest.param(0, "", "done", 0, id="done"),
        pytest.param(0, "srun: error: Node failure on n7", "", 255, id="a-lost-node-is-not-done"),
        pytest.param(1, "srun: error: Unable to confirm allocation for job 7", "", 255, id="no-slurmctld"),
        pytest.param(1, "srun: error: Task launch for StepId=7.1 failed on node n7", "", 255, id="no-slurmd"),
        pytest.param(
            1, "ModuleNotFoundError: no torch\nsrun: error: n7: task 0: Exited with exit code 1", "", 1, id="error"
        ),
        pytest.param(137, "srun: error: n7: task 0: Killed", "", 137, id="killed"),
    ],
)
def test_srun_tells_how_a_node_ended(
    host: SlurmHost, tmp_path: Path, code: int, says: str, ending: str, exit_code: int
) -> None:
    assert ended(host, tmp_path, code=code, says=says, ending=ending).exit_code == exit_code


def test_a_step_that_its_memory_limit_ended_ran_out_of_memory(host: SlurmHost, tmp_path: Path) -> None:
    says = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.1. Some of the step tasks have been OOM Killed."
    assert ended(host, tmp_path, code=137, says=says).oom_killed
    assert not ended(host, tmp_path, code=137, says="srun: error: n7: task 0: Killed").oom_killed
