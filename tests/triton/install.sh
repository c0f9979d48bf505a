#!/usr/bin/env bash
# Triton's server for tests/triton, in .venv/triton: the program of nvidia-pytriton's wheel (Triton 2.51, 53 MB, with only
# its Python backend), and an environment for that backend, which needs NumPy 1. Does nothing where all is there already.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.venv/triton
[ -e $folder/done ] && exit 0
.venv/bin/python -m venv --clear $folder
pip=("$folder/bin/python" -m pip --quiet install)
# The same ONNX Runtime as Shardline's, so that logits can be compared to the bit.
"${pip[@]}" numpy==1.26.4 "$(grep ^onnxruntime== constraints.txt)"
"${pip[@]}" --no-deps --require-hashes -r /dev/stdin <<'WHEEL'
nvidia-pytriton==0.7.0 --hash=sha256:21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df
WHEEL
python=$(.venv/bin/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
server=$folder/lib/$python/site-packages/pytriton/tritonserver
cp "$server/python_backend_stubs/${python#python}/triton_python_backend_stub" "$server/backends/python/"
ln -sfn "lib/$python/site-packages/pytriton/tritonserver" $folder/server
# Where Triton looks for the backend that our model repositories name.
mkdir -p "$server/backends/onnxruntime"
ln -sf "$PWD/tests/triton/onnxruntime_backend/model.py" "$server/backends/onnxruntime/model.py"
touch $folder/done
