"""Compares training on token shards from an object store, also while it is away, with shards on the local disk.

    python -m benchmarks.object_store [--quick]

A Llama of 0.4M parameters trains on one rank, on byte tokens of the standard library (repeated to 192 MB), three times:
from the local disk; from an S3 server of this machine (moto, behind a proxy that adds 50 ms to each answer) with an
empty cache; and the same with a full cache and a server that is away for 30 s in the middle. The batches are the same,
which the losses show. The last line is one JSON object: `step_ms` by way (median of the steps), `wait_s` by way
(seconds that steps waited for blocks), `step_ratio_first` and `step_ratio_away` (median step against the local disk's),
`seconds_lost_away` (the time of all steps while the server was away, beyond as many median steps), and `same_losses`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from tasks.hardware.measure import check_hardware
from tasks.planning.plan import plan_run
from tasks.store.shards import find_shards, upload_shards
from tests.support.manifests import write_manifest
from tests.support.ranks import Ranks
from tests.support.s3_server import BUCKET, S3Server, s3_server
from tests.support.tiny_shards import END
from training.config.run import RunConfig
from training.config.store import StoreConfig
from training.records.inventory import Inventory
from training.records.token_shards import TokenShards
from training.shards.format import write_shard
from training.tracking.rows import read_rows

NUM_TOKENS, QUICK_TOKENS = 96_000_000, 8_000_000
SHARD_TOKENS = 4_000_000
STEPS, QUICK_STEPS = 2500, 60
AWAY_S, QUICK_AWAY_S = 30.0, 4.0
LATENCY_S = 0.05
STORE = StoreConfig(url=f"s3://{BUCKET}/kept")


def make_shards(folder: Path, *, num_tokens: int) -> Path:
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    tokens = np.resize(np.frombuffer(text, np.uint8).astype("uint16"), num_tokens)
    shards = [
        write_shard(folder, split="train", index=index, tokens=part, ends=[len(part)], text_bytes=len(part))
        for index, part in enumerate(np.split(tokens, range(SHARD_TOKENS, num_tokens, SHARD_TOKENS)))
    ]
    shards.append(write_shard(folder, split="validation", index=0, tokens=tokens[:2000], ends=[2000], text_bytes=2000))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    write_manifest(folder, shards, vocab_size=512, end_id=END)
    return folder


def config_of(*, steps: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"layers": 2, "width": 128, "heads": 4},
            "train": {"steps": steps, "context": 128, "global_batch": 8, "log_every_steps": 1},
            "parallel": {"strategy": "single", "precision": "fp32"},
            "checkpoint": {"every_steps": 100_000},
            "evaluation": {"every_steps": 0, "samples_while_training": 0, "prompts": []},
        }
    )


class Run:
    """One training run. `away_s` of `train`: seconds that the server does not answer, after a third of the steps."""

    def __init__(self, shards: Path, folder: Path, inventory: Inventory, *, steps: int) -> None:
        manifest = TokenShards.read(shards / "manifest.json")
        plan = plan_run(
            config_of(steps=steps), inventory=inventory, run_id=folder.name, shards=manifest, shards_dir=shards
        )
        self.path, self.steps = folder / "plan.json", steps
        plan.write(self.path)
        self.lost_s = 0.0

    def train(self, server: S3Server, *, away_s: float) -> None:
        ranks = Ranks(self.path)
        stop = threading.Event()
        if away_s:
            threading.Thread(target=self._be_away, args=(server, away_s, stop), daemon=True).start()
        ranks.finish()
        stop.set()
        found = re.search(r"steps waited ([\d.]+) s", ranks.log())
        self.wait_s = float(found[1]) if found else 0.0
        rows = [row for row in read_rows(self.path.with_name("metrics.jsonl")) if "loss" in row]
        self.losses = [row["loss"] for row in rows]
        times = [row["step_ms"] for row in rows[5:]]
        self.step_ms = statistics.median(times)
        self.lost_s = (sum(times) - len(times) * self.step_ms) / 1000

    def _be_away(self, server: S3Server, away_s: float, stop: threading.Event) -> None:
        metrics = self.path.with_name("metrics.jsonl")
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > self.steps / 3):
            if stop.wait(0.05):
                return
        server.faults.kind, server.faults.count = "away", -1
        began = time.perf_counter()
        stop.wait(away_s)
        server.faults.count = 0
        print(f"the server was away for {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, the server away for 4 s")
    options = parser.parse_args()
    steps, away_s = (QUICK_STEPS, QUICK_AWAY_S) if options.quick else (STEPS, AWAY_S)
    with tempfile.TemporaryDirectory() as name, s3_server() as server:
        home = Path(name)
        os.environ |= server.environment
        num_tokens = QUICK_TOKENS if options.quick else NUM_TOKENS
        local_shards = make_shards(home / "here" / "0123456789abcdef", num_tokens=num_tokens)
        upload_shards(STORE, local_shards)
        server.faults.latency_s = LATENCY_S
        store_shards = home / "there" / local_shards.name
        assert find_shards(STORE, store_shards)
        inventory = check_hardware(home=home, ranks=1)
        local, first, away = (
            Run(shards, home / run, inventory, steps=steps)
            for shards, run in ((local_shards, "local"), (store_shards, "first"), (store_shards, "away"))
        )
        for way, run, absent_s in (("local", local, 0.0), ("first", first, 0.0), ("away", away, away_s)):
            began = time.perf_counter()
            run.train(server, away_s=absent_s)
            print(f"{way}: {steps} steps in a run of {time.perf_counter() - began:.0f} s", flush=True)
    ways = {"local": local, "first": first, "away": away}
    print(f"{'way':8}{'step, median':>14}{'steps waited':>14}{'beyond the median':>20}")
    for way, run in ways.items():
        print(f"{way:8}{run.step_ms:11.1f} ms{run.wait_s:12.2f} s{run.lost_s:18.2f} s")
    found = {
        "step_ms": {way: round(run.step_ms, 2) for way, run in ways.items()},
        "wait_s": {way: run.wait_s for way, run in ways.items()},
        "step_ratio_first": round(first.step_ms / local.step_ms, 3),
        "step_ratio_away": round(away.step_ms / local.step_ms, 3),
        "seconds_lost_away": round(away.lost_s - local.lost_s, 2),
        "same_losses": local.losses == first.losses == away.losses,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
