"""Training whose checkpoints are staged in many small rounds, as those of a large model are."""

from __future__ import annotations

from pathlib import Path

from training import train
from training.checkpoint import staging


def main(plan_path: Path) -> None:
    staging.ROUND_BYTES = 2**12
    train.main(plan_path)
