"""The tokenizer of an export: the one beside the shards, which begins texts as training did."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from tokenizers import Tokenizer, processors

from training.exports.parity import held_out_texts
from training.records.plan import RunPlan
from training.tokenizer.pretrained import SAMPLES
from training.tokenizer.text_encoder import TextEncoder, ids_of, tokens_around


def copy_tokenizer(plan: RunPlan, folder: Path) -> None:
    """Copy the tokenizer beside the shards to `folder`. Other programs that load it put the tokens before a text that
    training put before each document; and behind it none, or with a masked model those that they put there before.
    """
    shutil.copytree(Path(plan.shards_dir) / "tokenizer", folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    before, behind = tokens_around(tokenizer)
    begin, end = plan.text_encoding.bos, behind if plan.config.objective == "masked" else ()
    if (before, behind) == (begin, end):
        return
    added = list(dict.fromkeys((*begin, *end)))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=list(zip(added, ids_of(tokenizer, added), strict=True)),
    )
    tokenizer.save(str(file))


def why_others_differ(plan: RunPlan, folder: Path) -> str:
    """Return which tokens AutoTokenizer, and so vLLM and lm-evaluation-harness, give a text otherwise than training
    did, and what to do; empty if none. Special tokens in texts are left out: data.tokenizer has its own rule for them.
    """
    import transformers

    encoder = TextEncoder(folder, plan.text_encoding.model_dump())
    behind = ids_of(encoder.tokenizer, tokens_around(encoder.tokenizer)[1])
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # by a class that transformers takes for this type of model
        return f"cannot open the tokenizer ({error}): load it with PreTrainedTokenizerFast.from_pretrained"
    windows = [encoder.tokenizer.decode(ids.tolist()) for texts in held_out_texts(plan)[:1] for ids in texts]
    for text in (*windows, *SAMPLES):
        with contextlib.suppress(ValueError):  # of a text that the vocabulary lacks
            own = [*encoder.encode(text), *behind]
            if encoder.special_pattern.search(text) or theirs(text)["input_ids"] == own:
                continue
            return (
                f"gives other tokens than training had, as of {text[:40]!r}: transformers {transformers.__version__} "
                f"has {type(theirs).__name__} for this type of model, whatever tokenizer_config.json says: load it "
                "with PreTrainedTokenizerFast.from_pretrained, and send token IDs to servers that use AutoTokenizer"
            )
    return ""
