"""All of Shardline inside of a job: it uses the job's nodes, and a requeued job goes on with the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.launch.recovery import attempts_of
from tasks.launch.slurm_allocation import note_run, run_before_requeue
from tests.support.configs import tiny_config
from tests.support.launched_runs import causes, curve, mlflow_status
from tests.support.repository import REPO
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import until

Make = Callable[..., tuple[Path, dict[int, float]]]
# As docs/slurm.md has it, with the stage of training in place of the whole flow.
SCRIPT = """\
#!/bin/bash
trap 'kill -TERM $flow; wait $flow; scontrol requeue $SLURM_JOB_ID' TERM
cd {repo}
{python} -m tests.programs.train_run {run} >> {log} 2>&1 &
flow=$!
wait $flow
"""


@pytest.mark.long
def test_a_job_that_is_told_to_stop_requeues_itself_and_goes_on(
    cluster: SlurmCluster, make: Make, tmp_path: Path
) -> None:
    run_dir, expected = make("inside")
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    script.write_text(SCRIPT.format(repo=REPO, python=sys.executable, run=run_dir.name, log=log))
    options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--signal=B:TERM@60", "--output=/dev/null"]
    job = cluster.ask("sbatch", "--parsable", *options, str(script)).strip()
    until(lambda: (run_dir / "metrics.jsonl").exists() and 6 in curve(run_dir), f"step 6: {log}", every_s=0.1)
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    until(lambda: causes(run_dir) == ["stopped"], "the first attempt's end", every_s=0.2)

    def has_ended() -> bool:
        return "JobState=COMPLETED" in cluster.ask("scontrol", "show", "job", job)

    until(has_ended, "the requeued job's end", within_s=240, every_s=0.5)
    assert causes(run_dir) == ["stopped", "done"], log.read_text()
    assert attempts_of(run_dir)[1]["from_step"] >= 6, "the checkpoint that the ranks left"
    assert curve(run_dir) == expected
    assert mlflow_status(run_dir) == "FINISHED"
    assert cluster.all_jobs() == [job], "no allocation but its own"


def test_the_run_of_a_requeued_job_is_found_by_its_config(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, other = tiny_config(), tiny_config(train__steps=9)
    note_run("tiny-1", config)
    assert not (home / "slurm-jobs").exists(), "outside of Slurm nothing is noted"
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    note_run("tiny-1", config)
    assert run_before_requeue(config) == "", "it was not requeued: a second run in one job is another run"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_before_requeue(config) == "tiny-1"
    assert run_before_requeue(other) == ""
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    assert run_before_requeue(config) == ""
