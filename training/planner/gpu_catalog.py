"""Known GPUs: datasheet peaks, and the share of them that large matrix products were measured to reach.

Peaks are dense (without the factor 2 of structured sparsity) and accumulate in fp32, as torch does. Two uses: a
measured device is compared with its like, and a hypothetical one gets its rates from here (hypothetical_hosts.py).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from training.records.inventory import Device, Inventory

SLOW = 0.9  # a device below this share of the rate of others of its kind is reported as slow
COPY_SHARE = 0.88  # of the memory bandwidth: a copy of 1727 of 1935 GB/s (github.com/mli/transformers-benchmarks #4)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")

# Peaks in TFLOP/s, then the shares of them that torch.mm reaches (fp8: one share for all, below). GiB as torch reports
# them, some percent below the number in the name. PCIe (16 lanes) and NVLink in GB/s, both directions together; `b`:
# by a bridge between two cards, if one was bought. `-`: has not.
TABLE = """
name            cc     GiB GB/s  fp32  tf32 bf16 fp16  fp8 shares of fp32…fp16 PCIe NVLink peaks  shares
A100-40GB-SXM   8.0   39.4 1555  19.5   156  312  312    - 0.98 0.80 0.85 0.83    64    600 A100   T+M87
A100-80GB-SXM   8.0   79.2 2039  19.5   156  312  312    - 0.98 0.80 0.85 0.83    64    600 A100   T+M87
A100-40GB-PCIe  8.0   39.4 1555  19.5   156  312  312    - 0.80 0.63 0.69 0.63    64   600b A100   T108
A100-80GB-PCIe  8.0   79.2 1935  19.5   156  312  312    - 0.80 0.63 0.69 0.63    64   600b A100   =A100-40GB-PCIe
A30             8.0   23.6  933  10.3    82  165  165    - 0.80 0.63 0.69 0.63    64   200b A30    =A100-40GB-PCIe
H100-80GB-SXM   9.0   79.1 3350  67.0   495  989  989 1979 0.77 0.75 0.80 0.74   128    900 H100   T79+M80
H100-80GB-PCIe  9.0   79.1 2000  51.0   378  756  756 1513 0.71 0.63 0.65 0.58   128   600b H100P  T95
H100-94GB-NVL   9.0   93.1 3900  60.0   418  836  836 1671 0.71 0.63 0.65 0.58   128   600b H100   =H100-80GB-PCIe
H200-141GB-SXM  9.0  139.8 4800  67.0   495  989  989 1979 0.77 0.75 0.80 0.74   128    900 H200   =H100-80GB-SXM
H200-141GB-NVL  9.0  139.8 4800  60.0   418  836  836 1671 0.71 0.63 0.65 0.58   128   900b H200   =H100-80GB-PCIe
H20-96GB-SXM    9.0   95.1 4000  44.0    74  148  148  296 0.73 0.96 0.96 0.96   128    900 H20    T
GH200-96GB      9.0   94.5 4000  67.0   495  989  989 1979 0.77 0.77 0.83 0.77   128    900 GH200  M
B200-180GB-SXM  10.0 178.3 7700  75.0  1125 2250 2250 4500 0.88 0.75 0.75 0.72   128   1800 B200   T+M78
B300-288GB-SXM  10.3 268.0 8000  75.0  1125 2250 2250 4500 0.88 0.88 0.88 0.85   128   1800 B300   =GB300-288GB
GB200-186GB     10.0 184.3 8000  80.0  1250 2500 2500 5000 0.88 0.75 0.75 0.72    64   1800 GB200  =B200-180GB-SXM
GB300-288GB     10.3 276.0 8000  80.0  1250 2500 2500 5000 0.88 0.88 0.88 0.85    64   1800 GB300  F
V100-16GB-SXM   7.0   15.7  900  15.7     -    -  125    - 0.88    -    - 0.78    32    300 V100   T140
V100-32GB-SXM   7.0   31.7  900  15.7     -    -  125    - 0.88    -    - 0.78    32    300 V100   =V100-16GB-SXM
V100-16GB-PCIe  7.0   15.7  900  14.0     -    -  112    - 0.83    -    - 0.68    32      - V100   =V100S-32GB-PCIe
V100-32GB-PCIe  7.0   31.7  900  14.0     -    -  112    - 0.83    -    - 0.68    32      - V100   =V100S-32GB-PCIe
V100S-32GB-PCIe 7.0   31.7 1134  16.4     -    -  130    - 0.83    -    - 0.68    32      - V100   T
P100-16GB-SXM   6.0   15.9  732  10.6     -    - 21.2    - 0.85    -    - 0.34    32    160 P100   T180
T4              7.5   14.5  320   8.1     -    -   65    - 0.51    -    - 0.64    32      - T4     T
A10             8.6   22.0  600  31.2  62.5  125  125    - 0.62 0.79 0.74 0.72    64      - A10    =A40
A10G            8.6   22.0  600  35.0  35.0   70   70    - 0.67 0.97 0.95 0.94    64      - A10G   T126
A40             8.6   44.4  696  37.4  74.8  150  150    - 0.62 0.79 0.74 0.72    64 112.5b A40    T185
L4              8.9   22.0  300  30.3  60.0  121  121  242 0.41 0.42 0.49 0.44    64      - L4     T120
L20             8.9   44.4  864  59.8  59.8  120  120  239 0.61 0.93 0.95 0.91    64      - L20    T107
L40             8.9   44.4  864  90.5  90.5  181  181  362 0.61 0.93 0.95 0.91    64      - L40    =L20
L40S            8.9   44.4  864  91.6   183  362  362  733 0.51 0.73 0.74 0.73    64      - L40S   T43
RTX-A5000       8.6   23.6  768  27.8  55.6  111  111    - 0.62 0.78 0.79 0.77    64 112.5b A5000  =RTX-A6000
RTX-A6000       8.6   47.4  768  38.7  77.4  155  155    - 0.62 0.78 0.79 0.77    64 112.5b A6000  T46
RTX-6000-Ada    8.9   47.4  960  91.1   182  364  364  728 0.51 0.73 0.74 0.73    64      - Ada    =L40S
RTX-PRO-6000-Blackwell 12.0 94.9 1792 126 252 504 504 1008 0.61 0.81 0.81 0.62   128      - PRO6000 T
RTX-2080-Ti     7.5   10.7  616  13.4     -    - 53.8    - 0.91    -    - 0.97    32   100b TU102  T
RTX-3090        8.6   23.6  936  35.6  35.6   71   71    - 0.69 1.00 0.99 0.98    64 112.5b GA102  T
RTX-3090-Ti     8.6   23.6 1008  40.0  40.0   80   80    - 0.69 1.00 0.99 0.98    64 112.5b GA102  =RTX-3090
RTX-4090        8.9   23.6 1008  82.6  82.6  165  165  330 0.64 1.00 0.97 0.94    64      - Ada    T78
RTX-5090        12.0  31.3 1792   105   105  209  209  419 0.62 1.00 1.10 1.05   128      - GB202  T15
"""
SHEETS = {
    "H100P": "NVIDIA H100 PCIe GPU product brief",
    "B200": "NVIDIA DGX B200 datasheet, an eighth of it",
    "P100": "NVIDIA Tesla P100 datasheet",
    "A10G": "NVIDIA A10G datasheet (AWS EC2 G5)",
    "A5000": "NVIDIA RTX A5000 datasheet",
    "A6000": "NVIDIA RTX A6000 datasheet",
    "Ada": "NVIDIA Ada GPU Architecture whitepaper, appendix A",
    "GA102": "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A",
    "B300": "NVIDIA HGX B300 datasheet, an eighth of it",
    "GB200": "NVIDIA GB200 NVL72 datasheet, a 72nd of it",
    "GB300": "NVIDIA GB300 NVL72 datasheet, a 72nd of it",
    "PRO6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet",
    "TU102": "NVIDIA Turing GPU Architecture whitepaper, appendix A",
    "GB202": "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A",
}
# T: torch.mm of 8192 x 8192 (fp32: 4096), github.com/zzc0721/torch-performance-test-data: its database.md, or the issue
# of that number. M: with bf16's percentage for the best shape of all, github.com/stas00/ml-engineering,
# compute/accelerator/README.md, "Maximum Achievable Matmul FLOPS comparison table"; from there also fp8 on an H100 SXM.
# =: no figure of its own found; that card's, which has the same chip or power per chip, is assumed. RTX-2080-Ti: the
# RTX 2080's shares. RTX-PRO-6000: the Server Edition's rates of the Workstation Edition's peaks. Where a GPU's tf32 was
# not measured it is bf16's share; of GH200 (M: 821 TFLOP/s in bf16) the others are an H100's, as much higher.
# F: no measurement of its products found; 1.17 times a GB200's, as Megatron-Bridge's six runs on it are as much faster
# (benchmarks/support/published.py): its power is 1,400 W for 1,200.
FP8_SHARE, FP8_SHARES = 0.71, {"B300-288GB-SXM": 0.83, "GB300-288GB": 0.83}  # 1403 of 1979 on H100; others assumed
ALSO = {  # what drivers call them, where the words differ
    "H100-80GB-SXM": ("H100 80GB HBM3",),
    "H100-80GB-PCIe": ("H100 PCIe",),
    "H100-94GB-NVL": ("H100 NVL",),
    "H200-141GB-SXM": ("H200", "H200 SXM"),
    "H200-141GB-NVL": ("H200 NVL",),
    "B200-180GB-SXM": ("B200", "B200 SXM"),
    "H20-96GB-SXM": ("H20",),
    "GH200-96GB": ("GH200 480GB", "GH200"),  # the driver's number is that of the CPU's memory
    "GB200-186GB": ("GB200",),
    "GB300-288GB": ("GB300",),
    "B300-288GB-SXM": ("B300", "B300 SXM", "B300 SXM6 AC"),
    "RTX-PRO-6000-Blackwell": ("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition"),
    "P100-16GB-SXM": ("P100 SXM",),
}
NOISE = {"nvidia", "tesla", "geforce", "generation"}  # words of drivers' names that tell no GPU from another


@dataclass(frozen=True)
class KnownGpu:
    """A row of TABLE. Links in GB/s, both directions together; 0: has not."""

    name: str
    compute_capability: str
    memory_gib: float
    memory_gb_per_s: float
    peak_tflops: Mapping[str, float]
    shares: Mapping[str, float]
    pcie_gb_per_s: float
    nvlink_gb_per_s: float
    is_bridged: bool
    source: str
    measured_as: str  # the GPU whose shares these are

    @property
    def attainable_tflops(self) -> dict[str, float]:
        """Return the rate that torch.mm of a large square reaches, by precision."""
        return {precision: peak * self.shares[precision] for precision, peak in self.peak_tflops.items()}


@functools.cache
def known_gpus() -> dict[str, KnownGpu]:
    """TABLE's rows by name."""
    return {gpu.name: gpu for gpu in map(_row, TABLE.strip().splitlines()[1:])}


def _row(line: str) -> KnownGpu:
    name, capability, gib, gb_per_s, *rest = line.split()
    *rates, pcie, nvlink, sheet, shares = rest
    numbers = [0.0 if word == "-" else float(word) for word in rates]
    bridged = nvlink.endswith("b")
    return KnownGpu(
        name=name,
        compute_capability=capability,
        memory_gib=float(gib),
        memory_gb_per_s=float(gb_per_s),
        peak_tflops={precision: peak for precision, peak in zip(PRECISIONS, numbers[:5], strict=True) if peak},
        shares=dict(zip(PRECISIONS, (*numbers[5:], FP8_SHARES.get(name, FP8_SHARE)), strict=True)),
        pcie_gb_per_s=float(pcie),
        nvlink_gb_per_s=0.0 if nvlink == "-" else float(nvlink.removesuffix("b")),
        is_bridged=bridged,
        source=SHEETS.get(sheet, f"NVIDIA {sheet} datasheet"),
        measured_as=shares[1:] if shares.startswith("=") else name,
    )


# Names


@functools.cache
def find_gpu(name: str) -> KnownGpu | None:
    """The GPU that NVML, torch or a user calls `name`.

    All words count: a laptop's GPU, a slice of one (MIG) or a cut-down edition is not the one it is named after.
    """
    wanted = _words(name)
    for gpu in known_gpus().values():
        if wanted in (_words(gpu.name), *map(_words, ALSO.get(gpu.name, ()))):
            return gpu
    return None


def mean_datasheet_tflops(devices: Sequence[tuple[str, str]]) -> float | None:
    """The mean dense peak of GPUs, each a name and a precision: what MFU is a share of.

    None if one of them is not in TABLE, or has no such peak. In fp32 that of tf32, where a GPU has it, as in training.
    """
    peaks = [_datasheet_tflops(name, precision) for name, precision in devices]
    return fmean(peaks) if all(peaks) else None


def _datasheet_tflops(name: str, precision: str) -> float:
    gpu = find_gpu(name)
    peaks = gpu.peak_tflops if gpu is not None else {}
    return peaks.get("tf32" if precision == "fp32" and "tf32" in peaks else precision, 0.0)


def nearest_names(name: str) -> list[str]:
    """The known names that contain all words of `name`, else those spelled most like it."""
    having = [known for known in known_gpus() if _words(name) and _words(name) <= _words(known)]
    spelt = {known.lower(): known for known in known_gpus()}
    return having or [spelt[near] for near in difflib.get_close_matches(name.lower(), spelt, n=3, cutoff=0.3)]


def _words(name: str) -> frozenset[str]:
    """`NVIDIA A100-SXM4-80GB` -> a100, sxm, 80gb."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return frozenset(re.sub(r"^sxm\d$", "sxm", word) for word in words if word and word not in NOISE)


# Slow devices


def slow_devices(inventory: Inventory) -> dict[tuple[str, int], str]:
    """(host, local rank) -> a sentence that says why its GPU is slow: more than 10% below others of its kind.

    Each is compared with the fastest of its name in the inventory, measured by the same program and driver, and with
    what others measured on such a GPU.
    """
    gpus = {id(device): device for host in inventory.hosts for device in host.devices if device.kind == "cuda"}
    best: dict[tuple[str, str], float] = {}  # by name and rate
    for device in gpus.values():
        for what, rate in _rates(device).items():
            best[device.name, what] = max(rate, best.get((device.name, what), 0.0))
    slow: dict[int, str] = {}
    for key, device in gpus.items():
        share, words = min((*_against(device, best), *_against_known(device)), default=(1.0, ""))
        if share < SLOW:
            slow[key] = words.format(percent=100 * (1 - share))
    return {
        (host.name, i): f"GPU {i} ({device.name}) is slow: {slow[id(device)]}; look at its temperature, power limit "
        "and other users (nvidia-smi -q -d PERFORMANCE)"
        for host in inventory.hosts
        for i, device in enumerate(host.devices if slow else ())
        if id(device) in slow
    }


def _against(device: Device, best: Mapping[tuple[str, str], float]) -> Iterator[tuple[float, str]]:
    """Shares of the best rates of GPUs of its name, and sentences that leave the percentage open."""
    for what, rate in _rates(device).items():
        others = best[device.name, what]
        yield rate / others, f"{rate:.0f} {what}, {{percent:.0f}}% below another of its kind, {others:.0f}"


def _against_known(device: Device) -> Iterator[tuple[float, str]]:
    known = find_gpu(device.name)
    if known is None:
        return
    usual = {f"TFLOP/s in {precision}": rate for precision, rate in known.attainable_tflops.items()}
    usual["GB/s of memory"] = COPY_SHARE * known.memory_gb_per_s
    for what, rate in _rates(device).items():
        if best := usual.get(what):
            yield (
                rate / best,
                f"{rate:.0f} {what}, {{percent:.0f}}% below the usual {best:.0f} (as measured on {known.measured_as})",
            )


def _rates(device: Device) -> dict[str, float]:
    rates = {f"TFLOP/s in {precision}": rate for precision, rate in device.matmul_tflops.items() if rate}
    return rates | ({"GB/s of memory": device.memory_gb_per_s} if device.memory_gb_per_s else {})
