"""Downstream tasks of a test: YAML files of lm-evaluation-harness with their data beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

QUESTIONS: list[dict[str, Any]] = [
    {"question": f"def f{n}(a, b):\n    return a", "choices": [" + b", " = 12", "?"], "answer": n % 3} for n in range(9)
]
TASKS: dict[str, dict[str, Any]] = {
    "endings": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "continued": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{continuation}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
    },
}


def write_tasks(folder: Path, *, continuations: list[str]) -> Path:
    """`continuations`: what is right for each question of the task `continued`."""
    folder.mkdir()
    rows = [{**row, "continuation": text} for row, text in zip(QUESTIONS, continuations, strict=True)]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}, "test_split": "test"}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **task}))
    return folder
