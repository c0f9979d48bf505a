"""The losses that a class of transformers adds to its cross-entropy, such as the balance loss of experts, or a z-loss.

Classes add them by coefficients under different names (router_aux_loss_coef, aux_loss_coef, z_loss_coefficient). So the
class itself is asked: it calls its `loss_function` for cross-entropy. While that returns 0, its loss is what it adds.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from training.data.batch import IGNORED
from training.models.family import is_cross_entropy

logger = logging.getLogger(__name__)

ROUTING = "output_router_logits"  # the field of config.json that asks for the balance loss of experts


class AuxiliaryLoss:
    """The loss that a transformers class adds to cross-entropy, summed over micro-batches until it is taken."""

    def __init__(self, hf: Any) -> None:
        makes_inputs_of_labels = getattr(hf.config, "is_encoder_decoder", False)
        self.may_add = "labels" in inspect.signature(hf.forward).parameters and not makes_inputs_of_labels
        self.is_checked = False
        self.sum: Tensor | None = None

    def call(self, hf: Any, targets: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits [batch, context, vocab] and the added loss [], times the number of targets; None: no loss.

        The class computes it over the tokens of this micro-batch. The factor makes it a part of a summed loss: divided
        by all targets of a step, it is the mean over micro-batches, weighted by their targets.
        Raises ValueError, at the first call, for a class with a loss that cannot be separated from cross-entropy.
        """
        if not self.may_add:
            return hf(**inputs).logits, None
        cross_entropy, calls = hf.loss_function, 0

        def nothing(logits: Tensor, *_: Any, **__: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return logits.new_zeros((), dtype=torch.float32)

        hf.loss_function = nothing
        try:
            result = hf(**inputs, labels=targets)
        finally:
            hf.loss_function = cross_entropy
        if not self.is_checked:
            self._check(hf, result, targets, calls=calls)
        if not self.may_add:
            return result.logits, None
        added = result.loss * (targets != IGNORED).sum()
        self.sum = added.detach() if self.sum is None else self.sum + added.detach()
        return result.logits, added

    def take(self) -> Tensor | None:
        """Return the sum over the micro-batches since the last call; None if the class adds nothing."""
        taken, self.sum = self.sum, None
        return taken

    def _check(self, hf: Any, result: Any, targets: Tensor, *, calls: int) -> None:
        name, self.is_checked = type(hf).__name__, True
        adds = calls == 1 and (result.loss.requires_grad or bool(result.loss.detach() != 0))
        if calls > 1:
            raise ValueError(
                f"{name} computes {calls} cross-entropies in one step, of words beyond the next one too (multi-token "
                "prediction); only the next word's can be trained here: set the number of such layers (such as "
                "num_nextn_predict_layers) to 0 in the config.json of model.path"
            )
        if calls == 0 and not is_cross_entropy(result.loss, result.logits, targets):
            raise ValueError(
                f"{name} trains with a loss of its own ({float(result.loss):.4f} on the first micro-batch), which is "
                "not the cross-entropy of the next word and cannot be trained here: use another class of models"
            )
        if getattr(hf.config, ROUTING, False) and not adds:
            raise ValueError(
                f"config.json of model.path has {ROUTING}=true, which asks for a balance loss, and {name} computes "
                f"none: set {ROUTING} to false there"
            )
        if adds:
            logger.info(
                "%s adds a loss of its own to cross-entropy, with its coefficient; it is computed in each micro-batch, "
                "and the metric auxiliary_loss is the mean of the step's micro-batches",
                name,
            )
        self.may_add = adds
