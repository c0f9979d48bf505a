"""What ranks print, read for why they failed: NCCL's watchdog, progress bars, lines that never end."""

from __future__ import annotations

import os
import time
from pathlib import Path

from training.node.output import LONGEST_LINE, Causes, Output

# As torch 2.7 printed it (ranks 4 and 5 are 0 and 1 of the second group).
TIMED_OUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, "
TIMED_OUT += "NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out."
IN_GROUP = f"""
[rank4]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 0] {TIMED_OUT}
[rank4]:[E1218 20:27:21.484955368 ProcessGroupNCCL.cpp:667] Stack trace of the failed collective not found
[rank4]:[E1218 20:27:21.486305774 ProcessGroupNCCL.cpp:1895] [PG ID 1 PG GUID 1 Rank 0] Process group watchdog thread \
terminated with exception: [Rank 0] {TIMED_OUT}
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7b99599e31b6 in libc10.so)
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 1 PG GUID 1 Rank 0] Process group watchdog thread terminated with exception: [Rank 0] {TIMED_OUT}
"""
WHAT = f"""
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] {TIMED_OUT}
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632
"""
REMOTE = """
[rank9]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 9] Process group watchdog thread terminated with exception: NCCL \
error: remote process exited or there was a network error, NCCL version 2.20.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
"""
HUNG = """
[rank2]:[F1229 20:37:13.091528310 ProcessGroupNCCL.cpp:1306] [PG ID 0 PG GUID 0(default_pg) Rank 2] [PG ID 0 PG GUID \
0(default_pg) Rank 2] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog \
hang.
"""


def report(rank: int, exit_code: int, *, pid: int = 77) -> str:
    return f"""
[1]:
  time      : 2026-11-20_19:00:00
  host      : a
  rank      : {rank} (local_rank: 0)
  exitcode  : {exit_code} (pid: {pid})
  error_file: <N/A>
"""


def causes_of(text: str) -> Causes:
    causes = Causes()
    for line in text.splitlines():
        causes.feed(line)
    return causes


def cause(text: str, *, rank: int, exit_code: int = -6) -> str:
    (failure,) = causes_of(text + report(rank, exit_code)).failures(Path("/nowhere"))
    return failure.cause


def test_an_abort_by_nccls_watchdog_is_the_cause_of_its_rank() -> None:
    assert cause(IN_GROUP, rank=4) == TIMED_OUT
    assert cause(IN_GROUP, rank=0, exit_code=1) == "exit code 1", "0 is rank 4's number in its group only"
    assert cause(WHAT, rank=1).endswith(TIMED_OUT)
    assert cause(REMOTE, rank=9).startswith("NCCL error: remote process exited")
    assert "watchdog hang" in cause(HUNG, rank=2)
    assert cause("terminate called\n  what():  std::bad_alloc", rank=3) == "std::bad_alloc"


NCCL_ERROR = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled cuda error"


def test_what_is_behind_an_nccl_error_belongs_to_its_cause() -> None:
    """NCCL prints it some lines below (NVIDIA/nccl#1410); the watchdog names the rank in its first line only."""
    raised = f"[rank7]: Traceback (most recent call last):\n[rank7]:   File ...\n[rank7]: {NCCL_ERROR}\n"
    raised += "[rank7]: ncclUnhandledCudaError: Call to CUDA function failed.\n[rank7]: Last error:\n"
    raised += "[rank7]: Cuda failure 2 'out of memory'\n"
    assert cause(raised, rank=7) == f"{NCCL_ERROR}: Cuda failure 2 'out of memory'"
    aborted = "[rank3]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 3] Process group watchdog thread terminated with "
    aborted += "exception: NCCL error: unhandled cuda error, NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA "
    aborted += "function failed.\nLast error:\nCuda failure 719 'unspecified launch failure'\nException raised from"
    assert cause(aborted, rank=3).endswith("NCCL version 2.20.5: Cuda failure 719 'unspecified launch failure'")


def test_a_python_exception_says_more_than_the_abort_that_follows_it() -> None:
    raised = "\n[rank4]: Traceback (most recent call last):\n[rank4]:   File ...\n[rank4]: OSError: No space left\n"
    assert cause(IN_GROUP + raised, rank=4) == "OSError: No space left"
    assert cause(raised + IN_GROUP, rank=4) == "OSError: No space left"


def test_what_was_ended_because_a_sibling_failed_is_no_failure() -> None:
    warning = "W1120 19:00:00 torch/elastic/multiprocessing/api.py:1029] Sending process {} closing signal SIGTERM\n"
    text = warning.format(8) + warning.format(9)
    text += report(0, 1, pid=7) + report(1, -9, pid=8) + report(2, -15, pid=9)
    assert [failure.rank for failure in causes_of(text).failures(Path("/nowhere"))] == [0]
    alone = causes_of(report(1, -9, pid=8)).failures(Path("/nowhere"))
    assert [failure.exit_code for failure in alone] == [-9], "somebody else killed it"


def printed(*chunks: bytes) -> Causes:
    """As a node's program that prints these, each in a write of its own."""
    source, into = os.pipe()
    sink = os.open(os.devnull, os.O_WRONLY)
    output = Output(sink=sink)
    output.start(source)
    for chunk in chunks:
        os.write(into, chunk)
    os.close(into)
    output.drain()
    output.close()
    for descriptor in (source, sink):
        os.close(descriptor)
    return output.causes


def test_a_progress_bar_is_one_line_of_the_last_ones() -> None:
    bar = [b"\r%3d%%|" % percent for percent in range(101)]
    lines = printed(b"before\n", *bar, b"\nafter\r", b"\n", b"end").last_lines
    assert list(lines) == ["before", "100%|", "after", "end"]


def test_an_exception_after_a_progress_bar_is_found() -> None:
    text = b"\r 50%|\r 51%|\r\n[rank0]: Traceback (most recent call last):\r\n"
    assert printed(text, b"[rank0]:   File\r\n[rank0]: KeyError: 7\r\n").exceptions == {0: "KeyError: 7"}


def test_what_never_ends_its_line_costs_neither_memory_nor_time() -> None:
    began = time.monotonic()
    causes = printed(*[b"x" * 1000] * 20_000, b"\nend\n")
    assert time.monotonic() - began < 10
    assert causes.last_lines[-1] == "end"
    assert all(len(line) <= 2 * LONGEST_LINE for line in causes.last_lines)


def test_causes_and_last_lines_are_without_the_colours_of_a_log() -> None:
    """loguru, rich and torch.onnx colour what they print, also into a pipe when FORCE_COLOR is set."""
    colour, link, end = "\x1b[1;31m", "\x1b]8;;file:///x.py\x1b\\", "\x1b[0m"
    raised = (
        f"{colour}Traceback (most recent call last):{end}\n  File {link}x.py\n{colour}ValueError{end}: no {colour}x"
    )
    causes = causes_of(raised)
    assert causes.exceptions == {None: "ValueError: no x"}
    assert [*causes.last_lines] == ["Traceback (most recent call last):", "  File x.py", "ValueError: no x"]
