"""Measures how long training stops for a checkpoint of 49M parameters, with Shardline and with torch.

    python -m benchmarks.checkpoint [--quick]

One process trains a Llama of 10 layers and saves weights and AdamW state, in turn, with Shardline (synchronous,
asynchronous), `torch.save` and `torch.distributed.checkpoint.async_save` (thread, staging buffers kept). Shardline's
checkpoints are fsynced, hashed with SHA-256 and published whole; torch.save returns while the bytes are in the page
cache.

stall: seconds until the next step can begin. slowdown: seconds that the steps during the save took longer than
undisturbed ones, summed. on disk: seconds from the call until the checkpoint can be loaded. first: stall of the first
save, which allocates buffers. Figures are medians over the rounds after the first.

received share: the bytes that a rank receives while a checkpoint is staged, as the kernel counts them on its
connections, divided by the bytes that it keeps and writes; the largest of 4 or 8 ranks, by layout.

The last line is one JSON object: `stall_s`, `slowdown_s`, `on_disk_s` and `first_stall_s` by way of saving,
`received_share` by ranks and layout, `received_share_max`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from training.checkpoint.saver import Saver
from training.config.run import RunConfig
from training.planner.plan import make_plan
from training.records.inventory import Device, Host, Inventory
from training.records.plan import RunPlan
from training.records.text_encoding import NOTHING_SPECIAL
from training.records.token_shards import TokenShards
from training.runtime.process import process_group
from training.shards.format import write_shard
from training.trainer.state import TrainingState, restore

VOCAB = 32_000
STEPS_BEFORE = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "hsdp", "group_ranks": 2},
    "zero3": {"strategy": "zero3"},
    "tp": {"tp": 2},
    "fsdp x tp": {"strategy": "fsdp", "tp": 2},
    "pp": {"pp": 4},
    "tp x pp": {"tp": 2, "pp": 2},
}
WAYS = ("synchronous", "asynchronous", "torch.save", "dcp async_save")


@dataclass(frozen=True)
class Timing:
    step_s: float  # undisturbed
    stall_s: float
    slowdown_s: float
    on_disk_s: float


def make_run(folder: Path) -> RunPlan:
    """Write random tokens; return the plan of one process that trains on them, 128 a step, so that steps are short."""
    shards = folder / "shards"
    rng = np.random.default_rng(0)
    written = []
    for split, length in (("train", 100_000), ("validation", 1_000)):
        tokens = rng.integers(1, VOCAB, length).astype(np.uint16)
        written.append(write_shard(shards, split=split, index=0, tokens=tokens, ends=(), text_bytes=length))
    manifest = TokenShards(
        fingerprint="0" * 64,
        sources=(),
        tokenizer="none",
        tokenizer_sha256="0" * 64,
        vocab_size=VOCAB,
        end_id=0,
        mask_id=None,
        text_encoding=NOTHING_SPECIAL,
        dtype="uint16",
        split_rule="none",
        shards=tuple(written),
        skipped=0,
        skipped_examples=(),
    )
    manifest.write(shards / "manifest.json")
    config = RunConfig.model_validate(
        {
            "data": {"path": "stdlib"},
            "model": {"layers": 10, "width": 512, "heads": 8, "tie_embeddings": True},
            "train": {"context": 64, "global_batch": 2, "micro_batch": 2, "steps": 1_000},
            "parallel": {"strategy": "single"},
            "checkpoint": {"keep_last": 1},
        }
    )
    return make_plan(config, _this_machine(), shards=manifest, shards_dir=str(shards))


def make_run_on_ranks(folder: Path, *, of: RunPlan, ranks: int, parallel: dict[str, Any]) -> None:
    """Plan a Llama of 8 narrow layers on `ranks` ranks on this machine's CPUs, with the same tokens."""
    settings = of.config.model_dump(mode="json") | {"parallel": parallel}
    settings["model"] |= {"layers": 8, "width": 128}
    settings["train"] |= {"context": 16, "global_batch": ranks, "micro_batch": 1}
    host = _this_machine().hosts[0]
    device = Device(kind="cpu", name="cpu", memory_gib=16 / ranks)
    inventory = Inventory(hosts=(host.model_copy(update={"cores": ranks, "devices": (device,) * ranks}),))
    shards = TokenShards.read(Path(of.shards_dir) / "manifest.json")
    plan = make_plan(RunConfig.model_validate(settings), inventory, shards=shards, shards_dir=of.shards_dir)
    assert plan.world_size == ranks
    plan.write(folder / "plan.json")


def measure_traffic(folder: Path, *, of: RunPlan, ranks: int) -> dict[str, float]:
    """Return, by layout, the bytes that a rank receives for a checkpoint divided by those it keeps: the largest."""
    for name, parallel in LAYOUTS.items():
        make_run_on_ranks(folder / name, of=of, ranks=ranks, parallel=parallel)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "benchmarks.support.checkpoint_traffic", str(folder)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"ranks failed:\n{done.stdout}")
    shares = {}
    for name in LAYOUTS:
        rows = [json.loads(path.read_bytes()) for path in (folder / name).glob("traffic-*.json")]
        assert len(rows) == ranks
        shares[name] = max(row["received_bytes"] / row["kept_bytes"] for row in rows)
    return shares


def _this_machine() -> Inventory:
    cores = torch.get_num_threads()
    kind, capability = "cpu", None
    if torch.cuda.is_available():
        kind, capability = "cuda", ".".join(map(str, torch.cuda.get_device_capability()))
    device = Device(kind=kind, name=kind, memory_gib=16, compute_capability=capability)
    return Inventory(hosts=(Host(name="here", cores=cores, memory_gib=16, disk_free_gib=100, devices=(device,)),))


class Bench:
    """The training that checkpoints interrupt. `begin` starts one and returns a function that tells if it is done."""

    def __init__(self, state: TrainingState, folder: Path, *, stack: ExitStack) -> None:
        self.state, self.folder, self.number = state, folder, 0
        self.savers = {}
        for way in ("synchronous", "asynchronous"):
            saver = Saver(
                folder / way,
                plan=state.plan,
                strategy=state.strategy,
                model=state.model,
                rank=state.rank,
                micro_batches=state.micro_batches,
                spikes=state.spikes,
            )
            self.savers[way] = stack.enter_context(saver)
        pinned = state.rank.device.type == "cuda"
        self.stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        stack.callback(self.stager.close)

    def step(self) -> float:
        began = time.perf_counter()
        self.number += 1
        self.state.strategy.step(self.state.loader.share(self.number), learning_rate=1e-4)
        if self.state.rank.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def begin(self, way: str) -> Callable[[], bool]:
        if way in self.savers:
            return self._shardline(self.savers[way], waits=way == "synchronous")
        return self._torch_save() if way == "torch.save" else self._dcp()

    def _shardline(self, saver: Saver, *, waits: bool) -> Callable[[], bool]:
        saver.save(self.number, tokens=0, val_loss=None)
        if waits:
            saver.finish()

        def is_done() -> bool:
            saver.advance()
            return saver.writer is not None and saver.writer.published.is_set()

        return is_done

    def _torch_save(self) -> Callable[[], bool]:
        model, optimizer = self.state.model, self._optimizer()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.folder / "state.pt")
        return lambda: True

    def _dcp(self) -> Callable[[], bool]:
        model, optimizer = get_state_dict(self.state.model, self._optimizer())
        written = dcp.async_save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=self.folder / "dcp", async_stager=self.stager
        )
        assert isinstance(written, Future)  # because staging is not asynchronous
        return written.done

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.state.strategy.optimizer  # type: ignore[attr-defined]
        return optimizer


def measure(bench: Bench, way: str) -> Timing:
    """Time a checkpoint, and the steps made until it is complete, against the steps just before it."""
    step_s = statistics.median(bench.step() for _ in range(STEPS_BEFORE))
    began = time.perf_counter()
    is_done = bench.begin(way)
    stall_s, slowdown_s = time.perf_counter() - began, 0.0
    while not is_done():
        slowdown_s += bench.step() - step_s
    on_disk_s = time.perf_counter() - began
    if way in bench.savers:
        bench.savers[way].finish()  # deletes old checkpoints
    return Timing(step_s, stall_s, slowdown_s, on_disk_s)


def run(folder: Path, *, rounds: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    plan = make_run(folder)
    shares = {number: measure_traffic(folder / f"{number} ranks", of=plan, ranks=number) for number in ranks}
    timings: dict[str, list[Timing]] = {way: [] for way in WAYS}
    with process_group(plan) as rank, ExitStack() as stack:
        state = restore(plan, rank=rank, run_dir=folder / "run")
        bench = Bench(state, folder, stack=stack)
        for _ in range(1 + rounds):
            for way in WAYS:
                timings[way].append(measure(bench, way))
        size = sum(path.stat().st_size for path in (folder / "asynchronous").rglob("*.safetensors"))
    result: dict[str, Any] = {
        key: {way: round(statistics.median(getattr(t, key) for t in of[1:]), 3) for way, of in timings.items()}
        for key in ("stall_s", "slowdown_s", "on_disk_s")
    }
    result["received_share"] = {
        f"{number} ranks": {name: round(share, 3) for name, share in of.items()} for number, of in shares.items()
    }
    result["received_share_max"] = round(max(share for of in shares.values() for share in of.values()), 3)
    result["first_stall_s"] = {way: round(of[0].stall_s, 3) for way, of in timings.items()}
    return result | {
        "parameters": plan.shape.parameters,
        "checkpoint_mb": round(size / 1e6),
        "step_s": round(statistics.median(t.step_s for of in timings.values() for t in of), 3),
        "rounds": rounds,
        "threads": plan.threads_per_rank,
        "device": plan.device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9, traffic of 4 ranks only")
    quick = parser.parse_args().quick
    rounds, ranks = (3, (4,)) if quick else (9, (4, 8))
    folder = Path(tempfile.mkdtemp(prefix="shardline-checkpoint-"))
    try:
        result = run(folder, rounds=rounds, ranks=ranks)
    finally:
        shutil.rmtree(folder)
    print(
        f"{result['parameters'] / 1e6:.0f}M parameters, {result['checkpoint_mb']} MB a checkpoint, "
        f"{1000 * result['step_s']:.0f} ms an undisturbed step, medians of {rounds}"
    )
    print(f"{'seconds':18}{'stall':>10}{'slowdown':>10}{'on disk':>10}{'first':>10}")
    for way in WAYS:
        columns = (result[key][way] for key in ("stall_s", "slowdown_s", "on_disk_s", "first_stall_s"))
        print(f"{way:18}" + "".join(f"{seconds:10.2f}" for seconds in columns))
    print("bytes that a rank receives for a checkpoint, divided by those that it keeps (largest):")
    for number, shares in result["received_share"].items():
        print(f"{number:10}" + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
