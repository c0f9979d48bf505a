"""A cache of the keys and values of a batch of sequences, for the layers and heads that a rank has.

Sequences occupy rows 0 to n-1 without gaps, each from column 0 on, so that a step over all of them reads one view and
copies nothing; a row's position tells its length. Layers use the cache like one of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_COLUMNS = 256  # then doubled as sequences grow, so that short ones take little memory


class KeyValues:
    def __init__(self, *, rows: int, context: int) -> None:
        self.num_rows, self.context = rows, context
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.filled_row: int | None = None  # the row that `update` fills; None: it adds a column to each row
        self.positions = torch.zeros(0, dtype=torch.int64)
        self.index = torch.arange(rows)
        self.end = 0

    def fill(self, row: int, *, length: int) -> None:
        """Make the next `update` write the first `length` columns of `row`."""
        self.filled_row, self.end = row, length

    def extend(self, positions: Tensor, *, end: int) -> None:
        """Make the next `update` write one column of each row, at `positions` [n], all of them below `end`."""
        self.filled_row, self.positions, self.end = None, positions, end
        self.index = torch.arange(len(positions), device=positions.device)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, heads, new, size]; return those that new tokens may see, [n, heads, end, size]."""
        cached = self._allocated(layer, like=keys)
        if self.filled_row is not None:
            for tensor, new in zip(cached, (keys, values), strict=True):
                tensor[self.filled_row, :, : self.end] = new[0]
            return keys, values
        for tensor, new in zip(cached, (keys, values), strict=True):
            tensor[self.index, :, self.positions] = new[:, :, 0]
        count = len(self.positions)
        return cached[0][:count, :, : self.end], cached[1][:count, :, : self.end]

    def move(self, source: int, target: int, *, length: int) -> None:
        for cached in self.layers.values():
            for tensor in cached:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _allocated(self, layer: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, with room for `end` columns."""
        cached = self.layers.get(layer)
        columns = cached[0].shape[2] if cached is not None else 0
        if cached is None or columns < self.end:
            wanted = max(FIRST_COLUMNS, 2 * columns, 2 ** (self.end - 1).bit_length())
            shape = (self.num_rows, like.shape[1], min(wanted, self.context), like.shape[3])
            larger = like.new_zeros(shape), like.new_zeros(shape)
            for old, new in zip(cached or (), larger, strict=False):
                new[:, :, :columns] = old
            self.layers[layer] = cached = larger
        return cached
