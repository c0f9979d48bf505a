"""Published measurements of training runs, with sources; planner_vs_published.py compares its predictions with them.

Read from the sources below; nothing here was measured by us. `rate`: TFLOP/s a GPU as the source counts them, tokens/s
a GPU, or seconds a step; `GiB`: the largest peak of any GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = {
    "N1": "Narayanan et al. 2021, arXiv:2104.04473, Table 1; micro-batches and stages from "
    "github.com/NVIDIA/Megatron-LM at 79a3bb6, examples/sc21/run_table_1.sh",
    "N2": "Narayanan et al. 2021, arXiv:2104.04473, Table 2 (530B by PTD-P: 3 stages a rank assumed, as in Table 1)",
    "K5": "Korthikanti et al. 2022, arXiv:2205.05198, Table 5; configurations from its Table 3",
    "TT": "github.com/pytorch/torchtitan at 31a17bf, benchmarks/llama3_h100_202412_torchtitan.md, Tables 1 to 5; Table "
    "2 without context parallelism; Table 5's micro-batches are torchtitan's default, as many as pipeline stages",
    "TA": "github.com/pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, vanilla TP in bf16",
    "TP": "github.com/pytorch/torchtitan at 0413364, docs/performance.md",
    "AO": "github.com/pytorch/ao at 9519beb, torchao/float8/README.md, Training benchmarks",
    "MH": "github.com/mosaicml/llm-foundry at 061f2c7, scripts/train/benchmarking/README.md, H100 80GB BF16",
    "MA": "github.com/mosaicml/llm-foundry at 061f2c7, scripts/train/benchmarking/README.md, A100 80GB",
    "IB": "github.com/foundation-model-stack/fms-fsdp at 0d31998, README.md",
    "ML": "github.com/mosaicml/llm-foundry at c90b9b3, scripts/train/benchmarking/README.md, H100 80GB BF16 (Large "
    "Scale)",
    "M8": "github.com/mosaicml/llm-foundry at 061f2c7, scripts/train/benchmarking/README.md, H100 80GB FP8",
    "M4": "github.com/mosaicml/llm-foundry at 061f2c7, scripts/train/benchmarking/README.md, A100 40GB",
    "TL": "github.com/jzhang38/TinyLlama at 026587c, README.md; micro-batch from pretrain/tinyllama.py at 01c9c77",
    "TH": "github.com/pytorch/torchtitan at 1af2937, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "AB": "github.com/pytorch/ao, docs, Training e2e benchmarks on NVIDIA B200 (their power was limited)",
    "D1": "github.com/NVIDIA/dgxc-benchmarking at 0b71cfd, nemo_megatron/README_175b.md",
    "D2": "github.com/NVIDIA/dgxc-benchmarking at 35a9aec, nemo_megatron/README_175b.md: as D1, measured again",
    "D3": "github.com/NVIDIA/dgxc-benchmarking at 0b71cfd, nemotron/README_15b.md",
    "D4": "github.com/NVIDIA/dgxc-benchmarking at 143b90d, nemotron/README_340b.md (no recomputation assumed)",
    "D5": "github.com/NVIDIA/dgxc-benchmarking at 1f6d9f4, nemotron/README.md, H100",
    "DG": "github.com/NVIDIA/dgxc-benchmarking at 1f6d9f4, nemotron/README.md, GB200",
    "DM": "github.com/NVIDIA/dgxc-benchmarking at 143b90d, maxtext/README_70b.md",
    "NE": "github.com/NVIDIA/NeMo at 070a0bb, docs/source/performance/performance_summary.md (24.07; no recomputation "
    "assumed)",
    "NL": "github.com/NVIDIA/NeMo, docs/source/performance/performance_summary.md, Long Input Sequences (24.03.01)",
    "B0": "github.com/NVIDIA-NeMo/Megatron-Bridge at df0289c, docs/performance-summary.md, 25.09 (no recomputation "
    "assumed)",
    "B1": "… 25.11",
    "B2": "… 26.02",
    "PAI": "Alibaba Cloud PAI, Benchmarks of training performance (Dec 22, 2023), "
    "alibabacloud.com/help/en/pai/user-guide/benchmarks-of-training-performance",
}

# name: layers, width, heads, key/value heads, MLP width, words, matrices in the MLP (3: gated), tied
MODELS = """
gpt-1.7b     24   2304  24  24   9216  51200 2 tied
gpt-3.6b     30   3072  32  32  12288  51200 2 tied
gpt-7.5b     36   4096  32  32  16384  51200 2 tied
gpt-18b      40   6144  48  48  24576  51200 2 tied
gpt-22b      48   6144  64  64  24576  51200 2 tied
gpt-39b      48   8192  64  64  32768  51200 2 tied
gpt-76b      60  10240  80  80  40960  51200 2 tied
gpt-145b     80  12288  96  96  49152  51200 2 tied
gpt-175b     96  12288  96  96  49152  51200 2 tied
gpt-310b     96  16384 128 128  65536  51200 2 tied
gpt-530b    105  20480 128 128  81920  51200 2 tied
gpt-1t      128  25600 160 160 102400  51200 2 tied
gpt-1.3b     24   2048  32  32   8192  50304 2 tied
llama3-8b    32   4096  32   8  14336 128256 3 -
llama3-70b   80   8192  64   8  28672 128256 3 -
llama3-405b 126  16384 128   8  53248 128256 3 -
llama2-7b    32   4096  32  32  11008  32000 3 -
llama2-13b   40   5120  40  40  13824  32000 3 -
llama2-34b   48   8192  64   8  22016  32000 3 -
llama2-70b   80   8192  64   8  28672  32000 3 -
mpt-125m          12    768  12  12   3072  50368 2 tied
mpt-350m          24   1024  16  16   4096  50368 2 tied
tinyllama-1.1b    22   2048  32   4   5632  32000 3 -
gpt3-5b           24   4096  32  32  16384  51200 2 tied
gpt3-20b          44   6144  48  48  24576  51200 2 tied
nemotron-8b       32   4096  32  32  16384 256000 2 -
nemotron-15b      32   6144  48   8  24576 256000 2 -
nemotron-22b      40   6144  48  48  24576 256000 2 -
nemotron-340b     96  18432  96   8  73728 256000 2 -
mpt-760m     24   1536  12  12   6144  50368 2 tied
mpt-1b       24   2048  16  16   8192  50368 2 tied
mpt-3b       32   2560  20  20  10240  50368 2 tied
mpt-7b       32   4096  32  32  16384  50368 2 tied
mpt-13b      40   5120  40  40  20480  50368 2 tied
mpt-30b      48   7168  56  56  28672  50368 2 tied
mpt-70b      80   8192  64  64  32768  50368 2 tied
"""

# source, model, context, machines, GPUs, strategy, tp, pp, stages a rank, micro-batch, global batch, recomputation,
# program (planner_vs_published.py), rate and its unit, GiB (-: not reported). *: an efficiency was fitted to this row.
# b: blind; these rows were added after all fits, and nothing was changed for them except the shares of H100N and B200L,
# which were fitted to one of their rows each. Tables are complete except for what a row cannot express: GPUs that are
# not in gpu_catalog.py, context parallelism, NVFP4, Paxml's unnamed groups, and PAI's rates, since it does not say how
# its GPUs are joined. SHARD_GRAD_OP is zero2.
ROWS = """
N1  gpt-1.7b    2048 A100   32  ddp  1  1 1 16  512 full      megatron21  137 TF    -    *
N1  gpt-3.6b    2048 A100   64  ddp  2  1 1 16  512 full      megatron21  138 TF    -
N1  gpt-7.5b    2048 A100  128  ddp  4  1 1 16  512 full      megatron21  142 TF    -
N1  gpt-18b     2048 A100  256  ddp  8  1 1  8 1024 full      megatron21  135 TF    -
N1  gpt-39b     2048 A100  512  ddp  8  2 1  4 1536 full      megatron21l 138 TF    -
N1  gpt-76b     2048 A100 1024  ddp  8  4 3  2 1792 full      megatron21l 140 TF    -
N1  gpt-145b    2048 A100 1536  ddp  8  8 2  2 2304 full      megatron21l 148 TF    -    *
N1  gpt-310b    2048 A100 1920  ddp  8 16 2  1 2160 full      megatron21l 155 TF    -
N1  gpt-530b    2048 A100 2520  ddp  8 35 3  1 2520 full      megatron21l 163 TF    -
N1  gpt-1t      2048 A100 3072  ddp  8 64 1  1 3072 full      megatron21l 163 TF    -
N2  gpt-175b    2048 A100  384 zero3 1  1 1  4 1536 full      zero3       144 TF    -    *
N2  gpt-175b    2048 A100  768 zero3 1  1 1  2 1536 full      zero3        88 TF    -
N2  gpt-175b    2048 A100 1536 zero3 1  1 1  1 1536 full      zero3        44 TF    -
N2  gpt-530b    2048 A100  640 zero3 1  1 1  4 2560 full      zero3       138 TF    -
N2  gpt-530b    2048 A100 1120 zero3 1  1 1  2 2240 full      zero3        98 TF    -
N2  gpt-530b    2048 A100 2240 zero3 1  1 1  1 2240 full      zero3        48 TF    -
N2  gpt-175b    2048 A100  384  ddp  8 12 1  1 1536 full      megatron21l 153 TF    -
N2  gpt-175b    2048 A100  768  ddp  8 12 1  1 1536 full      megatron21l 149 TF    -
N2  gpt-175b    2048 A100 1536  ddp  8 12 1  1 1536 full      megatron21l 141 TF    -
N2  gpt-530b    2048 A100  560  ddp  8 35 3  1 2240 full      megatron21l 171 TF    -
N2  gpt-530b    2048 A100 1120  ddp  8 35 3  1 2240 full      megatron21l 167 TF    -
N2  gpt-530b    2048 A100 2240  ddp  8 35 3  1 2240 full      megatron21l 159 TF    -
K5  gpt-22b     2048 A100    8  ddp  8  1 1  4    4 full      megatron22  1.42 s    -
K5  gpt-175b    2048 A100   64  ddp  8  8 3  1   64 full      megatron22 18.13 s    -
K5  gpt-530b    2048 A100  280  ddp  8 35 3  1  280 full      megatron22 49.05 s    -
K5  gpt-1t      2048 A100  512  ddp  8 64 1  1  512 full      megatron22 94.42 s    -
K5  gpt-22b     2048 A100    8  ddp  8  1 1  4    4 selective megatron22s 1.10 s    -
K5  gpt-175b    2048 A100   64  ddp  8  8 3  1   64 selective megatron22s 13.75 s   -
K5  gpt-530b    2048 A100  280  ddp  8 35 3  1  280 selective megatron22s 37.83 s   -
K5  gpt-1t      2048 A100  512  ddp  8 64 1  1  512 selective megatron22s 71.49 s   -
TT  llama3-8b   8192 H100T   8 fsdp  1  1 1  2   16 selective titan     5762 tok/s 82.4  *
TT  llama3-8b   8192 H100T   8 fsdp  1  1 1  2   16 selective titanc    6667 tok/s 77.0  *
TT  llama3-8b   8192 H100T 128 fsdp  1  1 1  2  256 selective titan     5605 tok/s 67.0
TT  llama3-8b   8192 H100T 128 fsdp  1  1 1  2  256 selective titanc    6514 tok/s 62.0
TT  llama3-8b   8192 H100T   8 fsdp  1  1 1  2   16 selective titan8    8532 tok/s 76.8  *
TT  llama3-8b   8192 H100T 128 fsdp  1  1 1  2  256 selective titan8    8380 tok/s 61.8
TT  llama3-8b  32768 H100T   8 fsdp  1  1 1  1    8 full      titan8    3890 tok/s 83.9
TT  llama3-70b  8192 H100T 256 fsdp  8  1 1 16  512 full      titan8     829 tok/s 71.9
TT  llama3-405b 8192 H100T 512 fsdp  8  8 1  4  256 full      titan8     100 tok/s 82.5
TT  llama3-405b 8192 H100T 512 fsdp  8  8 2  4  256 full      titan8     128 tok/s 72.7
TA  llama3-70b  8192 H100T 256 fsdp  8  1 1 16  512 full      titanc   597.3 tok/s -
TA  llama3-8b   8192 H100T  64 fsdp  8  1 1 12   96 selective titanc    4378 tok/s -
AO  llama3-8b   8192 H100T   8 fsdp  1  1 1  1    8 selective titanc    6150 tok/s 47.65
TP  llama3-8b   8192 A100S  64 fsdp  1  1 1  1   64 selective titanc    2973 tok/s -
TP  llama3-70b  8192 A100S  64 fsdp  1  1 1  1   64 full      titanc     331 tok/s -
TP  llama2-13b  4096 A100S  64 fsdp  1  1 1  2  128 none      titanc    2162 tok/s -
TP  llama2-13b  4096 A100S  64 fsdp  1  1 1  2  128 selective titanc    1904 tok/s -
TP  llama2-70b  4096 A100S  64 fsdp  1  1 1  1   64 selective titanc     355 tok/s -
TP  llama2-70b  4096 A100S  64 fsdp  1  1 1  2  128 full      titanc     353 tok/s -
MA  mpt-760m    2048 A100M   8 fsdp  1  1 1 24  384 none      mpt      32434 tok/s -
MA  mpt-1b      2048 A100M   8 fsdp  1  1 1 14  448 none      mpt      20513 tok/s -
MA  mpt-3b      2048 A100M   8 fsdp  1  1 1 10  160 none      mpt      10811 tok/s - *
MA  mpt-3b     16384 A100M   8 fsdp  1  1 1  1   48 none      mpt       5529 tok/s - *
MA  mpt-7b      2048 A100M   8 fsdp  1  1 1  6   96 none      mpt       4641 tok/s -
MA  mpt-7b      8192 A100M   8 fsdp  1  1 1  8  128 full      mpt       3206 tok/s -
MA  mpt-7b     65536 A100M   8 fsdp  1  1 1  1   16 full      mpt       1013 tok/s -
MA  mpt-13b     2048 A100M   8 fsdp  1  1 1  2   48 none      mpt       2262 tok/s -
MA  mpt-13b     4096 A100M   8 fsdp  1  1 1 10  240 full      mpt       2060 tok/s -
MA  mpt-30b     2048 A100M   8 fsdp  1  1 1  3  504 full      mpt        916 tok/s -
MA  mpt-70b     2048 A100M  32 fsdp  1  1 1  2 1024 full      mpt16      373 tok/s -
MA  mpt-70b     2048 A100M  64 fsdp  1  1 1  8 2048 full      mpt16      410 tok/s -
MH  mpt-760m    2048 H100M   8 fsdp  1  1 1 24  384 none      mpth     63147 tok/s -
MH  mpt-1b      2048 H100M   8 fsdp  1  1 1 14  112 none      mpth     45455 tok/s -
MH  mpt-1b      2048 H100M  64 fsdp  1  1 1 20 1280 none      mpth     44402 tok/s -
MH  mpt-3b      2048 H100M  16 fsdp  1  1 1 10  480 none      mpth     24142 tok/s - *
MH  mpt-3b     16384 H100M   8 fsdp  1  1 1  1   48 none      mpth     11152 tok/s - *
MH  mpt-7b      2048 H100M   8 fsdp  1  1 1  6   48 none      mpth     10643 tok/s -
MH  mpt-7b      8192 H100M   8 fsdp  1  1 1  8  128 full      mpth      6935 tok/s -
MH  mpt-7b     65536 H100M   8 fsdp  1  1 1  1   16 full      mpth      1956 tok/s -
MH  mpt-13b     2048 H100M  64 fsdp  1  1 1  2  128 none      mpth      4800 tok/s - *
MH  mpt-13b     4096 H100M   8 fsdp  1  1 1 10  240 full      mpth      4717 tok/s -
MH  mpt-30b     2048 H100M   8 fsdp  1  1 1  3  504 full      mpth      2002 tok/s -
MH  mpt-30b     2048 H100M  32 fsdp  1  1 1 14 1344 full      mpth      2308 tok/s -
MH  mpt-70b     2048 H100M  32 fsdp  1  1 1  2 1024 full      mpth       882 tok/s -
MH  mpt-70b     2048 H100M  64 fsdp  1  1 1  8 2048 full      mpth      1039 tok/s -
MH  mpt-13b    16384 H100M   8 fsdp  1  1 1  3   72 full      mpth       2985 tok/s - b
MH  mpt-13b     1024 H100M   8 fsdp  1  1 1 40  960 full      mpth       5502 tok/s - b
MH  mpt-30b     8192 H100M   8 fsdp  1  1 1  1  168 full      mpth       1384 tok/s - b
MH  mpt-30b     4096 H100M   8 fsdp  1  1 1  1  168 full      mpth       1802 tok/s - b
MH  mpt-30b     1024 H100M   8 fsdp  1  1 1  6 1008 full      mpth       2084 tok/s - b
MH  mpt-7b     32768 H100M   8 fsdp  1  1 1  2   32 full      mpth       3318 tok/s - b
MH  mpt-7b      4096 H100M   8 fsdp  1  1 1 16  256 full      mpth       8611 tok/s - b
MH  mpt-7b      1024 H100M   8 fsdp  1  1 1 64 1024 full      mpth      10203 tok/s - b
MH  mpt-3b      8192 H100M   8 fsdp  1  1 1  3  144 none      mpth      16578 tok/s - b
MH  mpt-3b      4096 H100M   8 fsdp  1  1 1  5  240 none      mpth      20964 tok/s - b
MH  mpt-3b      1024 H100M   8 fsdp  1  1 1 20  960 none      mpth      27046 tok/s - b
MH  mpt-1b     16384 H100M   8 fsdp  1  1 1  2   64 none      mpth      19649 tok/s - b
MH  mpt-1b      8192 H100M   8 fsdp  1  1 1  3   96 none      mpth      29157 tok/s - b
MH  mpt-1b      4096 H100M   8 fsdp  1  1 1  7  224 none      mpth      38535 tok/s - b
MH  mpt-1b      1024 H100M   8 fsdp  1  1 1 18  576 none      mpth      48910 tok/s - b
MH  mpt-760m   16384 H100M   8 fsdp  1  1 1  3   48 none      mpth      27815 tok/s - b
MH  mpt-760m    8192 H100M   8 fsdp  1  1 1  6   96 none      mpth      41825 tok/s - b
MH  mpt-760m    4096 H100M   8 fsdp  1  1 1 12  192 none      mpth      55459 tok/s - b
MH  mpt-760m    1024 H100M   8 fsdp  1  1 1 48  768 none      mpth      78581 tok/s - b
MA  mpt-13b    16384 A100M   8 fsdp  1  1 1  3   72 full      mpt        1431 tok/s - b
MA  mpt-13b     8192 A100M   8 fsdp  1  1 1  5  120 full      mpt        1795 tok/s - b
MA  mpt-13b     1024 A100M   8 fsdp  1  1 1 40  960 full      mpt        2330 tok/s - b
MA  mpt-30b     8192 A100M   8 fsdp  1  1 1  1  168 full      mpt         574 tok/s - b
MA  mpt-30b     4096 A100M   8 fsdp  1  1 1  1  168 full      mpt         814 tok/s - b
MA  mpt-30b     1024 A100M   8 fsdp  1  1 1  6 1008 full      mpt         946 tok/s - b
MA  mpt-7b     32768 A100M   8 fsdp  1  1 1  2   32 full      mpt        1672 tok/s - b
MA  mpt-7b     16384 A100M   8 fsdp  1  1 1  4   64 full      mpt        2453 tok/s - b
MA  mpt-7b      4096 A100M   8 fsdp  1  1 1 16  256 full      mpt        3684 tok/s - b
MA  mpt-7b      1024 A100M   8 fsdp  1  1 1 64 1024 full      mpt        4357 tok/s - b
MA  mpt-3b      8192 A100M   8 fsdp  1  1 1  3  144 none      mpt        7695 tok/s - b
MA  mpt-3b      4096 A100M   8 fsdp  1  1 1  5  240 none      mpt        9457 tok/s - b
MA  mpt-3b      1024 A100M   8 fsdp  1  1 1 20  960 none      mpt       11580 tok/s - b
MA  mpt-1b     16384 A100M   8 fsdp  1  1 1  2   64 none      mpt        9956 tok/s - b
MA  mpt-1b      8192 A100M   8 fsdp  1  1 1  3   96 none      mpt       13814 tok/s - b
MA  mpt-1b      4096 A100M   8 fsdp  1  1 1  7  224 none      mpt       17807 tok/s - b
MA  mpt-1b      1024 A100M   8 fsdp  1  1 1 18  576 none      mpt       22112 tok/s - b
MA  mpt-760m   16384 A100M   8 fsdp  1  1 1  3   48 none      mpt       14274 tok/s - b
MA  mpt-760m    8192 A100M   8 fsdp  1  1 1  6   96 none      mpt       20933 tok/s - b
MA  mpt-760m    4096 A100M   8 fsdp  1  1 1 12  192 none      mpt       27351 tok/s - b
MA  mpt-760m    1024 A100M   8 fsdp  1  1 1 48  768 none      mpt       29765 tok/s - b
IB  llama2-7b   4096 A100I 128 hsdp  1  1 1  2  256 none      titanc    3760 tok/s -
IB  llama2-13b  4096 A100I 128 hsdp  1  1 1  1  128 none      titanc    1700 tok/s -
IB  llama2-34b  4096 A100I 128 fsdp  1  1 1  8 1024 full      titanc     772 tok/s -
IB  llama2-70b  4096 A100I 128 fsdp  1  1 1  6  768 full      titanc     380 tok/s -
MH  mpt-30b         2048 H100M     16 fsdp  1  1  1  10  480 full      mpth         2263 tok/s - b
MH  mpt-13b        32768 H100M      8 fsdp  1  1  1   1   24 full      mpth         1976 tok/s - b
MH  mpt-13b         2048 H100M     32 fsdp  1  1  1   2   64 none      mpth         4811 tok/s - b
MH  mpt-13b         2048 H100M     16 fsdp  1  1  1   2   32 none      mpth         4767 tok/s - b
MH  mpt-13b         2048 H100M      8 fsdp  1  1  1   2   16 none      mpth         4792 tok/s - b
MH  mpt-3b         65536 H100M      8 fsdp  1  1  1   1   16 full      mpth         3262 tok/s - b
MH  mpt-3b         32768 H100M      8 fsdp  1  1  1   3  144 full      mpth         5873 tok/s - b
MH  mpt-3b          2048 H100M     64 fsdp  1  1  1   6 1152 none      mpth        22525 tok/s - b
MH  mpt-3b          2048 H100M     32 fsdp  1  1  1   6  576 none      mpth        23021 tok/s - b
MH  mpt-3b           512 H100M      8 fsdp  1  1  1  40 1920 none      mpth        27965 tok/s - b
MH  mpt-1b         65536 H100M      8 fsdp  1  1  1   1   16 full      mpth         5506 tok/s - b
MH  mpt-1b         32768 H100M      8 fsdp  1  1  1   1   32 none      mpth        12025 tok/s - b
MH  mpt-1b          2048 H100M     32 fsdp  1  1  1  20  640 none      mpth        45130 tok/s - b
MH  mpt-1b          2048 H100M     16 fsdp  1  1  1  20  320 none      mpth        46037 tok/s - b
MH  mpt-1b           512 H100M      8 fsdp  1  1  1  56 1792 none      mpth        52275 tok/s - b
MH  mpt-760m       32768 H100M      8 fsdp  1  1  1   1   16 none      mpth        16291 tok/s - b
MH  mpt-760m        2048 H100M     32 fsdp  1  1  1  24  768 none      mpth        67971 tok/s - b
MH  mpt-760m        2048 H100M     16 fsdp  1  1  1  24  384 none      mpth        68551 tok/s - b
MH  mpt-760m         512 H100M      8 fsdp  1  1  1  96 1536 none      mpth        83749 tok/s - b
MA  mpt-30b          512 A100M      8 fsdp  1  1  1  12 2016 full      mpt           967 tok/s - b
MA  mpt-13b        32768 A100M      8 fsdp  1  1  1   1   24 full      mpt          1016 tok/s - b
MA  mpt-3b         65536 A100M      8 fsdp  1  1  1   1   16 full      mpt          1767 tok/s - b
MA  mpt-3b         32768 A100M      8 fsdp  1  1  1   3  144 full      mpt          3029 tok/s - b
MA  mpt-3b           512 A100M      8 fsdp  1  1  1  40 1920 none      mpt         12127 tok/s - b
MA  mpt-1b         65536 A100M      8 fsdp  1  1  1   1   16 full      mpt          3044 tok/s - b
MA  mpt-1b         32768 A100M      8 fsdp  1  1  1   1   32 none      mpt          6275 tok/s - b
MA  mpt-1b           512 A100M      8 fsdp  1  1  1  56 1792 none      mpt         23148 tok/s - b
MA  mpt-760m       65536 A100M      8 fsdp  1  1  1   1   16 full      mpt          4143 tok/s - b
MA  mpt-760m       32768 A100M      8 fsdp  1  1  1   1   16 none      mpt          8802 tok/s - b
MA  mpt-760m         512 A100M      8 fsdp  1  1  1  96 1536 none      mpt         29446 tok/s - b
MA  mpt-350m       65536 A100M      8 fsdp  1  1  1   1   16 none      mpt          7524 tok/s - b
MA  mpt-350m       32768 A100M      8 fsdp  1  1  1   2   32 none      mpt         13652 tok/s - b
MA  mpt-350m       16384 A100M      8 fsdp  1  1  1   4   64 none      mpt         23559 tok/s - b
MA  mpt-350m        8192 A100M      8 fsdp  1  1  1   8  128 none      mpt         36569 tok/s - b
MA  mpt-350m        4096 A100M      8 fsdp  1  1  1  16  256 none      mpt         49555 tok/s - b
MA  mpt-350m        2048 A100M      8 fsdp  1  1  1  32  512 none      mpt         58782 tok/s - b
MA  mpt-350m        1024 A100M      8 fsdp  1  1  1  64 1024 none      mpt         64813 tok/s - b
MA  mpt-350m         512 A100M      8 fsdp  1  1  1 128 2048 none      mpt         69330 tok/s - b
MA  mpt-125m       65536 A100M      8 fsdp  1  1  1   1   16 none      mpt         20368 tok/s - b
MA  mpt-125m       32768 A100M      8 fsdp  1  1  1   2   32 none      mpt         36407 tok/s - b
MA  mpt-125m       16384 A100M      8 fsdp  1  1  1   4   64 none      mpt         60040 tok/s - b
MA  mpt-125m        8192 A100M      8 fsdp  1  1  1   8  128 none      mpt         90392 tok/s - b
MA  mpt-125m        4096 A100M      8 fsdp  1  1  1  16  256 none      mpt        118396 tok/s - b
MA  mpt-125m        2048 A100M      8 fsdp  1  1  1  40  640 none      mpt        142830 tok/s - b
MA  mpt-125m        2048 A100M      8 fsdp  1  1  1  32  512 none      mpt        141737 tok/s - b
MA  mpt-125m        1024 A100M      8 fsdp  1  1  1  64 1024 none      mpt        156468 tok/s - b
MA  mpt-125m         512 A100M      8 fsdp  1  1  1 128 2048 none      mpt        165681 tok/s - b
ML  mpt-70b         2048 H100M    512 fsdp  1  1  1   8 4096 full      mpth         1007 tok/s - b
ML  mpt-70b         2048 H100M    256 fsdp  1  1  1   8 2048 full      mpth         1035 tok/s - b
ML  mpt-70b         2048 H100M    128 fsdp  1  1  1   8 1024 full      mpth         1058 tok/s - b
ML  mpt-30b         2048 H100M    512 fsdp  1  1  1   8 4096 full      mpth         2115 tok/s - b
ML  mpt-30b         2048 H100M    256 fsdp  1  1  1   8 2048 full      mpth         2148 tok/s - b
ML  mpt-30b         2048 H100M    128 fsdp  1  1  1   8 1024 full      mpth         2199 tok/s - b
ML  mpt-13b         2048 H100M    512 fsdp  1  1  1  16 8192 full      mpth         4952 tok/s - b
ML  mpt-13b         2048 H100M    256 fsdp  1  1  1  16 4096 full      mpth         4989 tok/s - b
ML  mpt-13b         2048 H100M    128 fsdp  1  1  1  16 2048 full      mpth         5080 tok/s - b
ML  mpt-7b          2048 H100M    512 fsdp  1  1  1   6 3072 none      mpth         9670 tok/s - b
ML  mpt-7b          2048 H100M    256 fsdp  1  1  1   6 1536 none      mpth        10119 tok/s - b
ML  mpt-7b          2048 H100M    128 fsdp  1  1  1   6  768 none      mpth        10475 tok/s - b
ML  mpt-3b          2048 H100M    512 zero2 1  1  1   8 4096 none      mpth        21664 tok/s - b
ML  mpt-3b          2048 H100M    256 zero2 1  1  1   8 2048 none      mpth        22772 tok/s - b
ML  mpt-3b          2048 H100M    128 zero2 1  1  1   8 1024 none      mpth        23422 tok/s - b
ML  mpt-1b          2048 H100M    512 zero2 1  1  1  12 6144 none      mpth        39837 tok/s - b
ML  mpt-1b          2048 H100M    256 zero2 1  1  1  12 3072 none      mpth        42555 tok/s - b
ML  mpt-1b          2048 H100M    128 zero2 1  1  1  12 1536 none      mpth        44123 tok/s - b
M8  mpt-3b         32768 H100M      8 fsdp  1  1  1   3  144 full      mpth8        5856 tok/s - b
M8  mpt-3b          8192 H100M      8 fsdp  1  1  1   3  144 none      mpth8       19146 tok/s - b
M8  mpt-3b          2048 H100M      8 fsdp  1  1  1  10  480 none      mpth8       30586 tok/s - b
M8  mpt-3b           512 H100M      8 fsdp  1  1  1  40 1920 none      mpth8       36527 tok/s - b
M8  mpt-1b         32768 H100M      8 fsdp  1  1  1   1   32 none      mpth8       12580 tok/s - b
M8  mpt-1b          8192 H100M      8 fsdp  1  1  1   2   64 none      mpth8       32010 tok/s - b
M8  mpt-1b           512 H100M      8 fsdp  1  1  1  56 1792 none      mpth8       70315 tok/s - b
M8  mpt-350m       32768 H100M      8 fsdp  1  1  1   1   32 none      mpth8       24439 tok/s - b
M8  mpt-350m       16384 H100M      8 fsdp  1  1  1   2   64 none      mpth8       42929 tok/s - b
M8  mpt-350m         512 H100M      8 fsdp  1  1  1  56 1792 none      mpth8      154420 tok/s - b
M4  mpt-70b         2048 A100M40  128 fsdp  1  1  1   4  512 full      mpt16         376 tok/s - b
M4  mpt-70b         2048 A100M40   64 fsdp  1  1  1   2  128 full      mpt16         276 tok/s - b
M4  mpt-30b         2048 A100M40  128 fsdp  1  1  1   6  768 full      mpt16         865 tok/s - b
M4  mpt-30b         2048 A100M40   32 fsdp  1  1  1   4  128 full      mpt16         857 tok/s - b
M4  mpt-13b         8192 A100M40    8 fsdp  1  1  1   1  128 full      mpt16        1407 tok/s - b
M4  mpt-13b         4096 A100M40    8 fsdp  1  1  1   2  256 full      mpt16        1603 tok/s - b
M4  mpt-13b         2048 A100M40  128 fsdp  1  1  1  16 2048 full      mpt16        1972 tok/s - b
M4  mpt-13b         2048 A100M40   64 fsdp  1  1  1  16 1024 full      mpt16        1976 tok/s - b
M4  mpt-13b         2048 A100M40   32 fsdp  1  1  1  14  448 full      mpt16        1998 tok/s - b
M4  mpt-13b         2048 A100M40   16 fsdp  1  1  1  10  160 full      mpt16        1993 tok/s - b
M4  mpt-13b         2048 A100M40    8 fsdp  1  1  1   4  512 full      mpt16        1668 tok/s - b
M4  mpt-13b         1024 A100M40    8 fsdp  1  1  1   8 1024 full      mpt16        1727 tok/s - b
M4  mpt-13b          512 A100M40    8 fsdp  1  1  1  16 2048 full      mpt16        1763 tok/s - b
M4  mpt-7b         16384 A100M40    8 fsdp  1  1  1   1   32 full      mpt16        2249 tok/s - b
M4  mpt-7b          8192 A100M40    8 fsdp  1  1  1   3   96 full      mpt16        2887 tok/s - b
M4  mpt-7b          4096 A100M40    8 fsdp  1  1  1   6  192 full      mpt16        3366 tok/s - b
M4  mpt-7b          2048 A100M40  128 fsdp  1  1  1  18 2304 full      mpt16        3623 tok/s - b
M4  mpt-7b          2048 A100M40   64 fsdp  1  1  1  18 1152 full      mpt16        3665 tok/s - b
M4  mpt-7b          2048 A100M40   32 fsdp  1  1  1  18  576 full      mpt16        3725 tok/s - b
M4  mpt-7b          2048 A100M40   16 fsdp  1  1  1  16  256 full      mpt16        3645 tok/s - b
M4  mpt-7b          2048 A100M40    8 fsdp  1  1  1  12  384 full      mpt16        3679 tok/s - b
M4  mpt-7b          1024 A100M40    8 fsdp  1  1  1  24  768 full      mpt16        3854 tok/s - b
M4  mpt-7b           512 A100M40    8 fsdp  1  1  1  48 1536 full      mpt16        3895 tok/s - b
M4  mpt-3b         32768 A100M40    8 fsdp  1  1  1   1   32 full      mpt16        2955 tok/s - b
M4  mpt-3b         16384 A100M40    8 fsdp  1  1  1   2  128 full      mpt16        4465 tok/s - b
M4  mpt-3b          8192 A100M40    8 fsdp  1  1  1   1   64 none      mpt16        7149 tok/s - b
M4  mpt-3b          4096 A100M40    8 fsdp  1  1  1   2  128 none      mpt16        8777 tok/s - b
M4  mpt-3b          2048 A100M40  128 fsdp  1  1  1   6  768 none      mpt16        9538 tok/s - b
M4  mpt-3b          2048 A100M40   64 fsdp  1  1  1   6  384 none      mpt16        9736 tok/s - b
M4  mpt-3b          2048 A100M40   32 fsdp  1  1  1   6  192 none      mpt16        9914 tok/s - b
M4  mpt-3b          2048 A100M40   16 fsdp  1  1  1   5   80 none      mpt16        9750 tok/s - b
M4  mpt-3b          2048 A100M40    8 fsdp  1  1  1   5  320 none      mpt16       10065 tok/s - b
M4  mpt-3b          1024 A100M40    8 fsdp  1  1  1  10  640 none      mpt16       10731 tok/s - b
M4  mpt-3b           512 A100M40    8 fsdp  1  1  1  20 1280 none      mpt16       11324 tok/s - b
M4  mpt-1b         32768 A100M40    8 fsdp  1  1  1   1   32 full      mpt16        5095 tok/s - b
M4  mpt-1b         16384 A100M40    8 fsdp  1  1  1   1   64 none      mpt16        9715 tok/s - b
M4  mpt-1b          8192 A100M40    8 fsdp  1  1  1   2  128 none      mpt16       13474 tok/s - b
M4  mpt-1b          4096 A100M40    8 fsdp  1  1  1   4  256 none      mpt16       16856 tok/s - b
M4  mpt-1b          2048 A100M40  128 fsdp  1  1  1  10 1280 none      mpt16       18647 tok/s - b
M4  mpt-1b          2048 A100M40   64 fsdp  1  1  1  10  640 none      mpt16       19001 tok/s - b
M4  mpt-1b          2048 A100M40   32 fsdp  1  1  1  10  320 none      mpt16       15555 tok/s - b
M4  mpt-1b          2048 A100M40   16 fsdp  1  1  1   8  128 none      mpt16       19085 tok/s - b
M4  mpt-1b          2048 A100M40    8 fsdp  1  1  1   8  512 none      mpt16       19271 tok/s - b
M4  mpt-1b          1024 A100M40    8 fsdp  1  1  1  16 1024 none      mpt16       20959 tok/s - b
M4  mpt-1b           512 A100M40    8 fsdp  1  1  1  32 2048 none      mpt16       21782 tok/s - b
M4  mpt-760m       32768 A100M40    8 fsdp  1  1  1   1   32 full      mpt16        7183 tok/s - b
M4  mpt-760m       16384 A100M40    8 fsdp  1  1  1   1   32 none      mpt16       13914 tok/s - b
M4  mpt-760m        8192 A100M40    8 fsdp  1  1  1   3   96 none      mpt16       20106 tok/s - b
M4  mpt-760m        4096 A100M40    8 fsdp  1  1  1   6  192 none      mpt16       25863 tok/s - b
M4  mpt-760m        2048 A100M40  128 fsdp  1  1  1  12 1536 none      mpt16       28940 tok/s - b
M4  mpt-760m        2048 A100M40   64 fsdp  1  1  1  12  768 none      mpt16       29344 tok/s - b
M4  mpt-760m        2048 A100M40   32 fsdp  1  1  1  12  384 none      mpt16       29648 tok/s - b
M4  mpt-760m        2048 A100M40   16 fsdp  1  1  1  12  192 none      mpt16       29607 tok/s - b
M4  mpt-760m        2048 A100M40    8 fsdp  1  1  1  12  384 none      mpt16       30173 tok/s - b
M4  mpt-760m        1024 A100M40    8 fsdp  1  1  1  24  768 none      mpt16       33422 tok/s - b
M4  mpt-760m         512 A100M40    8 fsdp  1  1  1  48 1536 none      mpt16       34938 tok/s - b
M4  mpt-350m       32768 A100M40    8 fsdp  1  1  1   1   32 none      mpt16       13416 tok/s - b
M4  mpt-350m       16384 A100M40    8 fsdp  1  1  1   2   64 none      mpt16       22896 tok/s - b
M4  mpt-350m        8192 A100M40    8 fsdp  1  1  1   4  128 none      mpt16       34933 tok/s - b
M4  mpt-350m        4096 A100M40    8 fsdp  1  1  1   8  256 none      mpt16       46833 tok/s - b
M4  mpt-350m        2048 A100M40  128 fsdp  1  1  1  18 2304 none      mpt16       51934 tok/s - b
M4  mpt-350m        2048 A100M40   64 fsdp  1  1  1  18 1152 none      mpt16       52689 tok/s - b
M4  mpt-350m        2048 A100M40   32 fsdp  1  1  1  18  576 none      mpt16       53811 tok/s - b
M4  mpt-350m        2048 A100M40   16 fsdp  1  1  1  18  288 none      mpt16       55413 tok/s - b
M4  mpt-350m        2048 A100M40    8 fsdp  1  1  1  16  512 none      mpt16       55995 tok/s - b
M4  mpt-350m        1024 A100M40    8 fsdp  1  1  1  32 1024 none      mpt16       62523 tok/s - b
M4  mpt-350m         512 A100M40    8 fsdp  1  1  1  64 2048 none      mpt16       66284 tok/s - b
M4  mpt-125m       32768 A100M40    8 fsdp  1  1  1   1   32 none      mpt16       32651 tok/s - b
M4  mpt-125m       16384 A100M40    8 fsdp  1  1  1   2   48 none      mpt16       55484 tok/s - b
M4  mpt-125m        8192 A100M40    8 fsdp  1  1  1   5  120 none      mpt16       86858 tok/s - b
M4  mpt-125m        4096 A100M40    8 fsdp  1  1  1  13  312 none      mpt16      115162 tok/s - b
M4  mpt-125m        2048 A100M40  128 fsdp  1  1  1  26 3328 none      mpt16      123936 tok/s - b
M4  mpt-125m        2048 A100M40   64 fsdp  1  1  1  26 1664 none      mpt16      125234 tok/s - b
M4  mpt-125m        2048 A100M40   32 fsdp  1  1  1  26  832 none      mpt16      127122 tok/s - b
M4  mpt-125m        2048 A100M40   16 fsdp  1  1  1  26  416 none      mpt16      130535 tok/s - b
M4  mpt-125m        2048 A100M40    8 fsdp  1  1  1  26  624 none      mpt16      136334 tok/s - b
M4  mpt-125m        1024 A100M40    8 fsdp  1  1  1  52 1248 none      mpt16      148289 tok/s - b
M4  mpt-125m         512 A100M40    8 fsdp  1  1  1 104 2496 none      mpt16      156735 tok/s - b
TL  tinyllama-1.1b  2048 A100T40   16 fsdp  1  1  1   8 1024 none      tinyl       24000 tok/s - b
TH  llama3-8b       8192 H200T     32 fsdp  1  1  1   2   64 selective titan8      10938 tok/s 47.96 b
TH  llama3-8b       8192 H200T     64 fsdp  1  1  1   2  128 selective titan8      10753 tok/s 46.97 b
TT  llama3-70b      8192 H100T    256 fsdp  8  1  1  16  512 full      titan8a       876 tok/s 67.6 b
TT  llama3-405b    32768 H100T    512 fsdp  8  8  1   1   64 full      titan8a        76 tok/s 75.3 b
AO  llama3-8b       8192 H100T      8 fsdp  1  1  1   1    8 selective titan8     7689.5 tok/s 47.77 b
AO  llama3-8b       8192 H100T      8 fsdp  1  1  1   1    8 selective titan8r      6768 tok/s 47.79 b
AB  llama3-8b       8192 B200L      8 fsdp  1  1  1   1    8 selective titanc     8307.5 tok/s 33.71 *
AB  llama3-8b       8192 B200L      8 fsdp  1  1  1   1    8 selective titan8      10417 tok/s 33.38 b
AB  llama3-8b       8192 B200L      8 fsdp  1  1  1   1    8 selective titanmx      9969 tok/s 33.88 b
AB  llama3-8b       8192 B200L      8 fsdp  1  1  1   1    8 selective titanmxr     9642 tok/s 33.88 b
AB  llama3-8b       8192 B200L      8 fsdp  1  1  1   1    8 selective titan8r    8640.5 tok/s 33.72 b
D1  gpt-175b        2048 H100N    128 zero1 4  8 12   1  256 none      nemo        8.309 s     - *
D1  gpt-175b        2048 H100N    256 zero1 4  8 12   1  512 none      nemo        8.408 s     - b
D1  gpt-175b        2048 H100N    512 zero1 4  8 12   1 1024 none      nemo         8.42 s     - b
D1  gpt-175b        2048 H100N   1024 zero1 4  8 12   1 2048 none      nemo        8.453 s     - b
D1  gpt-175b        2048 H100N   2048 zero1 4  8 12   1 4096 none      nemo         8.49 s     - b
D1  gpt-175b        2048 H100N    128 zero1 4  8 12   1  256 none      nemo8       5.626 s     - b
D1  gpt-175b        2048 H100N    256 zero1 4  8 12   1  512 none      nemo8       5.725 s     - b
D1  gpt-175b        2048 H100N    512 zero1 4  8 12   1 1024 none      nemo8       5.774 s     - b
D1  gpt-175b        2048 H100N   1024 zero1 4  8 12   1 2048 none      nemo8        5.82 s     - b
D1  gpt-175b        2048 H100N   2048 zero1 4  8 12   1 4096 none      nemo8        5.96 s     - b
D2  gpt-175b        2048 H100N    128 zero1 4  8 12   1  256 none      nemo         8.91 s     - b
D2  gpt-175b        2048 H100N    256 zero1 4  8 12   1  512 none      nemo         8.95 s     - b
D2  gpt-175b        2048 H100N    512 zero1 4  8 12   1 1024 none      nemo         9.09 s     - b
D2  gpt-175b        2048 H100N   1024 zero1 4  8 12   1 2048 none      nemo         9.01 s     - b
D2  gpt-175b        2048 H100N   2048 zero1 4  8 12   1 4096 none      nemo         9.02 s     - b
D2  gpt-175b        2048 H100N    128 zero1 4  8 12   1  256 none      nemo8        5.92 s     - b
D2  gpt-175b        2048 H100N    256 zero1 4  8 12   1  512 none      nemo8        5.96 s     - b
D2  gpt-175b        2048 H100N    512 zero1 4  8 12   1 1024 none      nemo8        6.44 s     - b
D2  gpt-175b        2048 H100N   1024 zero1 4  8 12   1 2048 none      nemo8        6.72 s     - b
D2  gpt-175b        2048 H100N   2048 zero1 4  8 12   1 4096 none      nemo8        6.24 s     - b
D3  nemotron-15b    4096 H100N     16 zero1 4  1  1   4   64 none      nemo        2.812 s     - b
D3  nemotron-15b    4096 H100N     32 zero1 4  1  1   4  128 none      nemo        2.824 s     - b
D3  nemotron-15b    4096 H100N     64 zero1 4  1  1   4  256 none      nemo        2.845 s     - b
D3  nemotron-15b    4096 H100N    128 zero1 4  1  1   4  512 none      nemo        2.859 s     - b
D3  nemotron-15b    4096 H100N    256 zero1 4  1  1   4 1024 none      nemo        2.852 s     - b
D3  nemotron-15b    4096 H100N    512 zero1 4  1  1   4 2048 none      nemo        2.875 s     - b
D3  nemotron-15b    4096 H100N   1024 zero1 4  1  1   4 4096 none      nemo        2.895 s     - b
D3  nemotron-15b    4096 H100N   2048 zero1 4  1  1   4 8192 none      nemo        2.887 s     - b
D3  nemotron-15b    4096 H100N     16 zero1 4  1  1   4   64 none      nemo8       2.039 s     - b
D3  nemotron-15b    4096 H100N     32 zero1 4  1  1   4  128 none      nemo8       2.046 s     - b
D3  nemotron-15b    4096 H100N     64 zero1 4  1  1   4  256 none      nemo8       2.048 s     - b
D3  nemotron-15b    4096 H100N    128 zero1 4  1  1   4  512 none      nemo8       2.059 s     - b
D3  nemotron-15b    4096 H100N    256 zero1 4  1  1   4 1024 none      nemo8       2.075 s     - b
D3  nemotron-15b    4096 H100N    512 zero1 4  1  1   4 2048 none      nemo8        2.12 s     - b
D3  nemotron-15b    4096 H100N   1024 zero1 4  1  1   4 4096 none      nemo8       2.094 s     - b
D3  nemotron-15b    4096 H100N   2048 zero1 4  1  1   4 8192 none      nemo8        2.12 s     - b
D4  nemotron-340b   4096 H100N    128 zero1 8  8 12   1   32 none      nemo         4.61 s     - b
D4  nemotron-340b   4096 H100N    256 zero1 8  8 12   1   64 none      nemo         4.67 s     - b
D4  nemotron-340b   4096 H100N    512 zero1 8  8 12   1  128 none      nemo          4.7 s     - b
D4  nemotron-340b   4096 H100N   1024 zero1 8  8 12   1  256 none      nemo         4.73 s     - b
D4  nemotron-340b   4096 H100N   2048 zero1 8  8 12   1  512 none      nemo         4.84 s     - b
D4  nemotron-340b   4096 H100N    128 zero1 8  8 12   1   32 none      nemo8        3.16 s     - b
D4  nemotron-340b   4096 H100N    256 zero1 8  8 12   1   64 none      nemo8        3.21 s     - b
D4  nemotron-340b   4096 H100N    512 zero1 8  8 12   1  128 none      nemo8        3.26 s     - b
D4  nemotron-340b   4096 H100N   1024 zero1 8  8 12   1  256 none      nemo8        3.34 s     - b
D4  nemotron-340b   4096 H100N   2048 zero1 8  8 12   1  512 none      nemo8        3.49 s     - b
D5  nemotron-15b    4096 H100N     16 zero1 2  1  1   2   64 none      nemo        2.746 s     - b
D5  nemotron-15b    4096 H100N     16 zero1 2  1  1   2   64 none      nemo8       1.988 s     - b
D5  nemotron-340b   4096 H100N    256 zero1 8  8 12   1   64 none      nemo        4.606 s     - b
D5  nemotron-340b   4096 H100N    256 zero1 8  8 12   1   64 none      nemo8       3.107 s     - b
DM  llama2-70b      4096 H100N     64 fsdp  1  1  1   2  128 selective maxtext     6.999 s     - b
DM  llama2-70b      4096 H100N    128 fsdp  1  1  1   2  256 selective maxtext     7.072 s     - b
DM  llama2-70b      4096 H100N    256 fsdp  1  1  1   2  512 selective maxtext     7.153 s     - b
DM  llama2-70b      4096 H100N    512 hsdp  1  1  1   2 1024 selective maxtext     7.091 s     - b
DM  llama2-70b      4096 H100N   1024 hsdp  1  1  1   2 2048 selective maxtext     7.084 s     - b
DM  llama2-70b      4096 H100N   2048 hsdp  1  1  1   2 4096 selective maxtext     7.066 s     - b
DM  llama2-70b      4096 H100N     64 fsdp  1  1  1   2  128 selective maxtext8    4.324 s     - b
DM  llama2-70b      4096 H100N    128 fsdp  1  1  1   2  256 selective maxtext8    4.556 s     - b
DM  llama2-70b      4096 H100N    256 fsdp  1  1  1   2  512 selective maxtext8    4.959 s     - b
DM  llama2-70b      4096 H100N    512 hsdp  1  1  1   2 1024 selective maxtext8    5.043 s     - b
DM  llama2-70b      4096 H100N   1024 hsdp  1  1  1   2 2048 selective maxtext8    5.062 s     - b
DM  llama2-70b      4096 H100N   2048 hsdp  1  1  1   2 4096 selective maxtext8     4.93 s     - b
NE  gpt3-5b         2048 H100N     64 zero1 1  1  1   4 2048 none      nemo8       22521 tok/s - b
NE  gpt3-20b        2048 H100N     64 zero1 2  1  1   2  256 none      nemo8        5851 tok/s - b
NE  gpt-175b        2048 H100N    128 zero1 4  8  6   1  256 none      nemo8         726 tok/s - b
NE  gpt-175b        2048 H100N    512 zero1 4  8  6   2 2048 none      nemo8         782 tok/s - b
NE  llama2-7b       4096 H100N      8 zero1 1  1  1   1  128 none      nemo8       16847 tok/s - b
NE  llama2-13b      4096 H100N     16 zero1 1  4 10   1  128 none      nemo8        8646 tok/s - b
NE  llama2-70b      4096 H100N     64 zero1 4  4 20   1  128 none      nemo8        1707 tok/s - b
NE  nemotron-8b     4096 H100N     64 zero1 2  1  1   4  256 none      nemo8       12701 tok/s - b
NE  nemotron-22b    4096 H100N     64 zero1 2  4 10   2  256 none      nemo8        4256 tok/s - b
NE  nemotron-340b   4096 H100N    128 zero1 8  8 12   1   32 none      nemo8         322 tok/s - b
NL  llama2-7b       4096 H100N      4 zero1 1  1  1   1 1024 none      nemo8       16671 tok/s - b
NL  llama2-7b       8192 H100N      8 zero1 1  2  1   1  512 none      nemo8       13907 tok/s - b
NL  llama2-7b      16384 H100N     16 zero1 2  1  1   1  256 none      nemo8       10082 tok/s - b
DG  nemotron-340b   4096 GB200    128 zero1 8  4 12   1   32 none      nemo        2.189 s     - b
DG  nemotron-340b   4096 GB200    256 zero1 8  4 12   1   64 none      nemo         2.19 s     - b
DG  nemotron-340b   4096 GB200    512 zero1 8  4 12   1  128 none      nemo        2.229 s     - b
DG  nemotron-340b   4096 GB200    128 zero1 8  4 12   1   32 none      nemo8       1.483 s     - b
DG  nemotron-340b   4096 GB200    256 zero1 8  4 12   1   64 none      nemo8       1.517 s     - b
DG  nemotron-340b   4096 GB200    512 zero1 8  4 12   1  128 none      nemo8       1.549 s     - b
DG  nemotron-340b   4096 GB200    128 zero1 8  4 12   1  512 none      nemo        32.66 s     - b
DG  nemotron-340b   4096 GB200    256 zero1 8  4 12   1  512 none      nemo        16.58 s     - b
DG  nemotron-340b   4096 GB200    512 zero1 8  4 12   1  512 none      nemo        8.468 s     - b
DG  nemotron-340b   4096 GB200    128 zero1 8  4 12   1  512 none      nemo8       21.83 s     - b
DG  nemotron-340b   4096 GB200    256 zero1 8  4 12   1  512 none      nemo8       11.21 s     - b
DG  nemotron-340b   4096 GB200    512 zero1 8  4 12   1  512 none      nemo8       5.668 s     - b
B2  llama3-70b      8192 GB300     64 fsdp  1  1  1   2  256 none      bridge8      5003 tok/s - b
B2  llama3-70b      8192 GB300     64 zero1 1  4  5   1  256 none      bridgemx     4596 tok/s - b
B2  llama3-405b     8192 GB300    256 zero1 4  8  4   1 1536 none      bridge8       988 tok/s - b
B2  llama3-70b      8192 GB200     64 fsdp  1  1  1   2  256 none      bridge8      4040 tok/s - b
B2  llama3-70b      8192 GB200     64 zero1 2  4  5   1  256 none      bridgemx     3887 tok/s - b
B2  llama3-405b     8192 GB200    256 zero1 4 16  4   1 1536 none      bridge8       793 tok/s - b
B2  llama3-405b     8192 GB200    256 zero1 4 16  8   1 1536 none      bridgemx      786 tok/s - b
B2  llama3-70b      8192 H100N     64 zero1 4  8  5   1  256 none      bridge8      1621 tok/s - b
B1  llama3-8b       8192 GB300      8 zero1 1  1  1   2  128 none      bridge8     37556 tok/s - b
B1  llama3-8b       8192 GB300      8 zero1 1  1  1   2  128 none      bridgemx    36108 tok/s - b
B1  llama3-70b      8192 GB300     64 fsdp  1  1  1   2  256 none      bridge8      4520 tok/s - b
B1  llama3-8b       8192 GB200      8 zero1 1  1  1   2  128 none      bridge8     31508 tok/s - b
B1  llama3-8b       8192 GB200      8 zero1 1  1  1   2  128 none      bridgemx    29789 tok/s - b
B1  llama3-70b      8192 GB200     64 fsdp  1  1  1   2  256 none      bridge8      4312 tok/s - b
B1  llama3-405b     8192 GB200    256 zero1 4 16  4   1 1536 none      bridge8       813 tok/s - b
B1  llama3-8b       8192 B200N      8 zero1 1  1  1   2  128 none      bridge8     30624 tok/s - b
B1  llama3-8b       8192 B200N      8 zero1 1  1  1   2  128 none      bridgemx    29521 tok/s - b
B1  llama3-8b       8192 H100N      8 fsdp  1  1  1   1  128 none      bridge8     14451 tok/s - b
B1  llama3-70b      8192 H100N     64 zero1 4  8  5   1  128 none      bridge8      1602 tok/s - b
B0  llama3-8b       8192 GB200      8 zero1 1  1  1   2  128 none      bridge8     31357 tok/s - b
B0  llama3-8b       8192 GB200      8 zero1 1  1  1   2  128 none      bridgemx    29925 tok/s - b
B0  llama3-70b      8192 GB200     64 fsdp  1  1  1   2  128 none      bridge8      3986 tok/s - b
B0  llama3-70b      8192 GB200     64 zero1 2  4  5   2  128 none      bridgemx     3546 tok/s - b
B0  llama3-405b     8192 GB200    128 fsdp  2  1  1   1   64 none      bridge8       729 tok/s - b
B0  llama3-8b       8192 B200N      8 zero1 1  1  1   2  128 none      bridge8     29994 tok/s - b
B0  llama3-8b       8192 B200N      8 zero1 1  1  1   2  128 none      bridgemx    29388 tok/s - b
B0  llama3-8b       8192 H100N      8 fsdp  1  1  1   1  128 none      bridge8     14079 tok/s - b
B0  llama3-70b      8192 H100N     64 zero1 4  8  5   1  128 none      bridge8      1619 tok/s - b
PAI gpt-1.3b    1024 V100    4  ddp  1  1 1  1    4 none      megatron16 - seq/s 24.47
PAI gpt-1.3b    1024 V100    4 zero1 1  1 1  1    4 none      megatron16 - seq/s 15.34
PAI gpt-1.3b    1024 V100    4 zero2 1  1 1  1    4 none      megatron16 - seq/s 15.33
"""


@dataclass(frozen=True)
class Model:
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    words: int
    is_gated: bool
    is_tied: bool


@dataclass(frozen=True)
class Row:
    source: str
    model: str
    context: int
    machines: str
    gpus: int
    strategy: str
    tp: int
    pp: int
    stages_per_rank: int
    micro_batch: int
    global_batch: int
    recompute: str
    program: str
    rate: float | None
    unit: str
    memory_gib: float | None
    role: str  # fitted, blind, or held out

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp)


def models() -> dict[str, Model]:
    found = {}
    for line in MODELS.strip().splitlines():
        name, *numbers, gated, tied = line.split()
        layers, width, heads, kv_heads, mlp_width, words = map(int, numbers)
        found[name] = Model(layers, width, heads, kv_heads, mlp_width, words, gated == "3", tied == "tied")
    return found


def rows() -> list[Row]:
    return [_row(line.split()) for line in ROWS.strip().splitlines()]


def _row(words: list[str]) -> Row:
    source, model, context, machines, gpus, strategy, tp, pp, stages, micro, batch, recompute, program = words[:13]
    rate, unit, gib, *mark = words[13:]
    return Row(
        source,
        model,
        int(context),
        machines,
        int(gpus),
        strategy,
        int(tp),
        int(pp),
        int(stages),
        int(micro),
        int(batch),
        recompute,
        program,
        None if rate == "-" else float(rate),
        unit,
        None if gib == "-" else float(gib),
        {"*": "fitted", "b": "blind"}["".join(mark)] if mark else "held out",
    )
