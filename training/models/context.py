"""Context parallelism: ranks split the tokens of each sequence, and all-gather keys and values in each attention.

An all-gather instead of a ring (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2) allows any mask,
and sends little where there are fewer key/value heads than query heads. A sequence is cut into two pieces per rank;
each rank takes one from the first half and one from the second, so that causal attention is equal work for all ranks.
torch.distributed.tensor.experimental.context_parallel uses a ring, and supports neither CPUs nor masks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from training.models import hugging_face
from training.models.document_attention import attend, attend_by_rules, has_flash, is_of_documents, own_rules
from training.models.family import layers_of
from training.runtime.mesh import SEQUENCE, gather_sequence

ATTENTION = "context_parallel"  # the name registered with transformers
KEYS = 2  # the dimension of tokens in [batch, heads, context, head width]


class ContextPieces:
    """This rank's two pieces of every sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.number = group, 2 * group.size()
        self.own = group.rank(), self.number - 1 - group.rank()

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of `whole` [batch, context, …]."""
        pieces = whole.chunk(self.number, SEQUENCE)
        return torch.cat([pieces[piece] for piece in self.own], SEQUENCE)

    def slices(self, context: int) -> list[slice]:
        """Return the ranges of this rank's tokens in a sequence."""
        length = context // self.number
        return [slice(piece * length, (piece + 1) * length) for piece in self.own]

    def gather(self, own: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Gather all ranks' pieces from `take`, in the order of tokens. The gradient is summed over ranks."""
        pieces = gather_sequence(own, self.group, dim).chunk(self.number, dim)
        return torch.cat([*pieces[::2], *pieces[::-2]], dim)

    def put(self, own: Tensor) -> Tensor:
        """Place [batch, own tokens] in [batch, context], with zeros for the tokens of other ranks."""
        pieces = [torch.zeros_like(piece) for piece in own.chunk(2, SEQUENCE) for _ in range(self.number // 2)]
        for place, piece in zip(self.own, own.chunk(2, SEQUENCE), strict=True):
            pieces[place] = piece
        return torch.cat(pieces, SEQUENCE)


def attend_over(hf: Any, pieces: ContextPieces) -> None:
    """Make each layer attend to the tokens of all ranks."""
    hugging_face.register_attention(ATTENTION, _attention, masked=False)
    hugging_face.set_attention(hf, ATTENTION)
    for layer in layers_of(hf):
        for module in layer.modules():
            vars(module)["pieces"] = pieces


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Attend from own queries [batch, heads, own tokens, head width] to all ranks' keys; called by transformers.

    Without a mask, each query of a causal model attends to its own token and to all tokens before it.
    """
    pieces: Any = vars(module)["pieces"]
    key, value = pieces.gather(key, KEYS), pieces.gather(value, KEYS)
    causal: bool = getattr(module, "is_causal", True)
    if asked := own_rules(query, value, named):
        tokens = torch.arange(key.shape[KEYS], device=key.device)
        places = pieces.take(tokens[None])[0]
        options: dict[str, Any] = {"causal": causal, "scale": scaling, "dropout": dropout}
        return attend_by_rules(query, key, value, attention_mask, places, **options, **asked), None
    if is_of_documents(attention_mask):
        return attend(query, key, value, attention_mask, causal=causal, scale=scaling), None
    options = {"dropout_p": dropout, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if attention_mask is not None or not causal:
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **options)
    else:
        parts = []
        for piece, own in zip(pieces.own, query.chunk(2, KEYS), strict=True):
            seen = (piece + 1) * own.shape[KEYS]
            parts.append(_attend_up_to_last_key(own, key[:, :, :seen], value[:, :, :seen], **options))
        result = torch.cat(parts, KEYS)
    return result.transpose(1, 2).contiguous(), None


def _attend_up_to_last_key(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Attend causally, aligned so that the last query sees the last key, as FlashAttention does with fewer queries.

    torch's own causal_lower_right does the same, but torch.compile cannot construct that class.
    """
    if has_flash(query.device, query.dtype, head_width=query.shape[-1]):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal=True, scale=scale)[0]
    queries, keys = query.shape[KEYS], key.shape[KEYS]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )
