"""Loads the downstream tasks that a config names, with their data, by lm-evaluation-harness (Gao et al. 2021).

    python -m training.evaluation.lm_eval_tasks EVALUATION_JSON

loads them in a separate process before training, and exits with 2 and one line if one cannot be loaded.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from training.config.evaluation import EvaluationConfig

SIMILAR = 5  # number of names in an error message
EXAMPLES_SEED = 1234  # the harness's default seed for few-shot examples


def main(content: str) -> int:
    try:
        load_tasks(EvaluationConfig.model_validate_json(content))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def load_tasks(wanted: EvaluationConfig) -> dict[str, Any]:
    """Return the tasks for `lm_eval.evaluator.evaluate`. Without evaluation.tasks, all tasks that the files define.

    A file's relative `data_files` are relative to the file. Raises ValueError for an unknown task or data that cannot
    be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    found = _in_files(wanted.task_files)
    names = list(wanted.tasks) or list(found)
    known = found if all(name in found for name in names) else _of_the_harness() | found
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        if name not in known:
            raise ValueError(_unknown(name, sorted(known)))
        manager, folder = known[name]
        try:
            with contextlib.chdir(folder):
                part: Any = manager.load([name])
        except Exception as error:  # any error of `datasets`, or of the task's own code
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"evaluation.tasks: {name} cannot be loaded ({type(error).__name__}: {reason}); its data comes from "
                "the Hugging Face hub unless its file says otherwise: check the network, or give a task by "
                "evaluation.task_files whose data lies beside it"
            ) from error
        for kind in loaded:
            loaded[kind] |= part.get(kind, {})
    for task in loaded["tasks"].values():
        _set_examples(task, wanted.few_shot)
    return loaded


def _in_files(files: tuple[str, ...]) -> dict[str, tuple[Any, Path]]:
    """Return task name -> its manager and the folder of its data, for every task that the files define."""
    found: dict[str, tuple[Any, Path]] = {}
    for given in files:
        path = Path(given).expanduser().resolve()
        if not path.exists():
            raise ValueError(f"evaluation.task_files: {given} does not exist (looked for {path}): correct the path")
        manager = TaskManager(include_path=path if path.is_dir() else path.parent, include_defaults=False)
        own = {
            name: (manager, entry.yaml_path.parent if entry.yaml_path else path)
            for name, entry in manager.task_index.items()
            if path.is_dir() or entry.yaml_path == path
        }
        if not own:
            raise ValueError(
                f"evaluation.task_files: {given} defines no task: a task's file is YAML with `task: NAME` and the "
                "other fields that lm-evaluation-harness needs (its docs/new_task_guide.md)"
            )
        found |= own
    return found


def _of_the_harness() -> dict[str, tuple[Any, Path]]:
    """Return all tasks of the harness. Reads its thousands of files, which takes 4 s."""
    manager = TaskManager()
    return {name: (manager, Path.cwd()) for name in manager.all_tasks}


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=SIMILAR, cutoff=0.5)
    listed = f"similar names are {', '.join(near)}" if near else "`lm-eval ls tasks` lists its own"
    return f"evaluation.tasks: neither lm-evaluation-harness nor evaluation.task_files has a task {name!r}; {listed}"


def _set_examples(task: Any, few_shot: int) -> None:
    """Set the number of examples, unless the task's file forbids them with 0, as the harness's own command does."""
    own = task.get_config("num_fewshot")
    if own is None:
        task.set_config(key="num_fewshot", value=max(few_shot, 0))
    elif few_shot >= 0 and own != 0:
        task.set_config(key="num_fewshot", value=few_shot)
    task.set_fewshot_seed(seed=EXAMPLES_SEED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
