"""The bytes that a rank sends in a collective: the plan prices them, and ranks count them."""

from __future__ import annotations


def all_reduce_bytes(num_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends to sum `num_bytes` over `ranks` ranks: the minimum, which a ring reaches
    (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations")."""
    return 2 * num_bytes * (ranks - 1) // ranks


def gather_bytes(num_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends or passes on until all ranks have the `num_bytes` of each of them."""
    return num_bytes * (ranks - 1)
