"""Strategies side by side on Docker hosts: one device is one rank's share of the first of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.rig.test_flow import REPO, config
from tests.support.configs import read_plan
from tests.support.rig.rig import Rig
from tests.support.rig.runs import assert_nothing_is_left


@pytest.mark.long
def test_hosts_of_a_file_run_each_strategy_in_turn(rig: Rig, shardline_home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs" for n in range(400)))
    base = config(rig, text)
    launch = dict(base["launch"])  # type: ignore[call-overload]
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(launch.pop("hosts")))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base | {"launch": launch | {"launcher": "local"}}))
    command = ["compare", "config.yaml", "--strategies", "ddp,zero2", "--hosts", "hosts.yaml", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stderr
    rows = {row["strategy"]: row for row in json.loads(done.stdout)["rows"]}
    assert {name: row["devices"] for name, row in rows.items()} == {"single": 1, "ddp": 3, "zero2": 3}
    assert all(rows[name]["loss_difference"] < 1e-5 for name in ("ddp", "zero2"))
    plans = {name: read_plan(shardline_home / row["run_id"]) for name, row in rows.items()}
    assert plans["single"].hosts == ("host0",)
    assert plans["single"].threads_per_rank == plans["ddp"].threads_per_rank
    assert_nothing_is_left(rig)
