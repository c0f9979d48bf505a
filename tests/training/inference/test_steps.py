"""A step arrives as it was sent, in a tensor of one size for all steps."""

from __future__ import annotations

import pytest

from training.inference.steps import SKIPPED, Extend, Idle, Move, Prefill, Step, Stop, pack, unpack, wire_size


@pytest.mark.parametrize(
    "step",
    [
        Prefill(batch=1, row=2, ids=[7] * 8),  # a full context
        Prefill(batch=0, row=0, ids=[0]),  # the kind, the batch, the row and the token may all be 0
        Extend(batch=1, tokens=[5, 0, 6], positions=[0, SKIPPED, 7]),
        Move(batch=1, source=2, target=0, length=8),
        Idle(),
        Stop(),
    ],
)
def test_a_step_is_the_same_behind_the_wire(step: Step) -> None:
    size = wire_size(rows=3, context=8)
    tensor = pack(step, size)
    assert tensor.shape == (size,)
    assert unpack(tensor) == step


def test_the_widest_batch_fits_where_the_context_is_short() -> None:
    step = Extend(batch=0, tokens=[1] * 16, positions=[2] * 16)
    assert unpack(pack(step, wire_size(rows=16, context=4))) == step
