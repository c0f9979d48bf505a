"""Measures how much a model that trains on new text every night forgets, with and without replay of old text.

    python -m benchmarks.nights [--quick] [--nights N] [--replay SHARE] [--data FOLDER]

There are three unlike texts: Shakespeare, Tang poems in Chinese, Python's standard library. A first model is trained on
a part of each; then each night has a slice of one of them, in rotation. A night continues from the weights and AdamW
moments of the night before, with a tenth of the first model's learning rate, with warm-up and cooldown (wsd), once
through its own slice; with replay, 1 - SHARE of its tokens are new and SHARE are of all earlier slices. After each
night the loss on the held-out text of every slice is measured.
--data: the folder with tinyshakespeare.txt and tang_poems.jsonl.
The last line is one JSON object: `loss` (by way, then by slice: after each night), `worst_old_slice_with_replay` and
`worst_old_slice_without` (the largest, over all nights and all older slices, of the loss divided by the slice's best
loss after an earlier night, minus 1), `final_old_with_replay` and `final_old_without` (the same after the last night,
the worst slice).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.data.corpus import prepare_corpus
from tasks.data.night import Slice, with_slices
from tasks.data.sources import SkippedDocuments, find_sources
from tasks.hardware.measure import check_hardware
from tasks.planning.plan import plan_run
from tests.support.ranks import run_ranks
from tests.support.repository import REPO
from training.config.data import DataConfig
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.results import EvalReport
from training.records.train_result import TrainResult

DATA = Path(os.environ.get("SHARDLINE_TEST_DATA", REPO.parent / "shared" / "data"))
SLICE_BYTES, QUICK_SLICE_BYTES = 100_000, 40_000
LEARNING_RATE = 1e-3  # of the first model
NIGHTLY_LEARNING_RATE = 1e-4
FIRST = "first"  # a part of each text, for three epochs
Losses = dict[str, list[float]]  # by slice: the loss after each night, from the slice's own night on


def slices_of_text(data: Path, *, num_bytes: int, count: int) -> list[tuple[str, str]]:
    """Return (name, text) of the first model and of each night."""
    library = find_sources(DataConfig(path="stdlib"), SkippedDocuments("skip"))
    python = "".join(source.path.read_text(encoding="utf-8") for source in library[:: max(1, len(library) // 200)])
    poems = (data / "tang_poems.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = {
        "shakespeare": (data / "tinyshakespeare.txt").read_text(encoding="utf-8"),
        "poems": "\n\n".join(json.loads(line)["text"] for line in poems),
        "python": python,
    }
    raw = {name: text.encode() for name, text in kinds.items()}
    needed = num_bytes * (1 + -(-count // len(raw)))
    for name, text in raw.items():
        assert len(text) >= needed, f"{name} has {len(text):,} bytes, {count} nights need {needed:,}"

    def part(name: str, number: int) -> str:
        return raw[name][number * num_bytes : (number + 1) * num_bytes].decode(errors="ignore")

    names = list(raw)
    nights = [(f"{night}-{names[night % 3]}", part(names[night % 3], 1 + night // 3)) for night in range(count)]
    return [(FIRST, "\n\n".join(part(name, 0) for name in names)), *nights]


def config_of(corpus: Path, *, quick: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "nights",
            "data": {
                "path": str(corpus),
                "text_unit": "paragraph",
                "split": "documents",
                "tokenizer": {"kind": "bytes"},
            },
            "model": {"layers": 2 if quick else 4, "width": 64 if quick else 128, "heads": 4},
            "train": {
                "steps": 100_000,
                "max_epochs": 1,
                "context": 128,
                "global_batch": 16,
                "learning_rate": NIGHTLY_LEARNING_RATE,
                "schedule": "wsd",
                "warmup_steps": 10,
            },
            "parallel": {"precision": "fp32", "strategy": "single"},
            "checkpoint": {"every_steps": 100_000, "keep_last": 1},
            "evaluation": {"every_steps": 0, "samples_while_training": 0, "prompts": []},
        }
    )


class Nights:
    """Trains through all nights with one share of replay, in a folder of its own."""

    def __init__(self, folder: Path, inventory: Inventory, *, replay: float, quick: bool) -> None:
        self.folder, self.inventory, self.replay, self.quick = folder, inventory, replay, quick
        self.older: list[Slice] = []
        self.losses: Losses = {}
        self.checkpoint: Path | None = None
        self.tokenizer: Path | None = None

    def night(self, name: str, text: str) -> None:
        """Train on a slice and on replayed text; measure the loss on every slice so far."""
        corpus = self.folder / "text" / f"{name}.txt"
        corpus.parent.mkdir(exist_ok=True)
        corpus.write_text(text, encoding="utf-8")
        config = self._continued(config_of(corpus, quick=self.quick))
        own, shards = prepare_corpus(config.data, tokens_home=self.folder / "tokens")
        self.tokenizer = self.tokenizer or own / "tokenizer"
        new_tokens = shards.tokens("train")
        config = with_slices(config, name, self.older[::-1], replay=self.replay, new_tokens=new_tokens)
        tokens, manifest = prepare_corpus(config.data, tokens_home=self.folder / "tokens")
        plan = plan_run(config, inventory=self.inventory, run_id=name, shards=manifest, shards_dir=tokens)
        plan_path = self.folder / name / "plan.json"
        plan.model_copy(update={"threads_per_rank": 1}).write(plan_path)  # two would wait for each other if busy
        run_ranks(plan_path)
        run_ranks(plan_path, program="training.evaluate")
        report = EvalReport.read(plan_path.with_name("eval.json"))
        self.older.append(Slice(name, own, new_tokens))
        self.checkpoint = plan_path.parent / TrainResult.read(plan_path.with_name("result.json")).checkpoint
        by_source = report.loss_by_source if manifest.parts else {name: report.loss}
        for each, loss in by_source.items():
            self.losses.setdefault(each, []).append(loss)

    def _continued(self, config: RunConfig) -> RunConfig:
        if self.checkpoint is None:
            train = config.train.model_dump() | {"max_epochs": 3, "learning_rate": LEARNING_RATE}
            return RunConfig.model_validate(config.model_dump() | {"train": train})
        tokenizer = {"kind": "pretrained", "path": str(self.tokenizer)}
        changes: dict[str, Any] = {
            "data": config.data.model_dump() | {"tokenizer": tokenizer},
            "model": config.model.model_dump() | {"init": "pretrained", "path": str(self.checkpoint)},
            "train": config.train.model_dump() | {"optimizer_path": str(self.checkpoint)},
        }
        return RunConfig.model_validate(config.model_dump() | changes)


def worse(losses: Losses, *, last_only: bool = False) -> float:
    """Return the largest rise of an older slice's loss above its best after an earlier night, as a fraction."""
    found = [
        series[night] / min(series[:night]) - 1
        for series in losses.values()
        for night in range(1, len(series))
        if not last_only or night == len(series) - 1
    ]
    return max(found, default=0.0)


def table(losses: Losses, *, nights: int) -> list[str]:
    """Return the lines of a Markdown table: a row for each slice, a column for each night."""
    rows = ["| slice | first | " + " | ".join(f"{night}" for night in range(nights)) + " |"]
    rows.append("|---|" + "---|" * (nights + 1))
    for name, series in losses.items():
        cells = [""] * (nights + 1 - len(series)) + [f"{loss:.3f}" for loss in series]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def nights(folder: Path, *, count: int, replay: float, quick: bool, data: Path) -> Mapping[str, Losses]:
    """Return the losses by way, `replay` and `none`."""
    texts = slices_of_text(data, num_bytes=QUICK_SLICE_BYTES if quick else SLICE_BYTES, count=count)
    inventory = check_hardware(home=folder, ranks=1)
    losses = {}
    for way, share in (("replay", replay), ("none", 0.0)):
        (folder / way).mkdir()
        ongoing = Nights(folder / way, inventory, replay=share, quick=quick)
        for number, (name, text) in enumerate(texts):
            began = time.perf_counter()
            ongoing.night(name, text)
            print(f"{way}, night {number}: {time.perf_counter() - began:.0f} s", flush=True)
        losses[way] = ongoing.losses
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 nights of little text, a smaller model")
    parser.add_argument("--nights", type=int, default=0, help="default: 10, with --quick 3")
    parser.add_argument("--replay", type=float, default=0.85, help="share of a night's tokens that are old")
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    count = options.nights or (3 if options.quick else 10)
    with tempfile.TemporaryDirectory() as folder:
        losses = nights(Path(folder), count=count, replay=options.replay, quick=options.quick, data=options.data)
    for way, title in (("replay", f"with {options.replay:.0%} replay"), ("none", "without replay")):
        print(f"\nloss on the held-out text of each slice, nats per byte, {title}\n")
        print("\n".join(table(losses[way], nights=count)))
    found = {
        "loss": losses,
        "worst_old_slice_with_replay": round(worse(losses["replay"]), 4),
        "worst_old_slice_without": round(worse(losses["none"]), 4),
        "final_old_with_replay": round(worse(losses["replay"], last_only=True), 4),
        "final_old_without": round(worse(losses["none"], last_only=True), 4),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
