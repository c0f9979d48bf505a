"""Rows of other programs' runs are priced as a plan would price ours, and the judge counts what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_vs_published import judge_files
from benchmarks.support.rows_as_planned import judged, judged_memory, read_rows

ROW: dict[str, Any] = {
    "source": "someone",
    "program": "megatron",
    "model": {
        "layers": 40,
        "width": 5120,
        "heads": 40,
        "kv_heads": 40,
        "mlp_width": 13824,
        "vocab_size": 32000,
        "gated_mlp": True,
        "tied": False,
    },
    "gpu": "A100-80GB-SXM",
    "gpus": 64,
    "gpus_per_host": 8,
    "network_per_host": "8x200Gb",
    "precision": "bf16",
    "context": 2048,
    "global_batch": 512,
    "micro_batch": 1,
    "strategy": "zero1",
    "tp": 2,
    "pp": 2,
    "cp": 1,
    "stages_per_rank": 1,
    "recompute": "none",
}


def read(tmp_path: Path, *changes: dict[str, Any]) -> Any:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**ROW, **change} for change in changes]))
    return read_rows(path)


def test_a_row_says_the_same_in_every_unit(tmp_path: Path) -> None:
    tokens = 512 * 2048
    in_units = {
        "seconds a step": 10.0,
        "tokens/s": tokens / 10,
        "tokens/s a GPU": tokens / 640,
        "sequences/s": 51.2,
    }
    rows = read(tmp_path, *({"measured": value, "unit": unit} for unit, value in in_units.items()))
    assert [row.step_s for row in rows] == [pytest.approx(10.0)] * 4


def test_errors_and_regret_are_those_of_what_was_measured(tmp_path: Path) -> None:
    """Two layouts, each 10% slower than predicted but for the chosen one, which is half as fast as predicted."""
    first, second = read(tmp_path, *({"tp": tp, "measured": 1.0, "unit": "seconds a step"} for tp in (2, 4)))
    times = {row.layout.tp: row.priced.step_s for row in (first, second)}
    chosen = min(times, key=lambda tp: times[tp])
    measured = {tp: 1.1 * seconds * (2 if tp == chosen else 1) for tp, seconds in times.items()}
    rows = read(tmp_path, *({"tp": tp, "measured": s, "unit": "seconds a step"} for tp, s in measured.items()))
    found = judged(rows)
    other = min(measured.values())
    assert found["worst_error"] == pytest.approx(1.2)
    assert found["max_regret_excess"] == pytest.approx(measured[chosen] / other - 1)


def test_memory_is_judged_by_what_ran(tmp_path: Path) -> None:
    rows = read(tmp_path, {"outcome": "ran"}, {"outcome": "out of memory", "micro_batch": 128, "global_batch": 4096})
    assert judged_memory(rows) == {
        "num_rows": 2,
        "judged_rightly": 1.0,
        "taken": 1,
        "ran_out_of_those_taken": 0.0,
    }


def test_rows_without_a_measured_value_are_counted_and_not_judged(tmp_path: Path) -> None:
    ran = {"measured": 10.0, "unit": "seconds a step"}
    read(tmp_path, ran, {"outcome": "ran", "tp": 4}, {"outcome": "out of memory", "tp": 8})
    found = judge_files(tmp_path / "rows.json", None)
    assert (found["num_rows"], found["num_unmeasured"], found["num_sweeps"]) == (1, 2, 0)


def test_a_row_that_cannot_be_priced_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 1 cannot be priced: .*furlongs"):
        read(tmp_path, {"measured": 1, "unit": "tokens/s"}, {"measured": 1, "unit": "furlongs"})
