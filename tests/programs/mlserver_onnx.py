"""A runtime of MLServer for one of our ONNX graphs: the KServe v2 requests that Triton takes run against it."""

from __future__ import annotations

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxGraph(MLModel):
    async def load(self) -> bool:
        self.session = onnxruntime.InferenceSession(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        feed = {given.name: NumpyCodec.decode_input(given) for given in payload.inputs}
        names = [output.name for output in payload.outputs or []] or None
        found = self.session.run(names, feed)
        output_names = names or [output.name for output in self.session.get_outputs()]
        outputs = [NumpyCodec.encode_output(name, array) for name, array in zip(output_names, found, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
