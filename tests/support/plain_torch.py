"""What torch itself computes, and how large its tensors are, for comparison with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.records.plan import RunPlan
from training.shards.stream import TokenStream


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


def by_hand(plan_path: Path, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Loss and right guess of each held-out token with one loop over transformers' logits, window by window."""
    plan = RunPlan.read(plan_path)
    stream, context = TokenStream(Path(plan.shards_dir), "validation"), plan.config.train.context
    losses, right = [], []
    for start in range(0, len(stream) - 1, context):
        tokens = torch.from_numpy(stream.read(start, min(start + context + 1, len(stream))).astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none").double().numpy())
        right.append((logits.argmax(-1) == tokens[1:]).numpy())
    assert sum(map(len, losses)) == len(stream) - 1
    return np.concatenate(losses), np.concatenate(right)
