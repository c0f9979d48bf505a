"""Tokenizes a folder of JSON lines in one way, timed: Shardline, `datasets.map` or datatrove.

    python -m benchmarks.baselines.tokenizing WAY CORPUS TOKENIZER OUTPUT WORKERS

The last line is one JSON object: seconds, tokens, and a digest of all documents' tokens that does not depend on their
order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

END = "<|endoftext|>"
Tokens = Callable[[], Iterable[np.ndarray]]  # uint16 tokens, whole documents, each with its end token


def shardline(corpus: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, Tokens]:
    from transformers import AutoTokenizer  # noqa: F401, imported before the clock starts, as in the other two ways

    from tasks.data.corpus import prepare_corpus
    from training.config.data import DataConfig
    from training.shards.stream import TokenStream

    config = {"path": str(corpus), "split": "all", "processes": workers}
    data = DataConfig.model_validate(config | {"tokenizer": {"kind": "pretrained", "path": str(tokenizer)}})
    began = time.perf_counter()
    folder, shards = prepare_corpus(data, tokens_home=output)
    seconds = time.perf_counter() - began
    return seconds, lambda: [TokenStream(folder, "validation").read(0, shards.tokens("validation"))]


def datasets(corpus: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, Tokens]:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = loaded(batch["text"], return_attention_mask=False)["input_ids"]
        return {"ids": [[*ids, loaded.eos_token_id] for ids in texts]}

    began = time.perf_counter()
    rows = load_dataset("json", data_dir=str(corpus), split="train", cache_dir=str(output))
    rows = rows.map(encode, batched=True, remove_columns=["text"], num_proc=workers if workers > 1 else None)
    seconds = time.perf_counter() - began
    return seconds, lambda: (np.array(row["ids"], np.uint16) for row in rows)


def datatrove(corpus: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, Tokens]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    file = str(tokenizer / "tokenizer.json")
    steps = [JsonlReader(str(corpus)), DocumentTokenizer(str(output), file, eos_token=END, shuffle_documents=False)]
    executor = LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=str(output / "logs"))
    began = time.perf_counter()
    executor.run()
    seconds = time.perf_counter() - began
    return seconds, lambda: (np.fromfile(path, np.uint16) for path in output.glob("*.ds"))


WAYS = {"shardline": shardline, "datasets": datasets, "datatrove": datatrove}


def digest_of(tokens: Iterable[np.ndarray], *, end_id: int) -> tuple[int, str]:
    """Return the number of tokens, and a digest of the documents that does not depend on their order."""
    number = total = 0
    for part in tokens:
        number += len(part)
        ends = [0, *(np.flatnonzero(part == end_id) + 1).tolist()]
        assert ends[-1] == len(part)
        for first, stop in itertools.pairwise(ends):
            total += int.from_bytes(hashlib.sha256(part[first:stop].astype("<u2").tobytes()).digest())
    return number, f"{total % 2**256:064x}"


def main(way: str, corpus: Path, tokenizer: Path, output: Path, workers: int) -> None:
    from tokenizers import Tokenizer

    seconds, tokens = WAYS[way](corpus, tokenizer, output, workers)
    end_id = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id(END)
    number, digest = digest_of(tokens(), end_id=end_id)
    print(json.dumps({"seconds": seconds, "tokens": number, "digest": digest}))


if __name__ == "__main__":
    corpus, tokenizer, output = map(Path, sys.argv[2:5])
    main(sys.argv[1], corpus, tokenizer, output, int(sys.argv[5]))
