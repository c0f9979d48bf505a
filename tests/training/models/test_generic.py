"""Any class trains under the data-parallel strategies, whatever its config.json calls its sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.configs import reasons
from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks
from tests.support.repository import REPO
from tests.support.tiny_shards import VOCAB, MakeRun
from tests.training.strategies.test_strategies import COMMON, assert_equal_training
from training.models.language_model import build_model
from training.models.pretrained import load_pretrained
from training.records.plan import RunPlan

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
STEPS = 20  # so many until it has learned something
CONFIG = COMMON | {"model__architecture": "path", "train__steps": STEPS}
NEOX = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 64, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("neox")
    AutoConfig.for_model("gpt_neox", **NEOX, hidden_dropout=0.0, attention_dropout=0.0).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(neox: str, make_run: MakeRun) -> Callable[[str], Path]:
    """The run of one process; made once per packing."""
    made: dict[str, Path] = {}

    def run(packing: str) -> Path:
        if packing not in made:
            config = CONFIG | {"model__path": neox, "train__packing": packing}
            made[packing] = make_run(f"alone {packing}", **config, parallel__strategy="single", train__micro_batch=8)
            run_ranks(made[packing])
        return made[packing]

    return run


@pytest.mark.parametrize("layout", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero3"))])
@pytest.mark.parametrize("packing", ["stream", "padded"])
def test_a_generic_class_trains_under_the_data_parallel_strategies(
    layout: str, packing: str, neox: str, alone: Callable[[str], Path], make_run: MakeRun
) -> None:
    config = CONFIG | {"model__path": neox, "train__packing": packing}
    ranks, parallel = LAYOUTS[layout]
    shared = make_run(f"{layout} {packing}", ranks=ranks, **config, **parallel, train__micro_batch=1)
    run_ranks(shared)
    assert_equal_training(alone(packing), shared)


OTHERS: dict[str, dict[str, Any]] = {
    "roberta": SIZES,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "gemma3n_text": SIZES
    | {"intermediate_size": [64, 64], "head_dim": 8, "num_key_value_heads": 2}
    | {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "laurel_rank": 4}
    | {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHERS)
def test_random_weights_of_classes_with_other_field_names_train(
    model_type: str, tmp_path: Path, make_run: MakeRun
) -> None:
    config = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, **OTHERS[model_type]}
    AutoConfig.for_model(model_type, **config).save_pretrained(tmp_path)
    kind = "bert" if "bert" in model_type else "path"
    single = {"model__architecture": kind, "model__path": str(tmp_path), "parallel__strategy": "single"}
    longer = {"train__steps": 300, "train__learning_rate": 1e-2, "train__global_batch": 32, "train__micro_batch": 32}
    plan_path = make_run(model_type, **CONFIG | single | (longer if kind == "bert" else {}))
    run_ranks(plan_path)
    logged = list(losses(plan_path).values())
    first, last = (logged[:20], logged[-50:]) if kind == "bert" else (logged[:1], logged[-1:])
    assert sum(last) / len(last) < sum(first) / len(first) - 0.1
    assert RunPlan.read(plan_path).shape.layers == 2


@pytest.mark.parametrize(("rows", "end_id"), [(18, 0), (18, 60)])
def test_positions_that_are_counted_from_the_pad_token_on_suffice(
    rows: int, end_id: int, tmp_path: Path, make_run: MakeRun
) -> None:
    AutoConfig.for_model("roberta", **SIZES, vocab_size=VOCAB, max_position_embeddings=rows).save_pretrained(tmp_path)
    settings = {"model__architecture": "bert", "model__path": str(tmp_path), "train__context": 16}
    plan = RunPlan.read(make_run(f"positions {end_id}", **settings)).model_copy(update={"end_id": end_id})
    assert reasons(plan, "its table gets 17 rows for the 16 positions")
    model = build_model(plan)
    inputs = torch.full((1, 16), 7)
    assert model(inputs, inputs).isfinite()
    with pytest.raises(ValueError, match=r"train.context = 17 exceeds the 16 positions .*: its type is roberta"):
        make_run("too long", **settings | {"train__context": 17})


def test_a_class_that_reads_images_is_refused_by_name(tmp_path: Path, make_run: MakeRun) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3n", "text_config": {"hidden_size": 32}}')
    with pytest.raises(
        ValueError, match=r"of type gemma3n, whose config.json has none of hidden_size, .* beside text_config"
    ):
        make_run("images", model__dropout=0.0, model__architecture="path", model__path=str(tmp_path))


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "vision"),
    [
        ("gemma3", {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}),
        ("mistral3", {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8}),
    ],
)
def test_the_text_part_saved_as_the_docs_say_is_the_same_model(
    model_type: str, vision: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind = {"model_type": "gemma3_text" if model_type == "gemma3" else "mistral", "num_key_value_heads": 2}
    parts = {"text_config": SIZES | kind | {"vocab_size": 300, "head_dim": 8}, "vision_config": VISION | vision}
    config = AutoConfig.for_model(model_type, **parts, image_token_index=9)
    AutoModelForImageTextToText.from_config(config).save_pretrained("gemma-3-4b-pt")
    page = (REPO / "docs/tutorials/continue.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0])
    whole, ids = AutoModelForImageTextToText.from_pretrained("gemma-3-4b-pt").eval(), torch.tensor([[3, 4, 5, 6]])
    part = load_pretrained(AutoModelForCausalLM, tmp_path / "gemma-3-4b-text", dtype=torch.float32).eval()
    assert torch.equal(part(ids).logits, whole(ids).logits)
