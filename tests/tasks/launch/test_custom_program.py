"""Programs of the user's: what is refused before anything starts, where they run, and what they are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.launch.programs import is_done, run_custom_program
from tasks.launch.recovery import attempts_of
from tasks.planning.custom_program import (
    check_custom_program,
    plan_custom_program,
    ranks_by_host,
    replan_custom_program,
)
from tasks.runs.errors import RunFailed
from tests.support.configs import inventory
from tests.support.waiting import until
from training.config.run import RunConfig
from training.records.plan import TRAINER_PLAN, CustomProgramPlan

DOCKER = {"launcher": "docker", "image": "sha256:" + "0" * 64}
FAR = [
    {"name": "gpu1", "docker": "ssh://me@gpu1", "address": "10.0.0.1", "interface": "eth0"},
    {"name": "gpu2", "docker": "ssh://me@gpu2", "address": "10.0.0.2", "interface": "eth0"},
]
TELLS = """
import json, os, sys
keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI",
        "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "OMP_NUM_THREADS")
with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}.json", "w") as file:
    json.dump({key: os.environ[key] for key in keys}, file)
"""
WAITS = """
import signal, sys, time
def leave(number, frame):
    open(sys.argv[1] + "/stopped", "a").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[1] + "/ready", "a").close()
time.sleep(600)
"""
LAUNCHER = """
import sys
from pathlib import Path
from training.records.plan import TRAINER_PLAN, CustomProgramPlan
from tasks.launch.programs import run_custom_program
run_custom_program(CustomProgramPlan.read(Path(sys.argv[1]) / TRAINER_PLAN), run_dir=Path(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def shardline_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://10.0.0.9:5000")
    return tmp_path


def config(trainer: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "others", "trainer": trainer, **sections})


def plan_for(home: Path, text: str, *, ranks: int = 1, **launch: Any) -> CustomProgramPlan:
    script = home / "program.py"
    script.write_text(text)
    (home / "run").mkdir()
    wanted = config({"script": str(script), "args": ["{run_dir}"]}, launch=launch)
    return plan_custom_program(wanted, inventory(ranks), run_id="run", mlflow_run_id="abc", experiment=("7", "others"))


@pytest.mark.parametrize(
    ("trainer", "launch", "uri", "words"),
    [
        ({"script": "absent.py"}, {}, "", "trainer.script = absent.py does not exist"),
        ({"script": "train.py"}, DOCKER, "http://10.0.0.9:5000", "trainer.script = train.py is relative"),
        ({"script": "{home}/absent.py"}, DOCKER, "http://10.0.0.9:5000", "absent.py does not exist"),
        ({"module": "m"}, DOCKER, "", "is a file of this machine"),
        ({"module": "m"}, {**DOCKER, "hosts": FAR}, "http://localhost:5000", "is another machine on gpu1, gpu2"),
    ],
)
def test_what_cannot_start_or_log_is_refused(
    shardline_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: dict[str, str],
    launch: dict[str, Any],
    uri: str,
    words: str,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    named = {key: value.replace("{home}", str(shardline_home)) for key, value in trainer.items()}
    with pytest.raises(ValueError, match=words):
        check_custom_program(config(named, launch=launch))


def test_what_only_the_hosts_can_know_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    check_custom_program(config({"script": "/opt/megatron/pretrain_gpt.py"}, launch={**DOCKER, "hosts": FAR}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_custom_program(config({"module": "m"}, launch=DOCKER))  # this machine's own daemon, on this machine's network


@pytest.mark.parametrize(
    ("parallel", "layout"),
    [
        ({}, {"host0": 2, "host1": 1}),
        ({"ranks": 2}, {"host0": 2}),
        ({"ranks": 3}, {"host0": 2, "host1": 1}),
        ({"strategy": "single"}, {"host0": 1}),
    ],
)
def test_each_device_has_a_rank_unless_fewer_are_wanted(parallel: dict[str, Any], layout: dict[str, int]) -> None:
    assert ranks_by_host(config({"module": "m"}, parallel=parallel), inventory(2, 1)) == layout


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.ranks = 4, but there are 3 devices on 2 hosts"):
        ranks_by_host(config({"module": "m"}, parallel={"ranks": 4}), inventory(2, 1))


def test_it_goes_on_with_the_hosts_that_are_left(shardline_home: Path) -> None:
    wanted = config({"module": "m"}, parallel={"ranks": 3})
    plan = plan_custom_program(wanted, inventory(2, 1), run_id="run", mlflow_run_id="abc", experiment=("7", "others"))
    fewer = replan_custom_program(plan, inventory(2))
    assert (fewer.hosts, fewer.ranks_per_host) == (("host0",), (2,))
    again = replan_custom_program(fewer, inventory(2, 1))
    assert again == plan == CustomProgramPlan.read(shardline_home / "run" / TRAINER_PLAN)


@pytest.mark.slow
def test_ranks_have_torchruns_environment_and_the_run_in_mlflow(shardline_home: Path) -> None:
    plan, run_dir = plan_for(shardline_home, TELLS, ranks=2), shardline_home / "run"
    assert plan.command("", run_dir=run_dir)["args"] == (str(run_dir),)
    run_custom_program(plan, run_dir=run_dir)
    environments = [json.loads((run_dir / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(each["RANK"], each["WORLD_SIZE"]) for each in environments] == [("0", "2"), ("1", "2")]
    assert environments[0]["MLFLOW_RUN_ID"] == "abc"
    assert environments[0]["MLFLOW_TRACKING_URI"] == "http://10.0.0.9:5000"
    assert (environments[0]["MLFLOW_EXPERIMENT_ID"], environments[0]["MLFLOW_EXPERIMENT_NAME"]) == ("7", "others")
    (run_dir / "rank-0.json").unlink()
    run_custom_program(plan, run_dir=run_dir)
    assert not (run_dir / "rank-0.json").exists(), "it had come to its end, and is not started again"


def test_a_failure_is_told_with_its_cause(shardline_home: Path) -> None:
    plan, run_dir = plan_for(shardline_home, "raise KeyError('verses')\n"), shardline_home / "run"
    with pytest.raises(RunFailed, match="KeyError: 'verses'") as failure:
        run_custom_program(plan, run_dir=run_dir)
    assert "`shardline resume run` starts it again" in str(failure.value)
    assert [attempt["ending"]["cause"] for attempt in attempts_of(run_dir)] == ["error"]
    assert not is_done(run_dir)


@pytest.mark.slow
def test_no_file_of_the_run_holds_a_password(shardline_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cr3t%21@10.0.0.9:5000")
    monkeypatch.setenv("HF_TOKEN", "hf_verses")
    text = "import os\nprint(os.environ['HF_TOKEN'], flush=True)\nraise KeyError(os.environ['MLFLOW_TRACKING_URI'])\n"
    plan, run_dir = plan_for(shardline_home, text), shardline_home / "run"
    with pytest.raises(RunFailed, match=r"KeyError: 'http://\*\*\*@10\.0\.0\.9:5000'"):
        run_custom_program(plan, run_dir=run_dir)
    written = "".join(path.read_text() for path in run_dir.rglob("*.json"))
    assert "s3cr3t" not in written
    assert "hf_verses" not in written


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_rank_outlives_its_launcher(shardline_home: Path, number: signal.Signals) -> None:
    plan_for(shardline_home, WAITS, lease_s=5.0)
    run_dir = shardline_home / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run_dir)], env=dict(os.environ), stderr=subprocess.PIPE, text=True
    )
    until((run_dir / "ready").exists, "the rank is ready")
    process.send_signal(number)
    until((run_dir / "stopped").exists, "the rank was stopped")
    assert process.wait() != 0
    until((run_dir / "attempts" / "1" / "host0.end.json").exists, "the node's end")
