"""The engine of one process of transformers: for any Hugging Face class, on the CPU or on one GPU."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tasks.hardware.machine import gpus_here, usable_cores
from tasks.inference.completions_engine import CompletionsEngine
from tasks.inference.engine_process import EngineProcess
from tasks.inference.onnx_generator import Sampling, TokenLogprob
from tasks.inference.vllm_engine import INSTALL_VLLM
from training.config.serving import InferenceConfig
from training.node.limits import usable_memory_bytes
from training.planner.reasons.checks import check_inference

logger = logging.getLogger(__name__)

OTHER_ENGINE = "serve with inference.engine=onnx"


class TorchEngine(CompletionsEngine):
    """Runs an export folder in `python -m training.generate`. Equal settings and seeds give ONNX Runtime's text."""

    def __init__(self, export_dir: Path | str, inference: InferenceConfig) -> None:
        folder = Path(export_dir)
        super().__init__(folder)
        self.longest = self.context + 1
        check_inference(folder, inference)
        if not gpus_here():
            _check_memory(folder, inference.precision)
        threads = str(inference.threads or usable_cores())
        options = ("--context", str(self.context), "--precision", inference.precision, "--threads", threads)
        program = (sys.executable, "-P", "-m", "training.generate", str(folder.absolute()))
        self.process = EngineProcess(
            "the torch engine",
            lambda path: [*program, "--uds", str(path), *options],
            # as in tasks/launch/local.py: threads that spin while they wait take others' cores
            environment={"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": threads},
        )
        loaded = json.loads(self.process.health)
        self.concurrent: int = loaded["rows"]  # requests that are decoded at the same time
        logger.info("the torch engine computes on %s in %s", loaded["device"], loaded["how"])
        if loaded["device"] != "cpu":
            logger.warning("on GPUs vLLM serves more users: %s", INSTALL_VLLM)

    def check(self, params: Sampling, prompt_tokens: int) -> None:
        if not params.is_plain:
            raise ValueError(f"the torch engine has no log-probabilities, penalties, bias or grammar: {OTHER_ENGINE}")

    def request(self, ids: Sequence[int], params: Sampling, *, made: int) -> dict[str, Any]:
        return super().request(ids, params, made=made) | {"seed": params.seed, "made": made}

    def score(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        raise ValueError(f"the torch engine gives no log-probabilities: {OTHER_ENGINE}")


def _check_memory(folder: Path, precision: str) -> None:
    """Raise ValueError if the weights do not fit on this host: the kernel would end the engine, or other programs."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))  # fp32
    needed = stored / (1 if precision in {"auto", "fp32"} else 2)
    free = min(psutil.virtual_memory().available, usable_memory_bytes())
    if needed > free:
        raise ValueError(
            f"the weights of {folder} take {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are "
            "free: run it on a host with more, or on GPUs"
        )
