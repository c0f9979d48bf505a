"""Classes with persistent buffers through the whole story: what is served has the loss of what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.registry.models import resolve
from tests.support.buffered_models import buffers_in, save_family
from tests.support.tiny_run import VOCAB
from tests.support.user_folder import UserFolder
from tests.training.checkpoint.test_model_state import held_out_loss, trained_loss
from training.checkpoint.safetensors_files import TensorFiles

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory, measured_hardware: Path) -> UserFolder:
    return UserFolder(tmp_path_factory.mktemp("user"), hardware=measured_hardware)


@pytest.mark.parametrize("family", ["gemma4", "deepseek-v3"])
def test_the_served_model_has_the_loss_of_the_trained_one(family: str, user_folder: UserFolder) -> None:
    model = save_family(user_folder.folder / family, family, vocab_size=VOCAB)
    out, _ = user_folder.run(
        *(
            "pretrain",
            str(user_folder.config),
            "--json",
            f"name={family}",
            "train.steps=20",
            "export.latency_seconds=0",
        ),
        *("model.architecture=path", f"model.path={model}", "model.init=pretrained", "model.dropout=0"),
        *("data.tokenizer.kind=bytes", "data.tokenizer.vocab_size=0", "evaluation.every_steps=20"),
        *("evaluation.quick_sequences=100000", "export.latency_seconds=0"),
    )
    outcome: dict[str, Any] = json.loads(out)
    assert outcome["alias"] == "champion"
    run_dir = user_folder.home / outcome["run_id"]
    served = resolve(f"{family}@champion", tracking_uri=f"sqlite:///{user_folder.home}/mlflow.db").export_dir
    loss = trained_loss(run_dir / "plan.json")
    assert outcome["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert held_out_loss(run_dir / "plan.json", served) == pytest.approx(loss, rel=1e-5)
    began, kept = TensorFiles(model, "model"), TensorFiles(served, "model")
    assert all(torch.equal(began[name], kept[name]) for name in buffers_in(began))
