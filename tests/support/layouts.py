"""The ways to lay a run out over ranks that the strategy tests go through: name -> ranks and config."""

from __future__ import annotations

from typing import Any

Layout = tuple[int, dict[str, Any]]

# A single group, whose outer step changes nothing: then it is ddp.
LOCAL_SGD: dict[str, Any] = {
    "parallel__strategy": "local-sgd",
    "parallel__outer_every_steps": 1,
    "parallel__outer_learning_rate": 1.0,
    "parallel__outer_momentum": 0.0,
}
ONCE_A_STEP = {"parallel__reshard_after_forward": "off", "parallel__reduce_gradients": "last"}
EACH_MICRO_BATCH = {"parallel__reshard_after_forward": "on", "parallel__reduce_gradients": "each"}
TWO_RANKS: dict[str, Layout] = {
    **{name: (2, {"parallel__strategy": name}) for name in ("ddp", "zero1", "zero2", "zero3")},
    "fsdp": (2, {"parallel__strategy": "fsdp", **ONCE_A_STEP}),
    "hsdp": (2, {"parallel__strategy": "hsdp", "parallel__group_ranks": 1}),
    "local-sgd": (2, {**LOCAL_SGD, "parallel__group_ranks": 2}),
    "zero2 offload": (2, {"parallel__strategy": "zero2", "parallel__offload": "optimizer"}),
    "zero3 offload": (2, {"parallel__strategy": "zero3", "parallel__offload": "parameters"}),
    "tp": (2, {"parallel__tp": 2}),
    "cp": (2, {"parallel__strategy": "ddp", "parallel__cp": 2}),
    "sp": (2, {"parallel__tp": 2, "parallel__sequence_parallel": "on"}),
    "pp": (2, {"parallel__pp": 2}),
    "pp interleaved": (2, {"parallel__pp": 2, "parallel__pp_stages_per_rank": 2}),
}
# Replicas of unlike shape, and stages of unequal length.
UNLIKE: dict[str, Layout] = {
    "unequal pp": (2, {"parallel__stages": ((1, 3),)}),
    "unlike": (3, {"parallel__stages": ((4,), (2, 2))}),
    "unlike unequal": (3, {"parallel__stages": ((1, 3), (4,)), "parallel__shares": (3, 1)}),
    "unlike x tp": (6, {"parallel__stages": ((4,), (1, 3)), "parallel__tp": 2}),
}
FOUR_RANKS: dict[str, Layout] = {
    "ddp 4": (4, {"parallel__strategy": "ddp"}),
    "hsdp 4": (
        4,
        {"parallel__strategy": "hsdp", "parallel__group_ranks": 2, **ONCE_A_STEP, "parallel__reduce_gradients": "each"},
    ),
    "fsdp 4": (4, {"parallel__strategy": "fsdp", **EACH_MICRO_BATCH}),
    "zero1 4": (4, {"parallel__strategy": "zero1"}),
    "zero2 4": (4, {"parallel__strategy": "zero2"}),
    "zero3 4": (4, {"parallel__strategy": "zero3"}),
    "pp 4": (4, {"parallel__pp": 4}),
    "dp x pp interleaved": (4, {"parallel__pp": 2, "parallel__pp_stages_per_rank": 2}),
    "dp x tp": (4, {"parallel__tp": 2}),
    "dp x pp": (4, {"parallel__pp": 2}),
    "fsdp x tp": (4, {"parallel__strategy": "fsdp", "parallel__tp": 2, **EACH_MICRO_BATCH}),
    "tp x pp": (4, {"parallel__tp": 2, "parallel__pp": 2}),
    "fsdp x pp": (4, {"parallel__strategy": "fsdp", "parallel__pp": 2}),
    "fsdp x pp interleaved": (
        4,
        {"parallel__strategy": "fsdp", "parallel__pp": 2, "parallel__pp_stages_per_rank": 2},
    ),
    "zero1 x tp": (4, {"parallel__strategy": "zero1", "parallel__tp": 2}),
    "zero1 x pp": (4, {"parallel__strategy": "zero1", "parallel__pp": 2}),
    "fsdp x sp": (4, {"parallel__strategy": "fsdp", "parallel__tp": 2, "parallel__sequence_parallel": "on"}),
    "fsdp x cp": (
        4,
        {"parallel__strategy": "fsdp", "parallel__cp": 2, **EACH_MICRO_BATCH, "parallel__reduce_gradients": "last"},
    ),
    "sp x pp": (4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__sequence_parallel": "on"}),
}
EIGHT_RANKS: dict[str, Layout] = {
    "hsdp x tp": (8, {"parallel__strategy": "hsdp", "parallel__group_ranks": 2, "parallel__tp": 2}),
    "fsdp x cp x sp": (
        8,
        {"parallel__strategy": "fsdp", "parallel__cp": 2, "parallel__tp": 2, "parallel__sequence_parallel": "on"},
    ),
    "dp x tp x pp": (8, {"parallel__tp": 2, "parallel__pp": 2}),
    "fsdp x tp x pp": (8, {"parallel__strategy": "fsdp", "parallel__tp": 2, "parallel__pp": 2}),
    "zero1 x sp x pp": (
        8,
        {
            "parallel__strategy": "zero1",
            "parallel__tp": 2,
            "parallel__pp": 2,
            "parallel__sequence_parallel": "on",
        },
    ),
}
LAYOUTS = TWO_RANKS | UNLIKE | FOUR_RANKS | EIGHT_RANKS
