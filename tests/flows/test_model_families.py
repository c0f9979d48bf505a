"""Classes with persistent buffers through the whole story: what is served has the loss of what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.registry.models import resolve
from tests.support.buffered_models import save_family
from tests.support.configs import read_plan
from tests.support.mlflow_store import Store
from tests.support.ranks import losses, run_ranks
from tests.support.serving import server
from tests.support.tiny_configs import tiny_config
from tests.support.tiny_run import VOCAB
from tests.support.user_folder import UserFolder, wait_for_step
from tests.training.checkpoint.test_model_state import held_out_loss, trained_loss
from tests.training.models.test_pretrained import loss_of_step
from training.records.checkpoint import checkpoint_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def user_folder(user_of_prefect: UserFolder) -> UserFolder:
    return user_of_prefect


def pretrain(user_folder: UserFolder, model: Path) -> list[str]:
    """The command that continues `model` on the user's corpus; the last step is validated on all held-out text."""
    return [
        *("pretrain", str(user_folder.config), "train.steps=20", "export.latency_seconds=0"),
        *("model.architecture=path", f"model.path={model}", "model.init=pretrained", "model.dropout=0"),
        *("data.tokenizer.kind=bytes", "data.tokenizer.vocab_size=0"),
        *("evaluation.every_steps=20", "evaluation.quick_sequences=100000"),
    ]


MESHES = {
    "qwen3": "parallel.tp=2",
    "gemma3_text": "parallel.pp=2",
    "mistral": "parallel.cp=2",
    "olmo3": "parallel.strategy=fsdp",
    "granite": "parallel.strategy=zero1",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "model_type", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in MESHES if name != "qwen3")]
)
def test_a_family_is_continued_killed_resumed_exported_and_served(
    model_type: str, user_folder: UserFolder, tmp_path: Path
) -> None:
    settings = tiny_config(model_type)
    settings.vocab_size = VOCAB
    folder = user_folder.folder / model_type
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    command = [
        *pretrain(user_folder, folder),
        MESHES[model_type],
        "parallel.ranks=2",
        *("checkpoint.every_steps=5", "checkpoint.keep_last=9"),  # the killed ranks may leave one more
        "train.log_every_steps=1",
    ]
    known = user_folder.run_dirs()
    killed = user_folder.start(*command, f"name={model_type}")
    run_dir = wait_for_step(user_folder, killed, known, 7)
    killed.kill()
    killed.communicate()
    outcome: dict[str, Any] = json.loads(user_folder.run("resume", run_dir.name, "--json")[0])
    assert outcome["step"] == 20
    undisturbed = tmp_path / "plan.json"
    shutil.copy(run_dir / "plan.json", undisturbed)
    run_ranks(undisturbed)
    assert losses(run_dir / "plan.json") == losses(undisturbed), "to the bit"
    assert trained_loss(run_dir / "plan.json") == trained_loss(undisturbed), "to the bit"

    plan, trained = read_plan(run_dir), losses(run_dir / "plan.json")
    assert plan.world_size == 2
    for step in (1, 6, 11, 16):
        before = checkpoint_folder(run_dir, step - 1) if step > 1 else folder
        assert trained[step] == pytest.approx(loss_of_step(step, before, plan), rel=1e-5)
    assert trained[16] < trained[1]

    store = Store(f"sqlite:///{user_folder.home}/mlflow.db", user_folder.folder, "", run_dir)
    served = resolve(f"{model_type}@champion", tracking_uri=store.uri).export_dir
    assert outcome["val_loss"] == pytest.approx(held_out_loss(run_dir / "plan.json", served), rel=1e-5)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(served), AutoTokenizer.from_pretrained(served)
    prompt = tokenizer("the sea", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    with server(store, f"{model_type}@champion") as (client, _):
        answer = client.post("/generate", json={"prompt": "the sea", "new_tokens": 8, "temperature": 0})
    assert answer.json()["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_folder_without_a_layers_mlp_ends_before_its_corpus_is_tokenized(user_folder: UserFolder) -> None:
    model = save_family(user_folder.folder / "broken", "gemma4", vocab_size=VOCAB)
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.2.mlp" not in name}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    known = set((user_folder.home / "tokens").glob("*"))
    _, err = user_folder.run(*pretrain(user_folder, model), "data.tokenizer.kind=characters", expect=2)
    assert "Gemma4ForCausalLM: it lacks model.layers.2.mlp.down_proj.weight" in err
    assert set((user_folder.home / "tokens").glob("*")) == known
    _, err = user_folder.run("plan", *pretrain(user_folder, model)[1:], expect=2)
    assert "it lacks model.layers.2.mlp.down_proj.weight" in err
