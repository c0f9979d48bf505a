"""Freezes the parameters whose Hugging Face names match train.freeze's shell patterns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

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


def not_reached(loss: Tensor, trained: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of the parameters that get no gradient from `loss`, by its graph, before backward."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    reached = {id(node.variable) for node in seen if hasattr(node, "variable")}  # of AccumulateGrad, at the ends
    return [name for name, parameter in trained.items() if id(parameter) not in reached]


def without_gradient(unused: Sequence[str], names: Iterable[str]) -> str:
    """Describe trained parameters that get no gradient, and what freezes them; `names`: of all parameters."""
    more = f" and {len(unused) - EXAMPLES} more" if len(unused) > EXAMPLES else ""
    listed, others = ", ".join(_examples(unused)), {*names} - {*unused}
    patterns = dict.fromkeys(_pattern_of(name, others) for name in unused)
    freezing = ", ".join(f'"{pattern}"' for pattern in patterns)
    return (
        f"{len(unused)} parameters get no gradient from the loss, because the model's forward pass does not use them "
        f"({listed}{more}): freeze them with train.freeze='[{freezing}]'"
    )


def _pattern_of(name: str, others: Iterable[str]) -> str:
    """Return the widest pattern for the modules around a parameter, in all layers, that matches none of `others`."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    wider = (f"{'.'.join(parts[:length])}.*" for length in range(1, len(parts)))
    return next((each for each in (*wider, ".".join(parts)) if not any(fnmatchcase(o, each) for o in others)), name)


def trainable_parameters(hf: nn.Module) -> int:
    """Return the number of weights that training changes; tied ones count once."""
    return sum(parameter.numel() for parameter in hf.parameters() if parameter.requires_grad)


def _examples(names: Iterable[str]) -> list[str]:
    """Return a few names spread over the model, including the first and the last."""
    listed = list(names)
    last = len(listed) - 1
    return list(dict.fromkeys(listed[place * last // (EXAMPLES - 1)] for place in range(EXAMPLES)))
