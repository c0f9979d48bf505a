"""The phases of a training step and the time each took; the loop and the strategies mark them: `with phase("forward")`.

Most steps are not recorded; marking a phase then takes 0.14 us, while torch's record_function takes 5 us.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

Activity = Literal["communicates", "computes", "waits"]

_NOTHING = nullcontext()
_mark_phase: Callable[[str], AbstractContextManager[None]] | None = None  # set while a step is recorded


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a phase of a step: `data`, `forward`, `backward`, `optimizer` (clipping too), or a phase of a strategy."""
    return _NOTHING if _mark_phase is None else _mark_phase(name)


def emit_nvtx() -> None:
    """Make every phase an NVTX range, which Nsight Systems shows; about 1 us each."""
    global _mark_phase
    _mark_phase = torch.cuda.nvtx.range


@contextmanager
def recorded(device: torch.device, *, profiled: bool, shapes: bool = False) -> Iterator[Recording]:
    """Time the phases of one step; `profiled`: run torch's profiler too, `shapes`: with the operands' shapes."""
    global _mark_phase
    recording, before = Recording(device, profiled=profiled, shapes=shapes), _mark_phase
    _mark_phase = recording.phase
    try:
        with recording.profiler or nullcontext():
            with recording.phase("step"):
                yield recording
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        _mark_phase = before


class Recording:
    """One step: when its phases began and ended, on the GPU's own clock if there is one; and what was profiled."""

    def __init__(self, device: torch.device, *, profiled: bool, shapes: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise two lines per profile fill the log
        self.device = device
        self.phases: list[tuple[str, Any, Any]] = []
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self.profiler = profile(activities=activities, record_shapes=shapes) if profiled else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with record_function(f"shardline.{name}"):
            began = self._now()
            yield
            self.phases.append((name, began, self._now()))

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times_ms(self) -> dict[str, float]:
        """Return milliseconds by phase, over all micro-batches; the others already include `exposed_communication`."""
        times: dict[str, float] = {}
        for name, began, ended in self.phases:
            ms = began.elapsed_time(ended) if self.device.type == "cuda" else 1000 * (ended - began)
            times[name] = times.get(name, 0.0) + ms
        return times | {"exposed_communication": exposed_ms(self._events(), self.device)}

    def _events(self) -> list[Any]:
        """Return the profiler's raw events; `events()` makes a table of them, which takes ten times as long."""
        if self.profiler is None:
            return []
        assert self.profiler.profiler is not None
        assert self.profiler.profiler.kineto_results is not None
        return self.profiler.profiler.kineto_results.events()

    def export(self, path: Path) -> None:
        assert self.profiler is not None
        self.profiler.export_chrome_trace(str(path))


def exposed_ms(events: Iterable[Any], device: torch.device) -> float:
    """Return the milliseconds in which the profiled step communicated without computing at the same time.

    On a GPU by its kernels. On a CPU gloo's threads communicate while the others compute; a collective inside a
    compiled region shows by what waits for it.
    """
    activities = ((event, _activity(event, device)) for event in events)
    spans = ((event.start_ns(), event.end_ns(), activity) for event, activity in activities if activity is not None)
    return uncovered(spans) / 1e6


def _activity(event: Any, device: torch.device) -> Activity | None:
    name = event.name()
    if device.type == "cuda":
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            return None
        return "communicates" if "nccl" in name.lower() else "computes"
    if name.startswith("gloo:"):
        return "communicates"
    if name.endswith("wait_tensor"):
        return "waits"
    return "computes" if name.startswith(("aten::", "## Call CompiledFxGraph")) else None


def uncovered(spans: Iterable[tuple[int, int, Activity]]) -> int:
    """(start, end, activity) -> time in which something communicates, and nothing computes or the computation waits."""
    changes = [(at, change, activity) for start, end, activity in spans for at, change in ((start, 1), (end, -1))]
    open_spans = {"communicates": 0, "computes": 0, "waits": 0}
    total = since = 0
    for at, change, activity in sorted(changes):
        if open_spans["communicates"] and (open_spans["waits"] or not open_spans["computes"]):
            total += at - since
        since = at
        open_spans[activity] += change
    return total
