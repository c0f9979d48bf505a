"""A model by DeepSpeed-Inference: its kernels where there is CUDA and they fit, else its automatic tensor parallelism.

Kernels replace whole layers and were written against the transformers of their day. So the model is used only if it
gives the logits of the transformers class here, for a prompt and for one more token.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.inference.model_shard import load_whole
from training.models.architectures import layers_of
from training.strategies.zero import import_deepspeed

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 8
MAX_RELATIVE_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}  # of the largest logit


def deepspeed_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, degree: int, context: int
) -> tuple[Any, str]:
    """The model, and the implementation that was chosen. Each rank loads it whole, then splits it. Collective.

    Raises RuntimeError if neither implementation gives the logits of this class.
    """
    original = load_whole(folder, dtype=dtype).to(device)
    expected = _logits(original)
    del original
    choices = [True] if device.type == "cuda" and _has_kernels(load_whole(folder, dtype=dtype)) else []
    why = ""
    for kernels in [*choices, False]:
        name = "kernel injection" if kernels else "automatic tensor parallelism"
        try:
            hf = _init_inference(folder, dtype=dtype, device=device, degree=degree, context=context, kernels=kernels)
            difference = float((_logits(hf) - expected).abs().max() / expected.abs().max())
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        else:
            if difference <= MAX_RELATIVE_DIFFERENCE[dtype]:
                how = f"DeepSpeed-Inference by {name}, logits within {difference:.1e} of the transformers class's"
                return hf, how + (f"; not by kernel injection: {why}" if why else "")
            why = f"its logits differ from the transformers class's by {difference:.1e} of the largest one"
        logger.warning("DeepSpeed-Inference by %s cannot run this model: %s", name, why)
    raise RuntimeError(f"DeepSpeed-Inference cannot run this model here ({why}): set inference.engine=torch")


def _init_inference(
    folder: Path, *, dtype: torch.dtype, device: torch.device, degree: int, context: int, kernels: bool
) -> Any:
    engine = import_deepspeed(device.type).init_inference(
        load_whole(folder, dtype=dtype),
        tensor_parallel={"tp_size": degree},
        dtype=dtype,
        replace_with_kernel_inject=kernels,
        max_out_tokens=context,
    )
    return engine.module.to(device)


def _has_kernels(hf: Any) -> bool:
    """Whether one of DeepSpeed's policies, which are CUDA kernels, replaces the class of these layers."""
    import_deepspeed("cuda")
    from deepspeed.module_inject.replace_policy import replace_policies

    layer = type(layers_of(hf)[0])
    for policy in replace_policies:
        policy(None, inference=True)  # finds out what class it is for
        if policy._orig_layer_class is layer:
            return True
    return False


@torch.inference_mode()
def _logits(hf: Any) -> Tensor:
    """fp32 [2, vocab]: after a prompt, and after one more token behind the prompt's cache."""
    device = next(hf.parameters()).device
    ids = torch.arange(PROMPT_TOKENS, device=device)[None] % hf.config.vocab_size
    first = hf(input_ids=ids[:, :-1], use_cache=True)
    second = hf(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat([first.logits[:, -1], second.logits[:, -1]]).float()
