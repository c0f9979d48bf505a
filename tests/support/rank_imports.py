"""What the server of tests/support/ranks.py has imported before it forks."""

import gc
from importlib import import_module

from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from tests.support.device import DEVICE_KIND
from training import evaluate, export, generate, train
from training.strategies.zero import import_deepspeed

__all__ = ["evaluate", "export", "generate", "modeling_bert", "modeling_gpt2", "modeling_llama", "train"]

if DEVICE_KIND == "cpu":  # else each rank does: with CUDA touched here, no rank could use it
    import_deepspeed("cpu")
    # DeepSpeed imports these, and torch's compiler with them, when it makes an engine: 1.7 s of a core in each rank
    import_module("deepspeed.module_inject.auto_ep_layer")
    import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    import_module("deepspeed.runtime.zero.muon.original_muon")

gc.freeze()  # otherwise each rank's first garbage collection copies all pages of the imports
gc.enable()
