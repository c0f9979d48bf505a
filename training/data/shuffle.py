"""Random orders of sequences that need no list in memory."""

from __future__ import annotations

import numpy as np


def shuffled(positions: np.ndarray, *, length: int, key: tuple[int, ...]) -> np.ndarray:
    """Return a permutation of range(length), evaluated at `positions` only: O(1) to resume, without a table.

    A four-round Feistel network over the next even number of bits, walked until it lands inside the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"); under four walks on average.
    """
    half_bits = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(4, np.uint64)

    def encrypt(values: np.ndarray) -> np.ndarray:
        left, right = values >> np.uint64(half_bits), values & mask
        for round_key in round_keys:
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << np.uint64(half_bits)) | right

    result = encrypt(positions.astype(np.uint64))
    while (outside := result >= length).any():
        result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


def random_keys(numbers: np.ndarray, *, key: int) -> np.ndarray:
    """Return a random uint64 for each of int64 [n], by number and key: SplitMix64 (Steele, Lea and Flood 2014)."""
    state = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state ^= np.random.SeedSequence(key).generate_state(1, np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
