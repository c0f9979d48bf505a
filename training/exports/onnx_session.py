"""Runs an export's graphs with ONNX Runtime on the CPU: whole texts, or a prompt and then token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
PAST = "past_key_values."
SPIN_US = 20  # as in the server (onnx_generator.py); threads that spin for longer slow down torch, measured beside it


def open_session(path: Path, *, threads: int = 0) -> Any:
    """Open a graph. `threads`: threads of one operator; 0: one per core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors are exceptions too, and the log has colours
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def forward_logits(session: Any, ids: np.ndarray) -> np.ndarray:
    return np.asarray(session.run(["logits"], {"input_ids": ids})[0])


class Decoding:
    """A batch of texts that grow together: the session of a decode graph, and the rows' cache so far."""

    def __init__(self, session: Any, *, rows: int) -> None:
        self.session = session
        self.mask = np.zeros((rows, 0), dtype=np.int64)
        self.past = empty_past(session, rows=rows)

    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Return logits fp32 [rows, length, vocab] of `ids`, read after all tokens so far; `mask`: 0 at padding."""
        self.mask = np.concatenate([self.mask, np.ones_like(ids) if mask is None else mask], axis=1)
        positions = np.maximum(self.mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
        feed = {"input_ids": ids, "attention_mask": self.mask, "position_ids": positions, **self.past}
        logits, *present = self.session.run(None, feed)
        self.past = dict(zip(self.past, present, strict=True))
        return np.asarray(logits)


class InPlaceDecoding:
    """Texts that grow in separate rows: the session of a batch graph, and its cache, which is updated in place."""

    def __init__(self, session: Any, *, rows: int, capacity: int) -> None:
        self.session = session
        self.cache = empty_past(session, rows=rows, length=capacity)

    def step(self, ids: np.ndarray, starts: Sequence[int], *, first: int = 0) -> Callable[[], np.ndarray]:
        """Return a function that reads `ids` [rows, length] after `starts` tokens, in the rows from `first` on.

        It returns fp32 logits [rows, length, vocab], in the same array at every call.
        """
        rows, length = ids.shape
        logits = np.empty((rows, length, self.session.get_outputs()[0].shape[2]), dtype=np.float32)
        inputs = {"input_ids": ids, "position_ids": np.array(starts)[:, None] + np.arange(length)}
        outputs = {"logits": logits}
        for name, array in self.cache.items():
            inputs[name] = outputs[name.replace(PAST, "present.")] = array[first : first + rows]
        binding = self.session.io_binding()
        for arrays, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
            for name, array in arrays.items():
                bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

        def run() -> np.ndarray:
            assert inputs  # keeps the arrays alive: the binding has only their addresses
            self.session.run_with_iobinding(binding)
            return logits

        return run


def empty_past(session: Any, *, rows: int, length: int = 0) -> dict[str, np.ndarray]:
    """Return zeros in the shapes and precision of the graph's cache."""
    return {
        tensor.name: np.zeros((rows, tensor.shape[1], length, tensor.shape[3]), dtype=NUMPY_TYPES[tensor.type])
        for tensor in session.get_inputs()
        if tensor.name.startswith(PAST)
    }


def decoded_logits(session: Any, texts: list[np.ndarray], *, steps: int) -> list[np.ndarray]:
    """Return logits fp32 [length, vocab] of each text: all prompts at once, padded left, then `steps` single tokens."""
    steps = min(steps, min(len(text) for text in texts) - 1)
    width = max(len(text) for text in texts) - steps
    padding = [width - (len(text) - steps) for text in texts]
    ids = np.zeros((len(texts), width), dtype=np.int64)
    mask = np.ones_like(ids)
    for row, text in enumerate(texts):
        ids[row, padding[row] :] = text[: len(text) - steps]
        mask[row, : padding[row]] = 0
    decoding = Decoding(session, rows=len(texts))
    found = [decoding.logits(ids, mask)]
    for step in range(-steps, 0):
        found.append(decoding.logits(np.array([[text[step]] for text in texts], dtype=np.int64)))
    together = np.concatenate(found, axis=1)
    return [together[row, padding[row] :] for row in range(len(texts))]


def in_place_logits(session: Any, texts: list[np.ndarray], *, steps: int) -> list[np.ndarray]:
    """Do as `decoded_logits` does, with a batch graph: each prompt in two pieces, then all texts token by token."""
    steps = min(steps, min(len(text) for text in texts) - 1)
    decoding = InPlaceDecoding(session, rows=len(texts), capacity=max(len(text) for text in texts))
    found: list[list[np.ndarray]] = []
    for row, text in enumerate(texts):
        until = len(text) - steps
        pieces = [(0, until // 2), (until // 2, until)] if until > 1 else [(0, until)]
        found.append([decoding.step(text[None, start:end], [start], first=row)()[0] for start, end in pieces])
    for step in range(-steps, 0):
        ids = np.array([[text[step]] for text in texts], dtype=np.int64)
        logits = decoding.step(ids, [len(text) + step for text in texts])()
        for row, of_row in enumerate(logits):
            found[row].append(of_row)
    return [np.concatenate(pieces) for pieces in found]
