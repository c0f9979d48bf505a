"""The names of transformers that are not public, all in one place, because a release may change them.

pyproject.toml ends at the newest release for which the admission test (tests/support/families.py) has run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

UNMASKED = "shardline_unmasked"  # an attention function for which transformers makes no mask


def set_attention(hf: Any, name: str) -> None:
    hf.config._attn_implementation = name


def register_attention(name: str, function: Any, *, masked: bool) -> None:
    """Register an attention function; `masked`: transformers makes its masks as for "sdpa", else none."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, function)
    if masked:
        AttentionMaskInterface.register(name, sdpa_mask)


def by_sdpa() -> Any:
    """Return transformers' attention by torch's scaled_dot_product_attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


@contextmanager
def unmasked(hf: Any) -> Iterator[None]:
    """Let a model make no attention mask for a while."""
    register_attention(UNMASKED, by_sdpa(), masked=False)
    before = hf.config._attn_implementation
    set_attention(hf, UNMASKED)
    try:
        yield
    finally:
        set_attention(hf, before)


def pipeline_plan(hf: Any) -> Mapping[str, Any]:
    plans = (getattr(config, "base_model_pp_plan", None) for config in (hf.config, hf.config.get_text_config()))
    return next(filter(None, plans), {})


def expanded_plan(hf: Any, more: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each parameter and module in the class's tensor-parallel plan, and in `more`, layer by layer.

    A module's parameters come before the module, as in transformers.
    """
    styles: dict[str, str] = hf._expand_parallel_plan(dict(hf.tp_plan))
    for pattern, style in more.items():
        names = [name for name, _ in hf.named_modules()]
        owner, _, attribute = pattern.rpartition(".")
        whole = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        owners = re.compile(re.escape(owner).replace(r"\*", r"\d+"))
        matching = [name for name in names if whole.fullmatch(name)]
        styles |= dict.fromkeys(matching or [f"{name}.{attribute}" for name in names if owners.fullmatch(name)], style)
    return styles


def initialize(hf: Any, module: nn.Module) -> None:
    """Fill a module with the class's own initial weights."""
    hf._init_weights(module)


def without_weights() -> AbstractContextManager[None]:
    """Make models whose weights are not initialized: memory that is allocated and never touched costs nothing."""
    from transformers.initialization import no_init_weights

    made: AbstractContextManager[None] = no_init_weights()
    return made


def drop_renaming(hf: Any) -> bool:
    """Forget the renaming that took off prefixes on loading, which saving would undo; return whether there was one."""
    used = hf._weight_conversions
    hf._weight_conversions = [each for each in used if each.target_patterns != [""]]
    return len(hf._weight_conversions) < len(used)
