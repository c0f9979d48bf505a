"""What the server of tests/support/ranks.py has imported before it forks."""

from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from training import evaluate, export, generate, train
from training.strategies.zero import import_deepspeed

__all__ = ["evaluate", "export", "generate", "modeling_bert", "modeling_gpt2", "modeling_llama", "train"]

import_deepspeed()
