"""The tokenizer of an export: the one beside the shards, which begins texts as training did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, processors

from training.records.plan import RunPlan
from training.records.record import read_fields
from training.tokenizer.text_encoder import ids_of, tokens_around

OF_LLAMAS = ("add_bos_token", "add_eos_token")  # their class in transformers makes its own post-processor by these


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
    found = read_fields(folder / "tokenizer_config.json")
    config = {name: value for name, value in found.items() if name not in OF_LLAMAS}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
