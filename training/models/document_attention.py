"""Attention within documents, without a mask of context x context in memory.

Tokens attend only to their own document, so scores between documents are neither computed nor stored. GPUs use
torch.nn.attention.varlen (FlashAttention over sequences laid end to end; Dao 2023), or flex_attention if that does not
run and layers are compiled. CPUs use torch's fused attention, document by document. A dense mask remains for short
sequences on CPUs, for GPUs with neither, and for attention with dropout, which the other ways do not support.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from training.models import hugging_face

ATTENTION = "by_document"  # the name registered with transformers
UNMASKED = "by_document_unmasked"  # … for models of which transformers makes no mask
TOKENS = 2  # the dimension of tokens in [batch, heads, context, head width]
# FlashAttention needs this compute capability, and heads of at most this width, a multiple of 8.
FLASH_CAPABILITY, FLASH_HEAD_WIDTH = (8, 0), 256

# On CPUs each document's call takes 0.1 ms, forward and backward; with a dense mask, 64 tokens take 0.4 ms. Both ways
# take equal time at about 200 tokens; at 512, calls take half the time of a dense mask (4 heads of 64, one thread).
CPU_CONTEXT = 256

Way = Literal["by document", "varlen", "flex", "dense"]


def way_to_attend(
    device: torch.device, dtype: torch.dtype, *, context: int, head_width: int, compiled: bool, dropout: bool
) -> Way:
    """Return how to attend within documents on this device (see the module's docstring)."""
    if dropout:
        return "dense"
    if device.type == "cpu":
        return "by document" if context >= CPU_CONTEXT else "dense"
    if device.type != "cuda":
        return "dense"
    if has_flash(device, dtype, head_width=head_width):
        return "varlen"
    return "flex" if compiled else "dense"


def has_flash(device: torch.device, dtype: torch.dtype, *, head_width: int) -> bool:
    """Return whether FlashAttention runs on this device in this precision, with heads of this width."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return False
    return dtype != torch.float32 and head_width <= FLASH_HEAD_WIDTH and head_width % 8 == 0


def attend_by_document(hf: Any, *, masked: bool = True) -> None:
    """Let a model's attention take `document_bounds` or a BlockMask as its mask; other masks are passed to "sdpa".

    `masked`: whether the class makes its own mask where it is given none.
    """
    _register()
    hugging_face.set_attention(hf, ATTENTION if masked else UNMASKED)


@functools.cache
def _register() -> None:
    attention = functools.partial(_attention, by_sdpa=hugging_face.by_sdpa())
    hugging_face.register_attention(ATTENTION, attention, masked=True)
    hugging_face.register_attention(UNMASKED, attention, masked=False)


def document_bounds(documents: Tensor, pieces: Sequence[slice], *, causal: bool) -> Tensor:
    """Return the offsets where each document's queries and keys begin in a batch laid end to end, and the final end.

    int64 [batch, context] -> int32 [1, pieces, 2, n + 1]: transformers passes masks of 4 dimensions on as they are. A
    piece holds the queries in one range of every sequence, and the keys of the whole sequence. Causal documents are cut
    where a piece ends, so that a piece's queries are the last tokens of their documents. Finding the documents waits
    for the GPU once for each piece of a micro-batch.
    """
    rows, context = documents.shape
    differ = documents[:, 1:] != documents[:, :-1]
    found = []
    for piece in pieces:
        begins = torch.cat([torch.ones_like(differ[:, :1]), differ], 1)
        if causal and piece.stop < context:
            begins[:, piece.stop] = True
        keys = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([rows * context]).to(documents.device)])
        within = (keys % context).clamp(piece.start, piece.stop) - piece.start
        found.append(torch.stack([keys // context * (piece.stop - piece.start) + within, keys]))
    longest = max(bounds.shape[1] for bounds in found)
    padded = [torch.cat([bounds, bounds[:, -1:].expand(-1, longest - bounds.shape[1])], 1) for bounds in found]
    bounds = torch.stack(padded).int()[None]
    torch._dynamo.mark_dynamic(bounds, 3)  # otherwise layers would be recompiled for each number of documents
    return bounds


def document_blocks(documents: Tensor, places: Tensor, *, causal: bool) -> BlockMask:
    """Return flex_attention's block mask: queries at `places` [own tokens] against all keys, blocks of 128 x 128."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[batch, places[query]] == documents[batch, key]
        return same & (places[query] >= key) if causal else same

    make = _compiled_block_mask() if documents.is_cuda else create_block_mask
    return make(sees, len(documents), None, len(places), documents.shape[1], device=documents.device)


@functools.cache
def _compiled_block_mask() -> Any:
    return torch.compile(create_block_mask)  # uncompiled, it would build the dense mask first


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, *, causal: bool, scale: float | None) -> Tensor:
    """Attend within documents, from this rank's queries to all keys; return [batch, own tokens, heads, head width].

    Query, key and value are [batch, heads, tokens, head width]. `mask`: from `document_bounds` or `document_blocks`.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    if isinstance(mask, BlockMask):
        result = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
        assert isinstance(result, Tensor)
        return result.transpose(1, 2).contiguous()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (each.transpose(1, TOKENS).flatten(0, 1) for each in (key, value))
    parts = []
    for own, bounds in zip(query.chunk(mask.shape[1], TOKENS), mask[0].unbind(), strict=True):
        tokens = own.transpose(1, TOKENS)
        part = _attend_tokens(tokens.flatten(0, 1), key, value, bounds, tokens.shape[1], causal, scale)
        parts.append(part.unflatten(0, tokens.shape[:2]))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    by_sdpa: Callable[..., tuple[Tensor, None]],
    **named: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this function with these arguments."""
    causal: bool = getattr(module, "is_causal", True)
    options: dict[str, Any] = {"causal": causal, "scale": named.get("scaling")}
    if asked := own_rules(query, value, named):
        places, dropout = _places(query, key, attention_mask), named.get("dropout", 0.0)
        return attend_by_rules(query, key, value, attention_mask, places, dropout=dropout, **options, **asked), None
    if not is_of_documents(attention_mask):
        return by_sdpa(module, query, key, value, attention_mask, **named)
    return attend(query, key, value, attention_mask, **options), None


def own_rules(query: Tensor, value: Tensor, named: dict[str, Any]) -> dict[str, Any]:
    """Return what a layer asks of attention that no kernel here computes: a window, a softcap, sinks, other widths.

    `value` is of the whole sequence: a window that is no shorter hides none of it.
    """
    asked = {"window": named.get("sliding_window"), "cap": named.get("softcap"), "sinks": named.get("s_aux")}
    if asked["window"] is not None and asked["window"] >= value.shape[TOKENS]:
        asked["window"] = None
    asked = {rule: value for rule, value in asked.items() if value is not None}
    return asked or ({"window": None} if query.shape[-1] != value.shape[-1] else {})


def _places(query: Tensor, key: Tensor, mask: Any) -> Tensor:
    """Return the places of queries among the keys: the last ones, as in a sequence or with a cache of equal rows.

    Rows of a cache that differ in length have one query each, at the last key that the mask lets it see.
    """
    queries, keys = query.shape[TOKENS], key.shape[TOKENS]
    if queries == 1 < keys and isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return mask.sum(-1) - 1
    return torch.arange(keys - queries, keys, device=key.device)


def attend_by_rules(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    places: Tensor,
    *,
    causal: bool,
    scale: float | None,
    dropout: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with a dense mask, by the rules that a layer asks for; shapes as in `attend`.

    `places`: of the queries, [own tokens], or [batch, 1, own tokens] if rows differ. window: a token sees fewer tokens
    back than this. cap: of scores (Gemma 2). sinks: a score for each head that takes part in the softmax (gpt-oss).
    """
    sees = _dense(mask, query.shape[TOKENS], key)
    keys = torch.arange(key.shape[TOKENS], device=key.device)
    distance = places[..., None] - keys
    if causal:
        sees = sees & (distance >= 0)
    if window is not None:
        sees = sees & (distance.abs() < window)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    if cap is None and sinks is None:
        result = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, dropout_p=dropout, scale=scale
        )
        return result.transpose(1, 2).contiguous()
    scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(len(query), -1, query.shape[TOKENS], 1)
        scores = torch.cat([scores, column], -1)
    shares = torch.softmax(scores, -1)[..., : key.shape[TOKENS]].to(value.dtype)
    return (nn.functional.dropout(shares, dropout) @ value).transpose(1, 2).contiguous()


def _dense(mask: Any, queries: int, key: Tensor) -> Tensor:
    """Return any kind of mask as bool [batch or 1, 1, queries, keys]: True where a query may see a key."""
    batch, keys = len(key), key.shape[TOKENS]
    if mask is None:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=key.device)
    if isinstance(mask, BlockMask):
        return create_mask(mask.mask_mod, batch, None, queries, keys, device=key.device)
    if mask.dtype == torch.bool:
        return mask[..., :keys]
    if mask.dtype != torch.int32:
        return mask[..., :keys] == 0
    per_piece = queries // mask.shape[1]
    found = []
    for bounds in mask[0]:
        of_queries = torch.searchsorted(bounds[0], torch.arange(batch * per_piece, device=key.device), right=True)
        of_keys = torch.searchsorted(bounds[1], torch.arange(batch * keys, device=key.device), right=True)
        found.append(of_queries.view(batch, 1, -1, 1) == of_keys.view(batch, 1, 1, -1))
    return torch.cat(found, TOKENS)


def is_of_documents(mask: Any) -> bool:
    return isinstance(mask, BlockMask) or (isinstance(mask, Tensor) and mask.dtype == torch.int32)


def _attend_tokens(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, causal: bool, scale: float
) -> Tensor:
    """Attend from queries [tokens, heads, head width] to keys and values with as many or fewer heads.

    The result has the shape of the queries. `longest`: no document has more queries.
    """
    if query.is_cuda:
        # Upper bounds of the lengths are enough: no shape depends on them. No document is longer than its sequence.
        longest_keys = key.shape[0] // (query.shape[0] // longest)
        window = (-1, 0) if causal else (-1, -1)
        options: dict[str, Any] = {"scale": scale, "window_size": window, "enable_gqa": True}
        return varlen_attn(query, key, value, bounds[0], bounds[1], longest, longest_keys, **options)  # type: ignore[return-value]
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    result: Tensor = _by_document(query, key, value, bounds, causal, scale)[0]
    return result


# Custom operators: torch.compile does not trace into them, so compiled layers serve any number of documents.


@torch.library.custom_op("shardline::attend_by_document", mutates_args=())
def _by_document(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend document by document: [tokens, heads, head width] -> the same, and log-sum-exp fp32 [tokens, heads]."""
    result, sums = query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)
    for own, seen in _documents(bounds):
        q, k, v = _heads_first(query[own]), _heads_first(key[seen]), _heads_first(value[seen])
        part, part_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=_is_square(own, seen, causal), attn_mask=_mask(own, seen, q, causal), scale=scale
        )
        result[own], sums[own] = part[0].transpose(0, 1), part_sums[0].t()
    return result, sums


@_by_document.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("shardline::attend_by_document_backward", mutates_args=())
def _by_document_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    sums: Tensor,
    bounds: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = query.new_empty(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    for own, seen in _documents(bounds):
        q, k, v = _heads_first(query[own]), _heads_first(key[seen]), _heads_first(value[seen])
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad[own]),
            q,
            k,
            v,
            _heads_first(result[own]),
            sums[own].t()[None],
            0.0,
            _is_square(own, seen, causal),
            attn_mask=_mask(own, seen, q, causal),
            scale=scale,
        )
        for whole, place, part in zip(grads, (own, seen, seen), parts, strict=True):
            whole[place] = part[0].transpose(0, 1)
    return grads


@_by_document_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    sums: Tensor,
    bounds: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return *_by_document_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None


_by_document.register_autograd(_backward, setup_context=_keep)

# Selective activation checkpointing saves the results of these operators.
OPERATORS = (torch.ops.shardline.attend_by_document.default, torch.ops.torch_attn._varlen_attn.default)


def _documents(bounds: Tensor) -> Iterator[tuple[slice, slice]]:
    """Return slices of the queries and of the keys of each document that has queries here."""
    queries, keys = (list(map(slice, *zip(*pairwise(row), strict=True))) for row in bounds.tolist())
    return ((own, seen) for own, seen in zip(queries, keys, strict=True) if own.stop > own.start)


def _heads_first(tokens: Tensor) -> Tensor:
    return tokens.transpose(0, 1)[None]


def _is_square(own: slice, seen: slice, causal: bool) -> bool:
    return causal and own.stop - own.start == seen.stop - seen.start


def _mask(own: slice, seen: slice, like: Tensor, causal: bool) -> Tensor | None:
    """Return the mask for queries that are a causal document's last tokens (cp); kernels assume its first tokens."""
    if not causal or _is_square(own, seen, causal):
        return None
    queries, keys = own.stop - own.start, seen.stop - seen.start
    return torch.full((1, 1, queries, keys), -torch.inf, dtype=like.dtype).triu(keys - queries + 1)
