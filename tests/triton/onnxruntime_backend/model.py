"""Triton's backend `onnxruntime` in Python: each request's tensors, as Triton batched them, go through model.onnx.

The wheel that the tests take Triton from has only the Python backend. NVIDIA's own `onnxruntime` backend, in C++, reads
the same config.pbtxt and the same model.onnx.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = [tensor["name"] for tensor in json.loads(args["model_config"])["input"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests of a batch by one run of the graph, as the C++ backend does."""
        given = [[triton.get_input_tensor_by_name(each, name).as_numpy() for name in self.inputs] for each in requests]
        together = [np.concatenate(parts) for parts in zip(*given, strict=True)]
        names = [output.name for output in self.session.get_outputs()]
        found = self.session.run(names, dict(zip(self.inputs, together, strict=True)))
        starts = np.cumsum([len(first) for first, *_ in given])[:-1]
        parts = zip(*(np.split(array, starts) for array in found), strict=True)
        responses = []
        for request, arrays in zip(requests, parts, strict=True):
            asked = request.requested_output_names()
            tensors = [triton.Tensor(name, array) for name, array in zip(names, arrays, strict=True) if name in asked]
            responses.append(triton.InferenceResponse(output_tensors=tensors))
        return responses
