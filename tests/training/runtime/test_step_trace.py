"""Parts of a step cost nothing until a step is recorded; what is recorded adds up."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from training.runtime.step_trace import Activity, phase, recorded, uncovered

CPU = torch.device("cpu")


def test_phases_are_summed_over_micro_batches_and_written_to_a_trace(tmp_path: Path) -> None:
    with recorded(CPU, profiled=True) as recording:
        for _ in range(2):
            with phase("forward"):
                time.sleep(0.02)
            with phase("backward"):
                torch.ones(8) @ torch.ones(8)
    split = recording.times_ms()
    assert split.keys() == {"step", "forward", "backward", "exposed_communication"}
    assert 40 <= split["forward"] <= split["step"]
    assert split["exposed_communication"] == 0
    recording.export(tmp_path / "trace.json.gz")
    names = [
        event.get("name")
        for event in json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    ]
    assert names.count("shardline.forward") == 2
    assert "aten::dot" in names or "aten::matmul" in names


def test_outside_a_recorded_step_a_phase_does_nothing() -> None:
    with recorded(CPU, profiled=False) as recording:
        pass
    began = time.perf_counter()
    for _ in range(20_000):
        with phase("forward"):
            pass
    assert (time.perf_counter() - began) / 20_000 < 5e-6, "measured: 0.14 us"
    assert recording.times_ms().keys() == {"step", "exposed_communication"}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 10, "communicates")], 10),
        ([(0, 10, "communicates"), (2, 6, "computes")], 6),
        ([(0, 10, "communicates"), (5, 15, "communicates"), (12, 20, "computes")], 12),
        ([(0, 10, "computes"), (2, 6, "communicates")], 0),
        ([(0, 10, "computes"), (2, 6, "communicates"), (4, 6, "waits")], 2),
        ([(0, 5, "computes"), (5, 9, "computes"), (0, 9, "communicates")], 0),
        ([], 0),
    ],
)
def test_only_communication_that_nothing_computes_beside_is_exposed(
    spans: list[tuple[int, int, Activity]], expected: int
) -> None:
    assert uncovered(spans) == expected
