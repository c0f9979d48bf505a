"""The ways to lay a run out over ranks that the strategy tests go through: name -> ranks and config."""

from __future__ import annotations

from typing import Any

Layout = tuple[int, dict[str, Any]]

TWO_RANKS: dict[str, Layout] = {
    **{name: (2, {"parallel__strategy": name}) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")},
    "zero2 offload": (2, {"parallel__strategy": "zero2", "parallel__offload": "optimizer"}),
    "zero3 offload": (2, {"parallel__strategy": "zero3", "parallel__offload": "parameters"}),
    "tp": (2, {"parallel__tp": 2}),
    "pp": (2, {"parallel__pp": 2}),
    "pp interleaved": (2, {"parallel__pp": 2, "parallel__pp_stages_per_rank": 2}),
}
FOUR_RANKS: dict[str, Layout] = {
    "ddp 4": (4, {"parallel__strategy": "ddp"}),
    "fsdp 4": (4, {"parallel__strategy": "fsdp"}),
    "zero1 4": (4, {"parallel__strategy": "zero1"}),
    "zero2 4": (4, {"parallel__strategy": "zero2"}),
    "zero3 4": (4, {"parallel__strategy": "zero3"}),
    "pp 4": (4, {"parallel__pp": 4}),
    "dp x pp interleaved": (4, {"parallel__pp": 2, "parallel__pp_stages_per_rank": 2}),
    "dp x tp": (4, {"parallel__tp": 2}),
    "dp x pp": (4, {"parallel__pp": 2}),
    "fsdp x tp": (4, {"parallel__strategy": "fsdp", "parallel__tp": 2}),
    "tp x pp": (4, {"parallel__tp": 2, "parallel__pp": 2}),
}
EIGHT_RANKS: dict[str, Layout] = {"dp x tp x pp": (8, {"parallel__tp": 2, "parallel__pp": 2})}
LAYOUTS = TWO_RANKS | FOUR_RANKS | EIGHT_RANKS
