"""What Muon's step costs (training/strategies/muon.py): the plan prices it, and the ranks share it out by it."""

from __future__ import annotations

STEPS = 5  # of Newton-Schulz
SENT_BYTES = 2  # per number of a momentum or an update that goes to another rank: bf16


def newton_schulz_flops(rows: float, columns: float) -> float:
    """Return the FLOPs of orthogonalizing a matrix: in each step three products, two with the matrix."""
    short, long = min(rows, columns), max(rows, columns)
    return STEPS * (4 * short * short * long + 2 * short**3)
