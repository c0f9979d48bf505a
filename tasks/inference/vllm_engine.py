"""The vLLM engine: `vllm serve` runs an export behind our server.

This code follows the documentation of vLLM 0.30 and was run with its build for CPUs 0.32.0, not on GPUs:
- its options: https://docs.vllm.ai/en/v0.30.0/cli/serve/ (--uds, --structured-outputs-config and the others below)
- its usage reports: https://docs.vllm.ai/en/latest/usage/usage_stats/ (VLLM_NO_USAGE_STATS)
- why it has no API key: https://docs.vllm.ai/en/v0.28.0/serving/online_serving/openai_compatible_server/ says that
  --api-key leaves some paths open. Instead the socket is in a folder that only this user may enter.
In tests tests/support/vllm_stand_in.py stands in for it, and in tests/vllm it runs itself.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.hardware.machine import gpus_here
from tasks.inference.completions_engine import MODEL, CompletionsEngine, completion_request, read_logprobs
from tasks.inference.engine_process import EngineProcess
from tasks.inference.onnx_generator import Grammars, Sampling, TokenLogprob
from training.config.serving import InferenceConfig
from training.planner.reasons.checks import check_inference
from training.tokenizer.text_encoder import check_tokens

logger = logging.getLogger(__name__)

MAX_TEMPERATURE = 2
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SIZES = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
}
INSTALL_VLLM = (
    "install it in an environment of its own (`python -m venv ~/vllm && ~/vllm/bin/pip install vllm`; it needs other "
    "versions of torch than Shardline) and put its bin folder on PATH"
)


class VllmEngine(CompletionsEngine):
    """Runs an export folder in vLLM. Equal settings and seeds give equal text, but not that of the other engines."""

    grammars: Grammars
    concurrent = 256  # requests that vLLM decodes at the same time, by its default on most GPUs

    def __init__(self, export_dir: Path | str, inference: InferenceConfig) -> None:
        folder = Path(export_dir)
        super().__init__(folder)
        self.longest, self.grammars = self.context, Grammars(self.tokenizer, self.end_ids[0])
        check_inference(folder, inference)
        program = find_vllm(inference)
        self.process = EngineProcess(
            "vLLM",
            lambda path: command_for(program, folder.absolute(), inference, context=self.context, path=path),
            environment={"VLLM_NO_USAGE_STATS": "1"},
        )
        if inference.precision == "auto":
            _log_precision(self.process.log_path.read_text(errors="replace"))

    def check(self, params: Sampling, prompt_tokens: int) -> None:
        check_tokens(self.tokenizer, params.logit_bias)
        if params.temperature > MAX_TEMPERATURE:
            raise ValueError(f"temperature = {params.temperature:g}: vLLM takes {MAX_TEMPERATURE} at most")
        if params.grammar and params.logprobs is not None:
            raise ValueError(
                "vLLM computes log-probabilities over the tokens that a grammar allows, not over all: leave out the "
                "grammar or the log-probabilities"
            )
        needed = prompt_tokens + params.new_tokens
        if needed > self.context and (params.grammar or params.presence_penalty or params.frequency_penalty):
            raise ValueError(
                f"with vLLM, penalties and grammars need prompt and new text within the context of {self.context} "
                f"tokens: {prompt_tokens} + {params.new_tokens} are {needed}, so ask for fewer new tokens"
            )
        if params.grammar:
            self.grammars.matcher(params.grammar)  # vLLM's own would end the text as if it were whole

    def score(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        if len(ids) > self.context - 1:
            raise ValueError(
                f"{len(ids)} tokens cannot be scored: vLLM takes {self.context - 1} at most, one less than the "
                "context, because it generates a token for every prompt"
            )
        if not ids:
            return []
        body = completion_request(ids, Sampling(new_tokens=0, temperature=0, logprobs=top), end_ids=self.end_ids)
        content: Any = self.process.open(body | {"echo": True, "stream": False}).whole()
        return read_logprobs(content["choices"][0], ids, top=top)


def find_vllm(inference: InferenceConfig) -> str:
    """Return the path of `vllm`. Raises ValueError, with the cure, if the program or its devices are missing."""
    if not (program := shutil.which("vllm")):
        raise ValueError(
            "inference.engine = vllm and inference.parallel need vLLM, and there is no program `vllm` on PATH: "
            f"{INSTALL_VLLM}"
        )
    if not is_for_gpus(program):
        return program  # on a CPU, as its user built it
    if not (gpus := gpus_here()):
        raise ValueError(
            "vLLM needs a GPU, and none is visible here (`nvidia-smi -L` lists them, "
            "CUDA_VISIBLE_DEVICES hides them): on a CPU serve with inference.engine=onnx, or install vLLM's build for "
            "CPUs as docs/inference.md says"
        )
    if inference.degree > len(gpus):
        raise ValueError(f"inference.degree = {inference.degree}, but {len(gpus)} GPUs are visible: lower it")
    return program


def is_for_gpus(program: str | None) -> bool:
    """Return whether there is a vLLM and it computes on GPUs; the builds for CPUs have `cpu` in version or name."""
    if not program:
        return False
    packages = Path(program).resolve().parents[1].glob("lib/python*/site-packages/vllm*.dist-info")
    return not any("cpu" in folder.name for folder in packages)


def command_for(program: str, export_dir: Path, inference: InferenceConfig, *, context: int, path: Path) -> list[str]:
    """Return the command of `vllm serve`, with its socket at `path`."""
    devices = [SIZES[inference.parallel], str(inference.degree)] if inference.parallel != "none" else []
    # As in onnx_generator.py: grammars by llguidance, without spaces between values, which a model may write endlessly.
    grammars = {"backend": "guidance", "disable_any_whitespace": True}
    return [
        *(program, "serve", str(export_dir)),
        *("--uds", str(path)),
        *("--served-model-name", MODEL),
        *("--max-model-len", str(context)),
        *("--dtype", DTYPES[inference.precision]),
        *devices,
        *("--gpu-memory-utilization", f"{inference.vllm_memory:g}"),
        *("--generation-config", "vllm"),  # each request has all settings; none comes from the export's file
        *("--load-format", "safetensors"),
        *("--structured-outputs-config", json.dumps(grammars)),
        "--disable-uvicorn-access-log",
    ]


def _log_precision(log: str) -> None:
    """Log the precision that vLLM chose, because it computes with 16 bits where the weights have 32."""
    cast = re.search(r"asting torch\.(\w+) to torch\.(\w+)", log)
    if cast:
        what = f"precision: {cast[2]} (vLLM's choice; the export's weights are {cast[1]})"
        logger.warning("%s; set inference.precision=fp32 to compute in the weights' precision", what)
