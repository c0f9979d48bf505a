"""Why a run ended, from what its hosts tell: what began it counts, not what came of it."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.launch.failure import RETRIED, HostStatus, NodeState, cause_of, classify, cure_of
from training.records.node import NodeEnd, RankFailure

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1974"


def state(exit_code: int, *, running: bool = False, oom_killed: bool = False) -> NodeState:
    return NodeState(running=running, exit_code=exit_code, oom_killed=oom_killed)


def failed(cause: str, *, exit_code: int = 1, **more: Any) -> HostStatus:
    end = NodeEnd(
        ending="failed",
        exit_code=1,
        asked="",
        seconds=1.0,
        failures=(RankFailure(rank=0, exit_code=exit_code, cause=cause),),
    )
    return HostStatus(state=state(1), end=end, **more)


def ended(ending: Any, *, asked: Any = "", exit_code: int = 0) -> HostStatus:
    return HostStatus(
        state=state(exit_code), end=NodeEnd(ending=ending, exit_code=exit_code, asked=asked, seconds=1.0), lost=False
    )


DONE, NETWORK, KILLED = ended("done"), failed(PEER), HostStatus(state=state(137), end=None)


@pytest.mark.parametrize(
    ("first", "second", "cause", "host"),
    [
        (DONE, DONE, "done", ""),
        (DONE, HostStatus(state=state(0), end=None), "done", ""),  # a file server shows its record later
        (HostStatus(state=None, end=ended("done").end), DONE, "done", ""),  # its daemon is away
        (NETWORK, KILLED, "killed", "b"),
        (NETWORK, failed("ended by signal 9", exit_code=-9), "killed", "b"),
        (NETWORK, HostStatus(state=state(0, running=True), end=None, gone=True), "killed", "b"),
        (NETWORK, HostStatus(state=state(0, running=True), end=None, lost=True), "lost host", "b"),
        (NETWORK, ended("stopped", asked="lease stale", exit_code=130), "lost host", "b"),
        (NETWORK, ended("stopped", asked="signal", exit_code=130), "killed", "b"),  # nobody of ours told it
        (NETWORK, HostStatus(state=state(143), end=None), "killed", "b"),  # before it had started
        (NETWORK, HostStatus(state=state(255), end=None), "lost host", "b"),  # its power was cut
        (DONE, HostStatus(state=state(0, running=True), end=ended("stopped", asked="signal").end), "daemon", "b"),
        (DONE, ended("stopped", asked="signal", exit_code=130), "killed", "b"),
        (
            NETWORK,
            HostStatus(state=state(0, running=True, oom_killed=True), end=None, ended_by_us=True),
            "out of memory",
            "b",
        ),
        (NETWORK, HostStatus(state=state(1, oom_killed=True), end=None), "out of memory", "b"),
        (KILLED, failed("torch.OutOfMemoryError: CUDA out of memory"), "out of memory", "b"),
        (NETWORK, failed("NonFiniteLoss: step 7 (loss nan)"), "bad loss", "b"),
        (NETWORK, failed("ValueError: torchrun started 2 ranks"), "bad config", "b"),
        (NETWORK, failed("RuntimeError: checkpoint of step 10: No space left on device"), "error", "b"),
        (NETWORK, failed("RuntimeError: Timed out waiting 30000ms for recv operation"), "timeout", "b"),
        (NETWORK, HostStatus(state=state(0, running=True), end=None, ended_by_us=True), "network", "a"),
        (
            NETWORK,
            HostStatus(
                state=state(1), end=None, last_lines=("rank 0 failed: OSError: No space left", "x.ChildFailedError")
            ),
            "error",
            "b",
        ),
        (NETWORK, HostStatus(state=state(3), end=None), "network", "a"),
    ],
)
def test_what_began_it_is_the_cause(first: HostStatus, second: HostStatus, cause: str, host: str) -> None:
    outcome = classify({"a": first, "b": second})
    assert (outcome.cause, outcome.host) == (cause, host)


def test_what_a_user_asked_to_stop_is_stopped() -> None:
    stopped = ended("stopped", asked="signal", exit_code=130)
    for other in (DONE, NETWORK, KILLED, stopped):
        assert classify({"a": other, "b": stopped}, stop_requested=True).cause == "stopped"


STORE = (
    "RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store "
)
STORE += "by store->get('0:0'), but store->get('0:0') got error: "
WATCHDOG = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST) ran for 600081 milliseconds"
)
HUNG = "Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang."


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (f"{WATCHDOG} before timing out.", "timeout"),
        (f"[PG ID 0 PG GUID 0(default_pg) Rank 0] {WATCHDOG} before timing out.", "timeout"),
        (HUNG, "timeout"),
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.21.5", "network"),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.", "network"),
        (STORE + "Connection was likely closed. Did the remote server shutdown or crash?", "network"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "network"),
        ("RuntimeError: failed to recv, got 0 bytes", "network"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "network"),
        ("OSError: [Errno 101] Network is unreachable", "network"),
        ("RuntimeError: Socket closed", "network"),
        ("OSError: [Errno 98] Address already in use (while attempting to bind on address ('', 29401))", "network"),
        ("OSError: [Errno 116] Stale file handle: '/home/runs/a/checkpoints/10'", "network"),
        ("std::bad_alloc", "out of memory"),
        # The texts of CUDA's errors are cudaGetErrorString's (CUDA runtime API, cudaError).
        ("CUDA error: an illegal memory access was encountered", "error"),
        ("RuntimeError: CUDA error: device-side assert triggered", "error"),
        # pytorch/pytorch, c10/cuda/CUDAException.cpp: what the driver refuses outside of torch's own allocator
        (
            "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be reported later",
            "out of memory",
        ),
        ("RuntimeError: CUDA driver error: out of memory", "out of memory"),
        # QwenLM/Qwen3#873: cuBLAS has no room for its handle
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "out of memory",
        ),
        # cuDNN backend API, cudnnStatus_t: the name of ALLOC_FAILED since version 9
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "out of memory"),
        # triton-lang/triton, third_party/nvidia/backend/driver.c: loading a compiled kernel
        ("RuntimeError: Triton Error [CUDA]: out of memory", "out of memory"),
        # NVIDIA/nccl#1410 and pytorch/pytorch#170045 show the form; 2 is cudaErrorMemoryAllocation
        (
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, "
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            "out of memory",
        ),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "out of memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out of memory"),
        # pytorch/ci-infra#490, hiyouga/EasyR1#228: /dev/shm is too small
        (
            "misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE (size "
            "9637888), error: No space left on device (28)",
            "bad config",
        ),
        (
            "NCCL error in: NCCLUtils.hpp:77, unhandled system error: Error while creating shared memory segment "
            "/dev/shm/nccl-UmqSM9 (size 7340384)",
            "bad config",
        ),
        # pytorch/pytorch, aten/src/ATen/MapAllocator.cpp and torch/utils/data/_utils/signal_handling.py
        ("RuntimeError: unable to write to file </torch_88_1_0>: No space left on device (28)", "bad config"),
        (
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_88_1_0>: No space left on device",
            "bad config",
        ),
        # huggingface/accelerate#1192, vllm-project/vllm#5222: a broken GPU
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu fault"),
        # kohya-ss/sd-scripts#1434: the same, from NCCL's watchdog
        (
            "[Rank 1] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
            "gpu fault",
        ),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", "gpu fault"),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:2092, unhandled cuda error, NCCL version 2.21.5: Cuda failure 719 "
            "'unspecified launch failure'",
            "gpu fault",
        ),
        # deepspeed/runtime/fp16/loss_scaler.py: fp16 whose scale is 1 already
        ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "bad loss"),
        # deepspeed/runtime/zero/partitioned_param_coordinator.py
        ("RuntimeError: attempted to add non-inflight parameter to registry {'id': 3}", "error"),
        # torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
        (
            "RuntimeError: FSDP parameters should be materialized from meta device before training, but the following "
            "were still on meta device: ['weight']",
            "error",
        ),
        ("AssertionError: FSDP expects uniform original parameter dtype but got {torch.float32}", "error"),
        # NVIDIA's GPU debug guidelines: the driver's line in the kernel log, here of a GPU that fell off the bus
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.", "gpu fault"),
    ],
)
def test_the_cause_of_a_rank_that_failed_and_whether_another_attempt_follows(error: str, cause: str) -> None:
    assert classify({"a": failed(error, exit_code=-6), "b": DONE}).cause == cause
    assert (cause in RETRIED) == (cause in {"timeout", "network", "gpu fault"})
    full_disk = (f"2026-11-20 19:00:00 node: rank 0 failed: {error}", "2026-11-20 19:00:01 node: bye")
    assert classify({"a": HostStatus(state=state(1), end=None, last_lines=full_disk)}).cause == cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("training.runtime.errors.NonFiniteLoss: step 12: loss nan on rank 3", "bad loss"),
        ("ValueError: the model's lm_head.weight is [256, 32]", "bad config"),
        ("  traceback : Signal 9 (SIGKILL) received by PID 4711", "killed"),
        ("  traceback : Signal 11 (SIGSEGV) received by PID 4711", "error"),
        ("exit code 3", "error"),
    ],
)
def test_a_rank_of_this_machine_is_told_by_its_last_words(error: str, cause: str) -> None:
    assert cause_of(error) == cause


def test_ranks_that_torchrun_ended_for_another_tell_nothing() -> None:
    failures = (
        RankFailure(rank=0, exit_code=-15, cause="ended by signal 15"),
        RankFailure(rank=1, exit_code=1, cause=PEER),
    )
    end = NodeEnd(ending="failed", exit_code=1, asked="", seconds=1.0, failures=failures)
    assert classify({"a": HostStatus(state=state(1), end=end), "b": NETWORK}).cause == "network"


def test_a_full_dev_shm_names_the_setting_to_raise() -> None:
    error = "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)"
    assert "launch.shm_gib" in str(cure_of(cause_of(error), error))
    assert cure_of("bad config", "ValueError: the model's lm_head.weight is [256, 32]") is None
