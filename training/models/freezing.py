"""Freezes the parameters whose Hugging Face names match train.freeze's shell patterns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

logger = logging.getLogger(__name__)

EXAMPLES = 5  # names in an error message


def freeze(hf: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match a pattern. A tied matrix is one parameter, frozen by either of its names.

    Call it before a strategy is built: every strategy trains only the parameters that require a gradient.
    Raises ValueError for a pattern that matches nothing, and if nothing is left to train.
    """
    named = dict(hf.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"train.freeze: no parameter matches {pattern!r}; the model has, for example, "
                f"{', '.join(_examples(named))}"
            )
        for name in matching:
            named[name].requires_grad_(False)
    trained, total = trainable_parameters(hf), sum(parameter.numel() for parameter in hf.parameters())
    if not trained:
        raise ValueError(f"train.freeze = {', '.join(patterns)} freezes all {total:,} parameters: leave some unfrozen")
    if trained < total:
        logger.info("%s of %s parameters are trained; train.freeze freezes the others", f"{trained:,}", f"{total:,}")


def trainable_parameters(hf: nn.Module) -> int:
    """Return the number of weights that training changes; tied ones count once."""
    return sum(parameter.numel() for parameter in hf.parameters() if parameter.requires_grad)


def _examples(names: Iterable[str]) -> list[str]:
    """Return a few names spread over the model, including the first and the last."""
    listed = list(names)
    last = len(listed) - 1
    return list(dict.fromkeys(listed[place * last // (EXAMPLES - 1)] for place in range(EXAMPLES)))
