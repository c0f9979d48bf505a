"""fp32 matrix products by oneDNN, on processors where torch's own choice, MKL, is slow.

MKL takes an AVX2 path on AMD. On one core of a Zen 5 (AVX-512) it makes 100 GFLOP/s where oneDNN, which torch also
ships and itself only gives bf16 and fp16 to, makes 225 in plain fp32. Two thirds of a small model's step are such
products.
"""

from __future__ import annotations

import functools
import platform
import warnings
from pathlib import Path

import torch
from torch import Tensor

PRODUCTS = ("mm", "mm.out", "addmm", "addmm.out")  # .out: what torch.compile's graphs call
PRODUCT = torch.ops.mkldnn._linear_pointwise.default  # (a, w, bias, …) -> a @ w.t() + bias, a and w of any strides


@functools.cache
def prefer_onednn() -> bool:
    """Give fp32 `mm` and `addmm` on the CPU to oneDNN, in eager mode and in compiled graphs, if this CPU gains by it.

    The processor decides, no timing: a resumed run must use the same kernels. Returns whether it does.
    """
    if not _mkl_is_slow():
        return False
    usual = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in PRODUCTS}
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return PRODUCT(a, b.t(), None if bias is None else bias.contiguous(), "none", [], "")

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return product(a, b) if _fits(a, b) else usual["mm"].call_boxed(keys, a, b)

    def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        fits = _fits(a, b) and out.shape == (a.shape[0], b.shape[1])
        return _into(product(a, b), out) if fits else usual["mm.out"].call_boxed(keys, a, b, out=out)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if _fits(a, b) and _is_bias(bias, b) and beta == alpha == 1:
            return product(a, b, bias)
        return usual["addmm"].call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)

    def addmm_out(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor) -> Tensor:
        fits = _fits(a, b) and out.shape == (a.shape[0], b.shape[1])
        if fits and _is_bias(bias, b) and beta == alpha == 1:
            return _into(product(a, b, bias), out)
        return usual["addmm.out"].call_boxed(keys, bias, a, b, beta=beta, alpha=alpha, out=out)

    with warnings.catch_warnings(action="ignore"):  # torch warns that these have kernels already
        for name, kernel in zip(PRODUCTS, (mm, mm_out, addmm, addmm_out), strict=True):
            _LIBRARY.impl(name, kernel, "CPU", allow_override=True)
    return True


def products_take_new_memory(a: Tensor) -> bool:
    """Whether `out` of `mm` saves no memory for operands like `a`: oneDNN's product has none."""
    return a.device.type == "cpu" and a.dtype is torch.float32 and prefer_onednn()


_LIBRARY = torch.library.Library("aten", "IMPL")  # what is registered lives as long as this does


def _into(result: Tensor, out: Tensor) -> Tensor:
    """`out` as the result, without a copy where nothing else uses its memory, as in compiled graphs.

    oneDNN's product has no `out`; the copies would be a tenth of a small model's step.
    """
    owners = torch._C._storage_Use_Count(out.untyped_storage()._cdata) - 1  # the call itself is one
    if owners == 1 and out.stride() == result.stride():
        return out.set_(result)  # type: ignore[call-overload]  # torch's stubs lack it
    return out.copy_(result)


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN may compute a @ b; if not, the usual kernel does, or says what is wrong with it."""
    return a.dtype is b.dtype is torch.float32 and a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] > 0


def _is_bias(bias: Tensor, b: Tensor) -> bool:
    return bias.dim() == 1 and bias.dtype is torch.float32 and bias.shape[0] == b.shape[1]


def _mkl_is_slow() -> bool:
    """AVX-512 on an x86 processor that Intel did not make."""
    if platform.machine() not in {"x86_64", "AMD64"} or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return torch.backends.mkldnn.is_available() and cpuinfo.exists() and "GenuineIntel" not in cpuinfo.read_text()
