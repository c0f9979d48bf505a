"""The keys and values of a batch of sequences, for those layers and heads that a rank has.

Sequences stand in rows 0 to n-1 without gaps, each from column 0 on, so that a step over all of them reads one view
and copies nothing; how far a row goes is what its position says. To the layers this is a transformers cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_COLUMNS = 256  # then doubled as sequences grow, so that short ones take little memory


class KeyValues:
    def __init__(self, *, rows: int, context: int) -> None:
        self.num_rows, self.context = rows, context
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.row: int | None = None  # the one that is filled now, or None: one more column of each
        self.positions = torch.zeros(0, dtype=torch.int64)
        self.index = torch.arange(rows)
        self.end = 0

    def fill(self, row: int, *, length: int) -> None:
        """The next `update` brings the first `length` columns of `row`."""
        self.row, self.end = row, length

    def extend(self, positions: Tensor, *, end: int) -> None:
        """The next `update` brings one column of each row, at `positions` [n], all of them below `end`."""
        self.row, self.positions, self.end = None, positions, end
        self.index = torch.arange(len(positions), device=positions.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: object) -> tuple[Tensor, Tensor]:
        """[n, heads, new, size] each -> what the new tokens may look at, [n, heads, end, size]."""
        held = self._room(layer, like=keys)
        if self.row is not None:
            for part, new in zip(held, (keys, values), strict=True):
                part[self.row, :, : self.end] = new[0]
            return keys, values
        for part, new in zip(held, (keys, values), strict=True):
            part[self.index, :, self.positions] = new[:, :, 0]
        count = len(self.positions)
        return held[0][:count, :, : self.end], held[1][:count, :, : self.end]

    def move(self, source: int, target: int, *, length: int) -> None:
        for held in self.layers.values():
            for part in held:
                part[target, :, :length] = part[source, :, :length]

    def _room(self, layer: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
        held = self.layers.get(layer)
        columns = held[0].shape[2] if held is not None else 0
        if held is None or columns < self.end:
            wanted = max(FIRST_COLUMNS, 2 * columns, 2 ** (self.end - 1).bit_length())
            shape = (self.num_rows, like.shape[1], min(wanted, self.context), like.shape[3])
            larger = like.new_zeros(shape), like.new_zeros(shape)
            for old, new in zip(held or (), larger, strict=False):
                new[:, :, :columns] = old
            self.layers[layer] = held = larger
        return held
