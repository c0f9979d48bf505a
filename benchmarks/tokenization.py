"""Compares tokenization by Shardline, `datasets.map` and datatrove's tokenizer step, with the same tokenizer.

    python -m benchmarks.tokenization [--quick]

The text is Python source of this machine, in four files of JSON lines, without the few files that hold the end token's
name, which is a token to the others and text to Shardline; the tokenizer is a byte-level BPE of 4,096
tokens that was trained on a part of it. Each way runs in a process of its own (benchmarks/baselines/tokenizing.py), on
1 core with 1 worker and on 2 cores with 2, and is timed from the end of its imports until its tokens are on disk:
Shardline's with hashes of text and tokens, fsync and a manifest, the others' as they leave them. Figures are medians
over the repetitions.

All ways take the same 24 MB (every twentieth document), which must give the same tokens. That takes the others 5 to 15
s and Shardline less than 1 s, much of it to start. So its rate is measured on all of the text, 480 MB, which takes it
seconds too: as JSON lines and as plain text, four large files each. Its start is said apart.

The last line is one JSON object: `mb_per_s_per_core` by way and number of workers (shardline: JSON lines;
shardline_text: plain text; both on all of the text), `ratio_vs_datasets` and `ratio_vs_datatrove` (Shardline's rate on
JSON lines over theirs, on as many workers as there are cores, 2 at most), `ratios_with_start` (the same by way, all on
the 24 MB), `start_s` (by number of workers: of Shardline's time on the 24 MB what does not grow with the text, by its
time on all of the text), `linearity_2_workers` (Shardline's rate on 2 over twice that on 1, on all JSON lines, start
included; null on one core), `linearity_of_two_apart` (what the machine allows: the rate on 1, each of two processes
with 1 beside the other, over that of one alone), `linearity_without_start` (the first of the rates at which its time
grows with the text), `identical` (whether all documents have the same tokens in all ways, and those of the library
tokenizers alone with each of the tests' `tokenizers`), `failed` (by way: why it could not run; its ratio is null), `mb`
of all text, `mb_compared` and `documents`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.baselines.tokenizing import END, WAYS
from tasks.data.corpus import prepare_corpus
from tests.support.tokenizer_cases import TOKENIZERS
from training.config.data import DataConfig
from training.shards.stream import TokenStream

NUM_BYTES = 480_000_000
FILES = 4
COMPARED_SHARE = 20  # of so many documents one is compared
CASE_DOCUMENTS = 20
KINDS = {"lines": "shardline", "text": "shardline_text"}
SPECIAL = re.compile(r"</?s>|<\||<unk>|\[(UNK|SEP)\]")  # which of them are special in a text is the rule's matter


def write_corpus(folder: Path, *, num_bytes: int) -> tuple[int, int]:
    """Write the machine's Python source, a document for each file, to `folder`: `compared` and `lines` have JSON lines,
    the first of a twentieth of the documents; `text` has plain text. Return documents and bytes of `compared`.
    """
    documents = compared = written = 0
    with contextlib.ExitStack() as stack:
        files = {}
        for kind, suffix in (("compared", "jsonl"), ("lines", "jsonl"), ("text", "txt")):
            (folder / kind).mkdir(parents=True)
            paths = [folder / kind / f"{index}.{suffix}" for index in range(FILES)]
            files[kind] = [stack.enter_context(path.open("w", encoding="utf-8", newline="")) for path in paths]
        for number, text in enumerate(_python_source()):
            line, size = json.dumps({"text": text}, ensure_ascii=False) + "\n", len(text.encode())
            files["lines"][number % FILES].write(line)
            files["text"][number % FILES].write(text)
            if number % COMPARED_SHARE == 0:
                files["compared"][documents % FILES].write(line)
                documents, compared = documents + 1, compared + size
            written += size
            if written >= num_bytes:
                return documents, compared
    raise RuntimeError(f"this Python's packages have {written} bytes of source, {num_bytes} are needed")


def _python_source() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError):
            if (text := path.read_text(encoding="utf-8")) and END not in text:
                yield text


def train_tokenizer(corpus: Path, folder: Path) -> Path:
    """Return the folder of a tokenizer that is trained on the corpus."""
    data = DataConfig.model_validate(
        {"path": str(corpus / "0.jsonl"), "tokenizer": {"kind": "bpe", "vocab_size": 4096, "sample_mib": 8}}
    )
    shards, _ = prepare_corpus(data, tokens_home=folder)
    return shards / "tokenizer"


def measure(way: str, corpus: Path, tokenizer: Path, *, workers: int, first_core: int = 0) -> dict[str, Any]:
    """Return `seconds`, `tokens` and `digest` of a way in a process of its own, on as many cores as workers."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[first_core:][:workers]))
    with tempfile.TemporaryDirectory() as output:
        program = [sys.executable, "-m", "benchmarks.baselines.tokenizing"]
        command = ["taskset", "-c", cores, *program, way, str(corpus), str(tokenizer), output, str(workers)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def differing_cases(corpus: Path, folder: Path) -> list[str]:
    """Return the tests' tokenizers with which Shardline's shards have other tokens than `tokenizers` alone gives."""
    lines = (corpus / "0.jsonl").read_text(encoding="utf-8").splitlines()[:CASE_DOCUMENTS]
    texts = [text for text in (json.loads(line)["text"] for line in lines) if not SPECIAL.search(text)]
    (folder / "case").mkdir(parents=True)
    (folder / "case" / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    differing = []
    for name, make in TOKENIZERS.items():
        made = make(folder / name)
        settings = {"kind": "pretrained", "path": str(made), "bos": "no"}
        data = DataConfig.model_validate({"path": str(folder / "case"), "split": "all", "tokenizer": settings})
        tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
        try:
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception:  # a vocabulary without these words and without an unknown token: refused here as there
            with contextlib.suppress(ValueError):
                prepare_corpus(data, tokens_home=folder / "tokens")
                differing.append(name)
            continue
        shards, manifest = prepare_corpus(data, tokens_home=folder / "tokens")
        found = TokenStream(shards, "validation").read(0, manifest.tokens("validation"))
        expected = [token for each in encodings for token in (*each.ids, manifest.end_id)]
        differing += [] if found.tolist() == expected else [name]
    return differing


def run(*, num_bytes: int, repetitions: int) -> dict[str, Any]:
    numbers = (1, 2) if len(os.sched_getaffinity(0)) > 1 else (1,)
    most = max(numbers)
    with tempfile.TemporaryDirectory(prefix="shardline-tokenization-") as home:
        folder = Path(home)
        documents, compared = write_corpus(folder, num_bytes=num_bytes)
        tokenizer = train_tokenizer(folder / "compared", folder / "trained")

        def measured(way: str, kind: str, workers: int) -> list[dict[str, Any]]:
            return [measure(way, folder / kind, tokenizer, workers=workers) for _ in range(repetitions)]

        rows, failed = dict[tuple[str, int], list[dict[str, Any]]](), dict[str, str]()
        for workers, way in itertools.product(numbers, WAYS):
            try:
                rows[way, workers] = measured(way, "compared", workers)
            except RuntimeError as error:  # of another's way: the others are compared all the same
                if way == "shardline":
                    raise
                failed[way] = str(error).splitlines()[-1]
        large = {(kind, workers): measured("shardline", kind, workers) for workers in numbers for kind in KINDS}
        with ThreadPoolExecutor(most) as pool:  # each core has a process of its own
            alone = functools.partial(measure, "shardline", folder / "lines", tokenizer, workers=1)
            apart = [list(pool.map(lambda core: alone(first_core=core), range(most))) for _ in range(repetitions)]
        differing = differing_cases(folder / "compared", folder / "cases")
    rates = {key: compared / 1e6 / _seconds(each) for key, each in rows.items()}
    with_start = {way: rates["shardline", most] / rates[way, most] for way in WAYS if (way, most) in rates}
    times = {n: (_seconds(rows["shardline", n]), _seconds(large["lines", n])) for n in numbers}
    s_per_byte = {n: (all_s - compared_s) / (num_bytes - compared) for n, (compared_s, all_s) in times.items()}
    start_s = {n: compared_s - compared * s_per_byte[n] for n, (compared_s, _) in times.items()}
    rates |= {(KINDS[kind], n): num_bytes / 1e6 / _seconds(each) for (kind, n), each in large.items()}
    return {
        "mb_per_s_per_core": {
            way: {str(n): round(rates[way, n] / n, 2) for n in numbers if (way, n) in rates}
            for way in dict.fromkeys((*KINDS.values(), *WAYS))
        },
        **{
            f"ratio_vs_{way}": round(rates["shardline", most] / rates[way, most], 2) if (way, most) in rates else None
            for way in ("datasets", "datatrove")
        },
        "ratios_with_start": {way: round(ratio, 2) for way, ratio in with_start.items() if way != "shardline"},
        "start_s": {str(n): round(seconds, 2) for n, seconds in start_s.items()},
        "failed": failed,
        "linearity_2_workers": round(rates["shardline", 2] / rates["shardline", 1] / 2, 3) if most == 2 else None,
        "linearity_of_two_apart": (
            round(_seconds(large["lines", 1]) / _seconds(itertools.chain(*apart)), 3) if most == 2 else None
        ),
        "linearity_without_start": round(s_per_byte[1] / s_per_byte[2] / 2, 3) if most == 2 else None,
        "identical": not differing
        and len({(row["digest"], row["tokens"]) for each in rows.values() for row in each}) == 1,
        "tokenizers": {name: name not in differing for name in TOKENIZERS},
        "tokens": rows["shardline", 1][0]["tokens"],
        "mb": round(num_bytes / 1e6, 1),
        "mb_compared": round(compared / 1e6, 1),
        "documents": documents,
        "repetitions": repetitions,
    }


def _seconds(rows: Iterable[dict[str, Any]]) -> float:
    return statistics.median(row["seconds"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once instead of three times")
    quick = parser.parse_args().quick
    result = run(num_bytes=NUM_BYTES, repetitions=1 if quick else 3)
    print(
        f"compared on {result['mb_compared']:.0f} MB, {result['documents']:,} documents, {result['tokens']:,} tokens; "
        f"Shardline on {result['mb']:.0f} MB; MB/s per core"
    )
    for way, rates in result["mb_per_s_per_core"].items():
        row = "".join(f"{rate:8.2f} on {workers}" for workers, rate in rates.items())
        print(f"{way:16}{row}" + (f"  failed: {result['failed'][way]}" if way in result["failed"] else ""))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
