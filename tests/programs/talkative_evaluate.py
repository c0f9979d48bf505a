"""The evaluation program, which says at each millisecond how far it is."""

from __future__ import annotations

from pathlib import Path

from training import evaluate
from training.tracking import progress


def main(plan_path: Path) -> None:
    progress.SAY_EVERY_S = 0.001
    evaluate.main(plan_path)
