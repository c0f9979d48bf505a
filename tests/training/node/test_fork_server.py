"""What the server of forks imports before it forks: all that ranks need, and nothing that must not meet a fork."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.ranks import rank_env
from tests.support.tiny_shards import MakeRun
from training.node.fork_server import _listener

REPORT = """
import json, os, sys
from pathlib import Path
import torch
asked_gpus = []
for name in ("is_available", "device_count", "init", "_lazy_init"):
    def ask(*args, name=name, real=getattr(torch.cuda, name)):
        asked_gpus.append(name)
        return real(*args)
    setattr(torch.cuda, name, ask)
from training import train
train.import_for(sys.argv[1])
report = {"asked_gpus": list(asked_gpus), "threads": len(os.listdir("/proc/self/task"))}
imported = set(sys.modules)
report["sends_metrics"] = "mlflow" in imported
train.main(Path(sys.argv[1]))
report["later"] = sorted(set(sys.modules) - imported)
print(json.dumps(report))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_ranks_import_next_to_nothing_themselves(make_run: MakeRun, strategy: str) -> None:
    path = make_run(f"imports-{strategy}", ranks=1, parallel__strategy=strategy, train__steps=1)
    command, env = [sys.executable, "-c", REPORT, str(path)], rank_env() | {"MLFLOW_RUN_ID": "that of a plan"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["threads"] == 1, "a fork meets no thread"
    assert report["asked_gpus"] == [], "nor an open GPU"
    assert report["sends_metrics"]
    assert len(report["later"]) < 10, report["later"]


@pytest.mark.parametrize(("master", "here_alone"), [("127.0.0.1", True), ("198.18.0.1", False)])
def test_ranks_of_one_machine_meet_where_no_other_machine_reaches_them(master: str, here_alone: bool) -> None:
    with _listener({"MASTER_ADDR": master, "MASTER_PORT": "0"}) as listener:
        assert (listener.getsockname()[0] == "127.0.0.1") == here_alone
