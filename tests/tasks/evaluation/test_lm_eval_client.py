"""lm-evaluation-harness scores a served model as `shardline evaluate` scores the registered one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.command import main
from tests.support.lm_eval_tasks import write_tasks
from tests.support.mlflow_store import Store
from tests.support.serving import server

CONTEXT = 32


@pytest.mark.slow
def test_its_client_of_completions_and_evaluate_give_equal_scores(
    champion: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = write_tasks(tmp_path / "tasks", continuations=["no"] * 9)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", champion.uri)
    assert main(["evaluate", "tiny/1", "--tasks", str(tasks), "--json"]) == 0
    evaluated = {score["task"]: score for score in json.loads(capsys.readouterr().out)["tasks"]}
    with server(champion) as (client, _), contextlib.chdir(tasks):  # the tasks' data lies beside them
        # A token more than the context, which the model need not see to be asked for it, and one that it adds.
        options = {"model": "tiny", "base_url": f"{client.base_url}/v1/completions", "max_length": CONTEXT + 2}
        found: Any = simple_evaluate(
            model="local-completions",
            model_args=options,
            tasks=list(evaluated),
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            batch_size=4,
            bootstrap_iters=10,
        )
    assert evaluated.keys() == {"endings", "continued", "whole"}
    for task, score in evaluated.items():
        assert found["results"][task][f"{score['metric']},none"] == pytest.approx(score["value"], rel=1e-5), task
    assert found["results"]["endings"]["acc,none"] > 0
