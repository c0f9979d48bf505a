"""Products by oneDNN are the usual ones: values, gradients, errors, in eager mode and compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from training.runtime.onednn import prefer_onednn

SHAPES = [(50, 40, 30), (1, 1, 1), (0, 4, 3), (4, 0, 3), (4, 3, 0), (768, 128, 384)]


@pytest.fixture(scope="module", autouse=True)
def by_onednn() -> Iterator[None]:
    if not prefer_onednn():
        pytest.skip("MKL is not slow on this processor")
    return


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.shape == expected.shape and torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_values_and_gradients(rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    a = torch.randn(inner, rows).t().requires_grad_()  # any strides
    b, bias = torch.randn(inner, columns, requires_grad=True), torch.randn(columns, requires_grad=True)
    result = torch.addmm(bias, a, b) + a @ b
    assert near(result, bias.double() + 2 * (a.double() @ b.double()))
    result.sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert near(a.grad, 2 * b.double().sum(1).expand(rows, inner))
    assert near(b.grad, 2 * a.double().sum(0)[:, None].expand(inner, columns))


def test_other_dtypes_and_shapes_use_the_usual_kernel() -> None:
    a, b, c = torch.randn(5, 4), torch.randn(4, 3), torch.randn(5, 3)
    assert (a.double() @ b.double()).dtype is torch.float64
    assert (a.bfloat16() @ b.bfloat16()).dtype is torch.bfloat16
    assert near(torch.addmm(c, a, b, beta=0.5, alpha=2), 0.5 * c.double() + 2 * a.double() @ b.double())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        a @ torch.randn(5, 3)


def test_compiled_graphs_use_onednn_too() -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 16)
    assert near(torch.compile(lambda x, y: (x @ y).relu())(a, b), (a.double() @ b.double()).relu())


def test_shared_output_memory_is_written_not_replaced() -> None:
    a, b = torch.randn(8, 4), torch.randn(4, 6)
    whole = torch.zeros(2, 8, 6)
    torch.mm(a, b, out=whole[1])
    assert near(whole[1], a.double() @ b.double())
    assert not whole[0].any()
    alone, transposed = torch.empty(8, 6), torch.empty(6, 8).t()
    for out in (alone, transposed):
        strides = out.stride()
        assert torch.mm(a, b, out=out) is out
        assert near(out, a.double() @ b.double())
        assert out.stride() == strides
